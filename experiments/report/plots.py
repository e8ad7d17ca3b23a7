"""The look that all plots share."""

from __future__ import annotations

from bokeh import plotting

from experiments.report import style


def dress(plot: plotting.figure) -> None:
    """Axes, grid and toolbar."""
    plot.toolbar.logo = None
    plot.outline_line_color = None
    for axis in plot.axis:
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = "13px"
        axis.axis_label_text_color = style.INK
        axis.major_label_text_font_size = "12px"
        axis.major_label_text_color = style.MUTED
        axis.axis_line_color = "#b9c1c8"
        axis.major_tick_line_color = "#b9c1c8"
        axis.minor_tick_line_color = None
    plot.grid.grid_line_color = "#eceff1"


def dress_legend(plot: plotting.figure) -> None:
    """A legend above the plot whose entries hide their lines when clicked."""
    if not plot.legend:
        return
    legend = plot.legend[0]
    legend.orientation = "horizontal"
    legend.label_text_font_size = "12px"
    legend.border_line_color = None
    legend.margin, legend.spacing = 0, 16
    legend.click_policy = "hide"
    plot.add_layout(legend, "above")

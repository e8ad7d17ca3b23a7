"""Training and held-out loss over time (selection included), steps and tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh import layouts, models, plotting

from experiments import history
from experiments.report import ledger, plots, style
from experiments.report import record as record_lib

_TRAIN, _SMOOTH, _EVAL = "#A9C6DA", "#0072B2", "#D55E00"
_AXES = (
    ("seconds", "Time since the run started, selection included (s)"),
    ("step", "Optimiser steps"),
    ("label_tokens", "Label tokens trained on"),
)


def figure(record: record_lib.RunRecord) -> models.LayoutDOM:
    """Loss curves with a switch for the horizontal axis; needs `record.metrics`."""
    plot = plotting.figure(
        height=380,
        sizing_mode="stretch_width",
        tools="pan,box_zoom,wheel_zoom,reset,save",
        active_scroll=None,
        x_axis_label=_AXES[0][1],
        y_axis_label="Loss (nats per label token)",
        x_range=models.DataRange1d(start=0, range_padding=0.02),
    )
    plots.dress(plot)
    plot.xaxis.formatter = models.NumeralTickFormatter(format="0,0")
    spans = _stage_spans(record, plot)
    sources = _draw(record, plot)
    choice = models.RadioButtonGroup(labels=["time", "steps", "label tokens"], active=0)
    choice.js_on_change(
        "active",
        models.CustomJS(
            args={
                "sources": sources,
                "axis": plot.xaxis[0],
                "spans": spans,
                "names": [name for name, _ in _AXES],
                "titles": [title for _, title in _AXES],
            },
            code="""
const name = names[this.active];
for (const source of sources) source.data = {...source.data, x: source.data[name]};
axis.axis_label = titles[this.active];
for (const span of spans) span.visible = name === "seconds";
""",
        ),
    )
    return layouts.column(choice, plot, sizing_mode="stretch_width")


def by_cluster(record: record_lib.RunRecord) -> models.LayoutDOM | None:
    """Smoothed training loss of each cluster over steps; None without figures."""
    points = [point for point in record.history.training if point.clusters]
    if len(points) < 3:
        return None
    plot = plotting.figure(
        height=300,
        sizing_mode="stretch_width",
        tools="pan,box_zoom,reset,save",
        x_axis_label=_AXES[1][1],
        y_axis_label="Training loss (nats per label token)",
    )
    plots.dress(plot)
    for name in sorted(points[-1].clusters, key=int):
        inside = [point for point in points if name in point.clusters]
        plot.line(
            [point.step for point in inside],
            smoothed([point.clusters[name] for point in inside]),
            line_width=2,
            color=style.color(int(name)),
            line_dash="solid" if int(name) < len(style.PALETTE) else "dashed",
            legend_label=f"cluster {name}",
        )
    plots.dress_legend(plot)
    return plot


def _stage_spans(record: record_lib.RunRecord, plot: plotting.figure) -> list[Any]:
    """Shades the stages before training along the time axis."""
    spans, begin = [], 0.0
    for line in record.ledger:
        if line["stage"] == "train":
            break
        end = begin + float(line["seconds"])
        shade = ledger.shade(line["stage"])
        box = models.BoxAnnotation(
            left=begin, right=end, fill_color=shade, fill_alpha=0.22, line_color=None
        )
        plot.add_layout(box)
        spans.append(box)
        begin = end
    return spans


def _columns(points: Sequence[history.Point]) -> dict[str, np.ndarray]:
    names = ("step", "seconds", "label_tokens", "loss")
    columns = {
        name: np.array([getattr(point, name) for point in points], float)
        for name in names
    }
    return columns | {"x": columns["seconds"]}


def _draw(record: record_lib.RunRecord, plot: plotting.figure) -> list[Any]:
    sources = []
    points = record.history.training
    if points:
        losses = smoothed([point.loss for point in points])
        soft = [
            dataclasses.replace(point, loss=float(loss))
            for point, loss in zip(points, losses)
        ]
        source = models.ColumnDataSource(_columns(points))
        plot.line(
            "x",
            "loss",
            source=source,
            color=_TRAIN,
            line_width=1.5,
            legend_label="training",
        )
        smooth = models.ColumnDataSource(_columns(soft))
        curve = plot.line(
            "x",
            "loss",
            source=smooth,
            color=_SMOOTH,
            line_width=2.5,
            legend_label="training, smoothed",
        )
        _hover(plot, curve, "training")
        sources += [source, smooth]
    points = record.history.heldout
    if points:
        source = models.ColumnDataSource(_columns(points))
        plot.line(
            "x",
            "loss",
            source=source,
            color=_EVAL,
            line_width=2,
            legend_label="held-out",
        )
        dots = plot.scatter(
            "x", "loss", source=source, color=_EVAL, size=9, legend_label="held-out"
        )
        _hover(plot, dots, "held-out")
        sources.append(source)
    plots.dress_legend(plot)
    return sources


def _hover(plot: plotting.figure, renderer: Any, name: str) -> None:
    plot.add_tools(
        models.HoverTool(
            renderers=[renderer],
            mode="mouse",
            tooltips=[
                (name, "@loss{0.0000} nats"),
                ("step", "@step{0,0}"),
                ("time", "@seconds{0.0} s"),
            ],
        )
    )


def smoothed(losses: Sequence[float], half_life: float | None = None) -> np.ndarray:
    """Exponential mean without start-up bias; half-life: a twentieth of the run."""
    half_life = max(len(losses) / 20, 1.0) if half_life is None else half_life
    decay = 0.5 ** (1 / half_life)
    total, weight, result = 0.0, 0.0, np.empty(len(losses))
    for i, value in enumerate(losses):
        total, weight = decay * total + value, decay * weight + 1
        result[i] = total / weight
    return result


def stage_legend(record: record_lib.RunRecord) -> str:
    """Names of the shaded stages before training."""
    stages = []
    for line in record.ledger:
        if line["stage"] == "train":
            break
        stages.append(line["stage"])
    return style.swatches(stages, [ledger.shade(stage) for stage in stages])


def per_source(record: record_lib.RunRecord) -> str:
    """Held-out loss of each source and family, first and last, with bars."""
    points = record.history.heldout
    if len(points) < 2 or not points[0].sources:
        return ""
    first, last = points[0], points[-1]
    pairs = [
        ("all label tokens", first.loss, last.loss),
        ("mean over sources", first.mean_over_sources, last.mean_over_sources),
    ]
    for title, begin, end in (
        ("", first.sources, last.sources),
        ("family ", first.groups, last.groups),
    ):
        names = sorted((name for name in begin if name in end), key=lambda n: -end[n])
        pairs += [(title + name, begin[name], end[name]) for name in names]
    top = max(max(a, b) for _, a, b in pairs) * 1.05
    rows = [
        (
            name,
            f"{a:.3f}",
            f"{b:.3f}",
            f"{style.change(b / a - 1)}",
            _dumbbell(a, b, top),
        )
        for name, a, b in pairs
    ]
    heads = ("held-out loss (nats per label token)", "start", "end", "change", "")
    legend = style.swatches(("start", "end"), (_TRAIN, _EVAL))
    match = ""
    if first.exact_match is not None and last.exact_match is not None:
        match = style.note(
            "Generated answers that are exactly right:"
            f" {style.percent(first.exact_match)} at the start,"
            f" {style.percent(last.exact_match)} at the end."
        )
    return (
        "<h3>Held-out loss by source</h3>"
        + legend
        + style.folded_table(heads, rows, 14, numeric=(1, 2, 3), raw=(4,))
        + match
    )


def _dumbbell(first: float, last: float, top: float) -> str:
    a, b = 100 * first / top, 100 * last / top
    low, high = min(a, b), max(a, b)
    dot = (
        '<i style="position:absolute;left:calc({:.2f}% - 5px);top:2px;width:10px;'
        'height:10px;border-radius:5px;background:{}"></i>'
    )
    return (
        '<div style="position:relative;height:14px;min-width:240px;'
        'border-left:1px solid #b9c1c8">'
        f'<i style="position:absolute;left:{low:.2f}%;width:{high - low:.2f}%;top:6px;'
        'height:2px;background:#b9c1c8"></i>'
        + dot.format(a, _TRAIN)
        + dot.format(b, _EVAL)
        + "</div>"
    )

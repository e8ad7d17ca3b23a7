"""The page of a comparison: table, figures, commands, in one HTML file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh import models, plotting
from etils import epath

from clusterjax import files
from experiments import comparison
from experiments.report import page as page_lib
from experiments.report import plots, style


def write(result: comparison.Comparison, path: epath.PathLike, title: str) -> None:
    """Writes the table and the figures as one self-contained HTML file."""
    page = page_lib.Page()
    rows = comparison.table(result)
    used = comparison.used_columns(rows)
    page.add(
        "table",
        "Results",
        style.escape(comparison.caption(result)),
        _columns(rows, [i for i in used if i < comparison.MAIN_COLUMNS])
        + "<h3>Balance, clusters, answers</h3>"
        + _columns(rows, [0, *(i for i in used if i >= comparison.MAIN_COLUMNS)]),
    )
    for name, heading, axis, column in (
        ("time", "Quality over time", "Total time, selection included (s)", "seconds"),
        (
            "tokens",
            "Quality over label tokens",
            "Label tokens trained on",
            "label_tokens",
        ),
    ):
        figure = _curves(result, column, axis)
        page.add(name, heading, "Each line is a run.", page.figure(name, figure))
    page.add(
        "sources",
        "Quality by source",
        "Held-out loss at the end, mean over seeds; one dot for each method.",
        page.figure("sources", _by_source(result)),
    )
    found = comparison.mechanism_table(result)
    if found:
        page.add(
            "mechanism",
            "Mechanism",
            "On a whole-model sketch whose projections are not those that chose.",
            style.table(comparison.MECHANISM_HEADS, found, numeric=range(1, 8)),
        )
    page.add("runs", "Runs", "Each can be made again by its command.", _runs(result))
    header = f'<header><div><div class="top"><h1>{style.escape(title)}</h1></div></div>'
    files.write_text(path, page.render(header + "</header>", title, ""))


def _columns(rows: Sequence[Sequence[str]], columns: Sequence[int]) -> str:
    return style.table(
        [comparison.HEADS[i] for i in columns],
        [[row[i] for i in columns] for row in rows],
        numeric=range(1, len(columns)),
    )


def _curves(result: comparison.Comparison, column: str, axis: str) -> models.LayoutDOM:
    plot = plotting.figure(
        height=400,
        sizing_mode="stretch_width",
        tools="pan,box_zoom,wheel_zoom,reset,save",
        active_scroll=None,
        x_axis_label=axis,
        y_axis_label="Held-out loss (nats per label token)",
    )
    plots.dress(plot)
    plot.xaxis.formatter = models.NumeralTickFormatter(format="0,0")
    for i, group in enumerate(result.groups):
        for row in group.rows:
            source = models.ColumnDataSource(
                {
                    "x": [_place(row, point, column) for point in row.heldout],
                    "loss": [point["loss"] for point in row.heldout],
                    "run": [f"{group.title}, seed {row.seed}"] * len(row.heldout),
                }
            )
            keys: dict[str, Any] = {
                "source": source,
                "color": style.color(i),
                "legend_label": group.title,
            }
            plot.line("x", "loss", line_width=2, **keys)
            dots = plot.scatter("x", "loss", size=8, marker=style.marker(i), **keys)
            plot.add_tools(
                models.HoverTool(
                    renderers=[dots],
                    tooltips=[
                        ("", "@run"),
                        (axis, "@x{0,0.0}"),
                        ("loss", "@loss{0.0000}"),
                    ],
                )
            )
    plots.dress_legend(plot)
    return plot


def _place(row: comparison.Row, point: Mapping[str, Any], column: str) -> float:
    """Reused stages count at their first cost, so the clock is moved by that."""
    if column != "seconds":
        return float(point[column])
    before = sum(s for name, s in row.stages.items() if name not in ("train", "report"))
    return float(point["seconds"] - row.heldout[0]["seconds"]) + before


def _by_source(result: comparison.Comparison, most: int = 24) -> models.LayoutDOM:
    names = sorted({name for row in result.rows for name in row.heldout[-1]["sources"]})
    mean = {
        (name, i): float(
            np.mean([row.heldout[-1]["sources"].get(name, math.nan) for row in g.rows])
        )
        for i, g in enumerate(result.groups)
        for name in names
    }
    names = sorted(names, key=lambda name: mean[name, 0])[-most:]
    plot = plotting.figure(
        height=110 + 26 * len(names),
        sizing_mode="stretch_width",
        y_range=models.FactorRange(factors=names),
        tools="reset,save",
        x_axis_label="Held-out loss at the end (nats per label token)",
    )
    plots.dress(plot)
    for i, group in enumerate(result.groups):
        values = [mean[name, i] for name in names]
        plot.scatter(
            values,
            names,
            size=10,
            color=style.color(i),
            marker=style.marker(i),
            fill_alpha=0.85,
            legend_label=group.title,
        )
    plots.dress_legend(plot)
    return plot


def _runs(result: comparison.Comparison) -> str:
    rows = [
        (row.method, row.seed, f"{row.loss:.4f}", f"{row.seconds:,.0f}", row.command)
        for row in result.rows
    ]
    heads = ("method", "seed", "held-out loss", "total (s)", "python …")
    return style.table(heads, rows, numeric=(1, 2, 3))

"""The interactive two-dimensional map of the gradient features."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh import layouts, models, plotting

from experiments.report import coloring, plots, projections, style
from experiments.report import record as record_lib

NUM_COMPONENTS = 6
_SCRIPTS = pathlib.Path(__file__).parent
_TOOLTIP = """
<div style="max-width:460px;font:12px/1.45 system-ui,sans-serif;color:#1d2329">
 <div style="color:#5b6670">#@id · @source · @cluster · @state</div>
 <div style="color:#5b6670">loss @loss{0.000} · norm @norm{0.000} ·
  @labels label tokens</div>
 <div style="white-space:pre-wrap;margin-top:3px">@prompt</div>
 <div style="white-space:pre-wrap;color:#00527f;margin-top:3px">@answer</div>
</div>"""


@dataclasses.dataclass(frozen=True)
class Axis:
    """One choice for the x or y axis: a title and a value per drawn point."""

    title: str
    values_n: np.ndarray

    @property
    def short(self) -> str:
        """The title without what the share is a share of."""
        head, of, _ = self.title.partition(" of the ")
        return head + ")" if of and "(" in head else self.title


def _axes(record: record_lib.RunRecord, shown_n: np.ndarray) -> list[Axis]:
    """Every choice of axis, the best pair for looking at clusters first."""
    feats, clusters = record.feats, record.clusters
    assert feats is not None
    axes = []
    if clusters is not None and clusters.num_clusters > 2:
        scores, share = projections.between_cluster_axes(
            feats.values, clusters.cluster_id, NUM_COMPONENTS
        )
        axes += [
            Axis(
                f"Between-cluster axis {i + 1} ({style.percent(share[i], 0)} of the"
                " spread of cluster means)",
                scores[shown_n, i],
            )
            for i in range(scores.shape[1])
        ]
    scores, share = projections.principal_components(
        feats.values[shown_n], NUM_COMPONENTS, np.random.default_rng(0)
    )
    axes += [
        Axis(
            f"Principal component {i + 1} ({style.percent(share[i])} of the variance)",
            scores[:, i],
        )
        for i in range(scores.shape[1])
    ]
    log_norm_n = np.log10(np.maximum(feats.norm[shown_n], 1e-12))
    axes += [
        Axis("Mean loss (nats per label token)", feats.loss[shown_n]),
        Axis("Gradient norm (log₁₀)", log_norm_n),
        Axis("Label tokens (log₁₀)", np.log10(feats.num_labels[shown_n])),
    ]
    if clusters is not None:
        axes.append(
            Axis("Squared distance to own centroid", clusters.distance[shown_n])
        )
    return axes


def _columns(record: record_lib.RunRecord, shown_n: np.ndarray) -> dict[str, object]:
    feats, clusters, corpus = record.feats, record.clusters, record.corpus
    assert feats is not None
    id_n = feats.example_id[shown_n]
    limit = record.config.report.max_text
    texts = [_fitted(*record.texts(int(i)), limit) for i in id_n]
    cluster_n = None if clusters is None else clusters.cluster_id[shown_n]
    return {
        "id": id_n.astype(np.int32),
        "source": [corpus.source_names[s] for s in corpus.source_id[id_n]],
        "state": np.where(record.kept_N[id_n], "kept", "pruned").tolist(),
        "cluster": [
            "no cluster" if cluster_n is None else f"cluster {cluster_n[i]}"
            for i in range(len(shown_n))
        ],
        "loss": feats.loss[shown_n].astype(np.float32),
        "norm": feats.norm[shown_n].astype(np.float32),
        "labels": feats.num_labels[shown_n].astype(np.int32),
        "prompt": [prompt for prompt, _ in texts],
        "answer": [answer for _, answer in texts],
    }


def _fitted(prompt: str, answer: str, limit: int) -> tuple[str, str]:
    """Both texts in `limit` characters; what one does not need, the other gets."""
    half = limit // 2
    room = max(half, limit - len(answer))
    prompt = style.shorten(prompt, room)
    return prompt, style.shorten(answer, max(half, limit - len(prompt)))


def _shown(record: record_lib.RunRecord) -> np.ndarray:
    """Rows of the features that are drawn, the kept ones last and so on top."""
    feats = record.feats
    assert feats is not None
    count, most = len(feats.example_id), record.config.report.max_points
    shown_n = np.arange(count)
    if count > most:
        shown_n = np.sort(np.random.default_rng(0).permutation(count)[:most])
    kept_n = record.kept_N[feats.example_id[shown_n]]
    return shown_n[np.argsort(kept_n, kind="stable")]


def _limits(values_n: np.ndarray) -> tuple[float, float]:
    low, high = float(np.min(values_n)), float(np.max(values_n))
    margin = 0.04 * ((high - low) or 1.0)
    return low - margin, high + margin


def _range(values_n: np.ndarray) -> models.Range1d:
    start, end = _limits(values_n)
    return models.Range1d(start=start, end=end)


def figure(record: record_lib.RunRecord) -> tuple[models.LayoutDOM, str]:
    """The map with its controls, and the legend it starts with, as HTML.

    Needs `record.feats`. At most `report.max_points` points are drawn (a fixed random
    subset); the page says so.
    """
    shown_n = _shown(record)
    axes = _axes(record, shown_n)
    colorings = coloring.choices(record, shown_n)
    columns = _columns(record, shown_n)
    kept_n = np.array(columns["state"]) == "kept"
    values = {
        f"axis{i}": axis.values_n.astype(np.float32) for i, axis in enumerate(axes)
    }
    source = models.ColumnDataSource(
        columns
        | values
        | {
            "x": values["axis0"],
            "y": values["axis1"],
            "color": colorings[0].colors,
            "marker": colorings[0].markers,
            "alpha": np.where(kept_n, 0.85, 0.28).astype(np.float32),
        }
    )
    plot = _plot(source, axes)
    controls = _controls(source, plot, axes, colorings, kept_n)
    figure = layouts.column(controls, plot, sizing_mode="stretch_width")
    return figure, colorings[0].legend


def _plot(source: models.ColumnDataSource, axes: Sequence[Axis]) -> plotting.figure:
    plot = plotting.figure(
        height=560,
        sizing_mode="stretch_width",
        tools="pan,wheel_zoom,box_zoom,tap,reset,save",
        active_scroll=None,
        x_axis_label=axes[0].title,
        y_axis_label=axes[1].title,
        x_range=_range(axes[0].values_n),
        y_range=_range(axes[1].values_n),
        output_backend="canvas",
    )
    points = plot.scatter(
        "x",
        "y",
        source=source,
        size=6,
        marker="marker",
        fill_color="color",
        line_color=None,
        fill_alpha="alpha",
        nonselection_fill_alpha="alpha",
        selection_line_color=style.INK,
        hover_line_color=style.INK,
    )
    plot.add_tools(
        models.HoverTool(
            tooltips=_TOOLTIP,
            renderers=[points],
            point_policy="snap_to_data",
            attachment="horizontal",
        )
    )
    plots.dress(plot)
    return plot


def _controls(
    source: models.ColumnDataSource,
    plot: plotting.figure,
    axes: Sequence[Axis],
    colorings: Sequence[coloring.Coloring],
    kept_n: np.ndarray,
) -> models.LayoutDOM:
    titles: list[Any] = [(str(i), axis.short) for i, axis in enumerate(axes)]
    color = models.Select(
        title="Colour",
        value="0",
        options=[(str(i), item.name) for i, item in enumerate(colorings)],
        width=150,
    )
    x = models.Select(title="Horizontal axis", value="0", options=titles, width=270)
    y = models.Select(title="Vertical axis", value="1", options=titles, width=270)
    states = models.Select(
        title="Points",
        value="fade",
        options=[
            ("fade", "all, pruned ones faint"),
            ("all", "all"),
            ("kept", "kept only"),
            ("pruned", "pruned only"),
        ],
        width=170,
    )
    find = models.TextInput(
        title="Find in text or source", placeholder="e.g. sort", width=170
    )
    update = models.CustomJS(
        args={
            "source": source,
            "plot": plot,
            "xaxis": plot.xaxis[0],
            "yaxis": plot.yaxis[0],
            "color": color,
            "x": x,
            "y": y,
            "states": states,
            "find": find,
            "titles": [axis.title for axis in axes],
            "limits": [_limits(axis.values_n) for axis in axes],
            "colors": [item.colors for item in colorings],
            "markers": [item.markers for item in colorings],
            "legends": [item.legend for item in colorings],
        },
        code=(_SCRIPTS / "feature_map.js").read_text(encoding="utf-8"),
    )
    for control in (color, x, y, states, find):
        control.js_on_change("value", update)
    pick = models.CustomJS(
        args={"source": source},
        code=(_SCRIPTS / "picked.js").read_text(encoding="utf-8"),
    )
    source.selected.js_on_change("indices", pick)
    return layouts.row(color, x, y, states, find, sizing_mode="stretch_width")

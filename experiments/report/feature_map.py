"""The interactive two-dimensional map of the gradient features."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh import layouts, models, plotting

from experiments.report import record as record_lib
from experiments.report import style

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


def principal_components(
    values_ND: np.ndarray, num_components: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Leading principal components by a randomised SVD.

    Source: Halko, Martinsson, Tropp, SIAM Review 53 (2011), algorithm 4.4: a random
    range, sharpened by power iterations, then the exact SVD of the small matrix.

    Args:
      values_ND: float [N, D].
      num_components: components wanted; fewer come back when N or D is smaller.
      rng: for the random range.

    Returns:
      (scores [N, c] float32, share of the total variance [c]).
    """
    centered_ND = np.asarray(values_ND, np.float32)
    centered_ND = centered_ND - centered_ND.mean(0)
    rank = min(num_components, *centered_ND.shape)
    width = min(rank + 10, *centered_ND.shape)
    range_Nw = centered_ND @ rng.standard_normal(
        (centered_ND.shape[1], width), np.float32
    )
    for _ in range(7):
        basis_Nw = np.linalg.qr(range_Nw)[0]
        range_Nw = centered_ND @ (centered_ND.T @ basis_Nw)
    basis_Nw = np.linalg.qr(range_Nw)[0]
    left_ww, scale_w, _ = np.linalg.svd(basis_Nw.T @ centered_ND, full_matrices=False)
    scores_Nw = basis_Nw @ (left_ww * scale_w)
    total = float(np.sum(centered_ND.astype(np.float64) ** 2)) or 1.0
    return scores_Nw[:, :rank], (scale_w[:rank].astype(np.float64) ** 2) / total


def between_cluster_axes(
    values_ND: np.ndarray, cluster_id_N: np.ndarray, num_axes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Projection on the directions in which the cluster means differ most.

    The principal axes of the size-weighted cluster means: K clusters lie in K − 1
    dimensions, which principal components of all points may well miss.

    Returns:
      (scores [N, c] float32, share of the between-cluster variance [c]).
    """
    names, label_N = np.unique(cluster_id_N, return_inverse=True)
    size_K = np.bincount(label_N)
    mean_KD = np.zeros((len(names), values_ND.shape[1]))
    np.add.at(mean_KD, label_N, values_ND)
    mean_KD /= size_K[:, None]
    center_D = values_ND.mean(0, dtype=np.float64)
    spread_KD = np.sqrt(size_K)[:, None] * (mean_KD - center_D)
    _, scale, axes = np.linalg.svd(spread_KD, full_matrices=False)
    count = min(num_axes, len(names) - 1, int((scale > 1e-9).sum()))
    scores = (values_ND - center_D) @ axes[:count].T
    return scores.astype(np.float32), scale[:count] ** 2 / max(np.sum(scale**2), 1e-30)


def _axes(record: record_lib.RunRecord, shown_n: np.ndarray) -> list[Axis]:
    """Every choice of axis, the best pair for looking at clusters first."""
    feats, clusters = record.feats, record.clusters
    assert feats is not None
    axes = []
    if clusters is not None and clusters.num_clusters > 2:
        scores, share = between_cluster_axes(
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
    scores, share = principal_components(
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


@dataclasses.dataclass(frozen=True)
class Coloring:
    """One way to colour the points, with its legend as HTML."""

    name: str
    colors: list[str]
    markers: list[str]
    legend: str


def _categories(name: str, label_n: np.ndarray, names: Sequence[str]) -> Coloring:
    shapes = [style.marker(i) for i in range(len(names))]
    count = np.bincount(label_n, minlength=len(names))
    items = "".join(
        f'<span class="key"><em style="color:{style.color(i)}">'
        f"{style.SYMBOLS[shapes[i]]}</em>{style.escape(names[i])} ({count[i]:,})</span>"
        for i in range(len(names))
        if count[i]
    )
    return Coloring(
        name,
        [style.color(i) for i in label_n],
        [shapes[i] for i in label_n],
        items,
    )


def _scale(name: str, unit: str, value_n: np.ndarray) -> Coloring:
    """Colours by quantile: a long tail must not swallow the scale."""
    steps = len(style.SEQUENTIAL)
    edges = np.quantile(value_n, np.linspace(0, 1, steps + 1)[1:-1])
    level_n = np.searchsorted(edges, value_n, side="right")
    blocks = "".join(
        f'<span style="width:{100 / steps:.2f}%;background:{shade}"></span>'
        for shade in style.SEQUENTIAL
    )
    low, middle, high = np.quantile(value_n, [0, 0.5, 1])
    legend = (
        f'<span style="width:260px"><span class="stack" style="height:12px">{blocks}'
        "</span></span>"
        f"<span>{low:.3g} · median {middle:.3g} · {high:.3g} {style.escape(unit)}"
        " (colours by quantile)</span>"
    )
    return Coloring(
        name,
        [style.SEQUENTIAL[i] for i in level_n],
        ["circle"] * len(value_n),
        legend,
    )


def _colorings(record: record_lib.RunRecord, shown_n: np.ndarray) -> list[Coloring]:
    feats, clusters, corpus = record.feats, record.clusters, record.corpus
    assert feats is not None
    id_n = feats.example_id[shown_n]
    kept_n = record.kept_N[id_n]
    result = []
    if clusters is not None:
        names = [f"cluster {c}" for c in range(clusters.num_clusters)]
        result.append(_categories("cluster", clusters.cluster_id[shown_n], names))
    source_n = corpus.source_id[id_n]
    # The most frequent source gets the first colour, so few sources stay apart.
    order = np.argsort(-np.bincount(corpus.source_id), kind="stable")
    place = np.argsort(order)
    names = [corpus.source_names[i] for i in order]
    result.append(_categories("source", place[source_n], names))
    state = _categories("kept or pruned", (~kept_n).astype(int), ("kept", "pruned"))
    shades = [style.KEPT if kept else style.PRUNED for kept in kept_n]
    legend = state.legend.replace(style.color(1), style.PRUNED)
    result.append(dataclasses.replace(state, colors=shades, legend=legend))
    if corpus.group is not None and corpus.group_names:
        known = ("unknown", *corpus.group_names)
        result.append(_categories("task family", corpus.group[id_n] + 1, known))
    result.append(_scale("mean loss", "nats per label token", feats.loss[shown_n]))
    result.append(_scale("gradient norm", "", feats.norm[shown_n]))
    return result


def _columns(record: record_lib.RunRecord, shown_n: np.ndarray) -> dict[str, object]:
    feats, clusters, corpus = record.feats, record.clusters, record.corpus
    assert feats is not None
    id_n = feats.example_id[shown_n]
    limit = record.config.report.max_text // 2
    texts = [record.texts(int(i)) for i in id_n]
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
        "prompt": [style.shorten(prompt, limit) for prompt, _ in texts],
        "answer": [style.shorten(answer, limit) for _, answer in texts],
    }


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
    colorings = _colorings(record, shown_n)
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
    dress(plot)
    return plot


def dress(plot: plotting.figure) -> None:
    """The look that all plots of the page share."""
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


def _controls(
    source: models.ColumnDataSource,
    plot: plotting.figure,
    axes: Sequence[Axis],
    colorings: Sequence[Coloring],
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

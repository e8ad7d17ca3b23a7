"""Ways to colour the points of the map: by cluster, source, state, loss, norm."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from experiments.report import record as record_lib
from experiments.report import style

# More would use a colour twice.
MOST_SHOWN = len(style.PALETTE)


@dataclasses.dataclass(frozen=True)
class Coloring:
    """One way to colour the points, with its legend as HTML."""

    name: str
    colors: list[str]
    markers: list[str]
    legend: str


@dataclasses.dataclass(frozen=True)
class Categories:
    """The commonest categories in colours of their own, the others together in grey.

    Attributes:
      place_N: int [N], index into the lists below.
      names, shades, markers: of each category, the commonest first.
    """

    place_N: np.ndarray
    names: list[str]
    shades: list[str]
    markers: list[str]


def commonest(
    label_N: np.ndarray, names: Sequence[str], noun: str, most: int = MOST_SHOWN
) -> Categories:
    """Categories by falling size; what comes after the first `most` is one, "others".

    Args:
      label_N: int [N], index into `names`.
      names: of all categories.
      noun: what the others are called, in the plural.
      most: categories with a colour of their own.
    """
    count = np.bincount(label_N, minlength=len(names))
    order = np.argsort(-count, kind="stable")
    place = np.empty(len(names), np.int64)
    place[order] = np.arange(len(names))
    place = np.minimum(place, most)
    shown = [str(names[i]) for i in order[:most].tolist()]
    shades = [style.color(i) for i in range(len(shown))]
    markers = [style.marker(i) for i in range(len(shown))]
    if len(names) > most:
        shown.append(f"{len(names) - most} other {noun}")
        shades.append(style.PRUNED)
        markers.append(style.MARKERS[0])
    return Categories(place[label_N], shown, shades, markers)


def sources(record: record_lib.RunRecord) -> Categories:
    """Sources of the corpus; the same colours in every panel."""
    corpus = record.corpus
    return commonest(corpus.source_id, corpus.source_names, "sources")


def _categorical(name: str, rows: np.ndarray, categories: Categories) -> Coloring:
    place_n = categories.place_N[rows]
    count = np.bincount(place_n, minlength=len(categories.names))
    items = "".join(
        f'<span class="key"><em style="color:{categories.shades[i]}">'
        f"{style.SYMBOLS[categories.markers[i]]}</em>"
        f"{style.escape(categories.names[i])} ({count[i]:,})</span>"
        for i in range(len(categories.names))
        if count[i]
    )
    return Coloring(
        name,
        [categories.shades[i] for i in place_n],
        [categories.markers[i] for i in place_n],
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


def choices(record: record_lib.RunRecord, shown_n: np.ndarray) -> list[Coloring]:
    """Every way to colour the drawn rows of the features, the first one first."""
    feats, clusters, corpus = record.feats, record.clusters, record.corpus
    assert feats is not None
    id_n = feats.example_id[shown_n]
    kept_N = record.kept_N
    result = []
    if clusters is not None:
        count = clusters.num_clusters
        by_id = Categories(
            clusters.cluster_id,
            [f"cluster {c}" for c in range(count)],
            [style.color(c) for c in range(count)],
            [style.marker(c) for c in range(count)],
        )
        result.append(_categorical("cluster", shown_n, by_id))
    result.append(_categorical("source", id_n, sources(record)))
    state = Categories(
        (~kept_N).astype(int),
        ["kept", "pruned"],
        [style.KEPT, style.PRUNED],
        ["circle", "circle"],
    )
    result.append(_categorical("kept or pruned", id_n, state))
    if corpus.group is not None and corpus.group_names:
        names = ("none", *corpus.group_names)
        families = commonest(corpus.group + 1, names, "families", most=16)
        result.append(_categorical("task family", id_n, families))
    result.append(_scale("mean loss", "nats per label token", feats.loss[shown_n]))
    result.append(_scale("gradient norm", "", feats.norm[shown_n]))
    return result

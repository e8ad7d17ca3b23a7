"""Cluster sizes, quotas and shares, and what each cluster contains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.report import coloring, style
from experiments.report import record as record_lib

SHOWN_EXAMPLES = 3
_SHADES = {
    "k-means": "#B9C9D6",
    "floor": "#7FA3BE",
    "final": "#0072B2",
    "kept": "#E69F00",
}


def sizes(record: record_lib.RunRecord) -> str:
    """Sizes after k-means, floor and capacity, quota and share: bars and a table."""
    clusters, plan = record.clusters, record.plan
    assert clusters is not None
    count = clusters.num_clusters
    total = int(clusters.sizes.sum())
    before = clusters.kmeans_sizes if len(clusters.kmeans_sizes) == count else None
    kept_K = (
        np.zeros(count, int)
        if plan is None
        else np.bincount(plan.cluster_id, minlength=count)
    )
    bars = _bars(
        [
            ("k-means", before),
            ("floor", clusters.floor_sizes),
            ("final", clusters.sizes),
            ("kept", kept_K if plan is not None else None),
        ],
        capacity=clusters.capacity,
    )
    return _story(record) + bars + _table(record, kept_K, before, total)


def _story(record: record_lib.RunRecord) -> str:
    """One sentence each on k-means, floor and capacity: what they did here."""
    clusters, settings = record.clusters, record.config.clustering
    assert clusters is not None
    before, after = len(clusters.kmeans_sizes), clusters.num_clusters
    stop = "converged" if clusters.converged else "stopped"
    lines = [
        f"k-means: {before} clusters, inertia {clusters.inertia:,.2f}, the best of"
        f" {settings.num_restarts} starts {stop} after {clusters.num_iterations}"
        " iterations."
    ]
    if after < before:
        gone = ", ".join(
            f"{size:,}" for size in sorted(clusters.kmeans_sizes)[: before - after]
        )
        kept = ", ".join(f"{size:,}" for size in -np.sort(-clusters.kmeans_sizes))
        lines[0] = lines[0][:-1] + f"; sizes {kept}."
        lines.append(
            f"Floor: {before - after} of them dissolved (sizes as k-means left them:"
            f" {gone}; at least {settings.min_cluster_size} wanted); their examples"
            " went to the nearest remaining centre."
        )
    else:
        lines.append(
            f"Floor: none dissolved, all hold at least {settings.min_cluster_size}."
        )
    if clusters.capacity is None:
        lines.append(
            f"Capacity: not needed, none above {settings.capacity_factor:g} · N/K."
        )
    else:
        moved = int(np.abs(clusters.floor_sizes - clusters.sizes).sum()) // 2
        lines.append(
            f"Capacity: {clusters.capacity:,} ({settings.capacity_factor:g} · N/K);"
            f" {style.plural(moved, 'example')} or more had to move."
        )
    if record.plan is not None:
        lines += [f"Plan: {note}" for note in record.plan.notes]
    return "".join(f"<p>{style.escape(line)}</p>" for line in lines)


def _bars(series: Sequence[tuple[str, np.ndarray | None]], capacity: int | None) -> str:
    titles = {
        "k-means": "after k-means",
        "floor": "after the floor",
        "final": "after the capacity (final)",
        "kept": "kept",
    }
    used = [(name, values) for name, values in series if values is not None]
    top = max(max(int(values.max()) for _, values in used), capacity or 0) * 1.12
    rows = []
    for c in range(len(used[0][1])):
        tracks = "".join(
            f'<div class="track"><span style="width:{100 * values[c] / top:.2f}%;'
            f'background:{_SHADES[name]}" title="{titles[name]}: {values[c]:,}"></span>'
            f'<b style="left:{100 * values[c] / top:.2f}%">{values[c]:,}</b>'
            + _mark(capacity, top)
            + "</div>"
            for name, values in used
        )
        rows.append(f'<div class="label">cluster {c}</div><div>{tracks}</div>')
    names = [titles[name] + ", examples" for name, _ in used]
    legend = style.swatches(names, [_SHADES[name] for name, _ in used])
    if capacity is not None:
        legend = legend.replace(
            "</p>", f'<span class="key">┆ capacity {capacity:,}</span></p>'
        )
    return legend + f'<div class="bars">{"".join(rows)}</div>'


def _mark(capacity: int | None, top: float) -> str:
    if capacity is None:
        return ""
    return f'<i class="mark" style="left:{100 * capacity / top:.2f}%"></i>'


def _table(
    record: record_lib.RunRecord,
    kept_K: np.ndarray,
    before_K: np.ndarray | None,
    total: int,
) -> str:
    clusters, plan, feats = record.clusters, record.plan, record.feats
    assert clusters is not None and feats is not None
    rows = []
    for c in range(clusters.num_clusters):
        inside = clusters.cluster_id == c
        share = plan.cluster_share[c] if plan is not None else inside.mean()
        quota = int(plan.quota[c]) if plan is not None else 0
        factor = share * kept_K.sum() / kept_K[c] if kept_K[c] else float("nan")
        rows.append(
            (
                _chip(c),
                f"{before_K[c]:,}" if before_K is not None else "–",
                f"{clusters.floor_sizes[c]:,}",
                f"{clusters.sizes[c]:,}",
                style.percent(clusters.sizes[c] / total),
                f"{quota:,}",
                style.percent(kept_K[c] / max(clusters.sizes[c], 1)),
                style.percent(share),
                f"{factor:.2f}",
                f"{feats.loss[inside].mean():.2f}",
                f"{np.median(feats.norm[inside]):.3g}",
                f"{feats.num_labels[inside].mean():.0f}",
            )
        )
    heads = (
        "cluster",
        "after k-means",
        "after floor",
        "final size",
        "of all",
        "quota",
        "kept of it",
        "weight π",
        "weight per example",
        "mean loss (nats)",
        "median norm",
        "labels each",
    )
    return style.table(
        heads, rows, numeric=range(1, len(heads)), raw=(0,)
    ) + style.note(
        "Weight per example is M · π / kept: how much more (above 1) or less an example"
        " of this cluster counts than the average kept example, so that the kept set"
        " follows the full data."
    )


def _chip(c: int) -> str:
    symbol = style.SYMBOLS[style.marker(c)]
    return f'<span style="color:{style.color(c)}">{symbol}</span> cluster {c}'


def contents(record: record_lib.RunRecord) -> str:
    """One card per cluster: sources, families, nearest and farthest examples."""
    clusters, feats = record.clusters, record.feats
    assert clusters is not None and feats is not None
    sources = coloring.sources(record)
    names, shades = sources.names, sources.shades
    cards = [_card(record, c, sources) for c in range(clusters.num_clusters)]
    head = f"<h3>Sources</h3>{style.swatches(names, shades)}" if len(names) > 1 else ""
    return head + f'<div class="cards">{"".join(cards)}</div>'


def _card(record: record_lib.RunRecord, c: int, sources: coloring.Categories) -> str:
    clusters, feats = record.clusters, record.feats
    assert clusters is not None and feats is not None
    inside_n = np.flatnonzero(clusters.cluster_id == c)
    id_n = feats.example_id[inside_n]
    kept_n = record.kept_N[id_n]
    bars = "".join(
        f"<p class='note'>{title}</p>" + _source_bar(sources, rows)
        for title, rows in (
            ("All of its examples, by source", id_n),
            ("The kept ones", id_n[kept_n]),
        )
    )
    # Equal distances are broken by id, as selection does.
    ranked_n = inside_n[np.lexsort((id_n, clusters.distance[inside_n]))]
    pair = "".join(
        f"<div><h3>{title}</h3>"
        + "".join(_example(record, int(i)) for i in chosen)
        + "</div>"
        for title, chosen in (
            ("Nearest to the centre", ranked_n[:SHOWN_EXAMPLES]),
            ("Farthest from the centre", ranked_n[::-1][:SHOWN_EXAMPLES]),
        )
    )
    opened = " open" if c < 4 else ""
    return (
        f'<details class="card" style="border-left-color:{style.color(c)}"{opened}>'
        f"<summary>{_chip(c)}<small>{len(inside_n):,} examples, {kept_n.sum():,} kept ·"
        f" mean loss {feats.loss[inside_n].mean():.2f} nats · mean squared distance"
        f" {clusters.distance[inside_n].mean():.3f}</small></summary>"
        f'{bars}{_families(record, id_n)}<div class="pair">{pair}</div></details>'
    )


def _source_bar(sources: coloring.Categories, rows: np.ndarray) -> str:
    count = np.bincount(sources.place_N[rows], minlength=len(sources.names))
    return style.stacked_bar(list(zip(sources.names, count, sources.shades)))


def _families(record: record_lib.RunRecord, id_n: np.ndarray) -> str:
    corpus = record.corpus
    if corpus.group is None or not corpus.group_names:
        return ""
    known = corpus.group[id_n]
    count_G = np.bincount(known[known >= 0], minlength=len(corpus.group_names))
    all_G = np.bincount(corpus.group[corpus.group >= 0], minlength=len(count_G))
    top = [g for g in np.argsort(-count_G, kind="stable")[:8] if count_G[g]]
    if not top:
        return ""
    parts = ", ".join(
        f"{corpus.group_names[g]} {count_G[g]:,} of {all_G[g]:,}" for g in top
    )
    return f"<p class='note'>Task families: {style.escape(parts)}</p>"


def _example(record: record_lib.RunRecord, i: int) -> str:
    feats, clusters = record.feats, record.clusters
    assert feats is not None and clusters is not None
    example = int(feats.example_id[i])
    prompt, answer = record.texts(example)
    limit = record.config.report.max_text
    state = "kept" if record.kept_N[example] else "pruned"
    source = record.corpus.source_names[record.corpus.source_id[example]]
    return (
        f'<div class="example"><p>#{example} · {style.escape(source)} · {state} ·'
        f" d² {clusters.distance[i]:.3f} · loss {feats.loss[i]:.2f} nats</p>"
        f"<pre>{style.escape(style.shorten(prompt, limit))}</pre>"
        f'<pre class="answer">{style.escape(style.shorten(answer, limit))}</pre></div>'
    )

"""A plan, and the difference of two plans, in lines of text."""

from __future__ import annotations

import numpy as np
from scipy import optimize

from clusterjax import clustering, errors
from clusterjax import plan as plan_lib

_MOST_CLUSTERS = 64


def describe(plan: plan_lib.SelectionPlan) -> list[str]:
    """Method, clusters, sources and fingerprints of a plan."""
    count = len(plan.candidate_id)
    lines = [
        f"{plan.method}: keeps {plan.num_kept:,} of {count:,} candidates"
        f" ({plan.num_kept / count:.1%}) of a corpus of {plan.num_corpus:,}",
        f"label tokens kept: {_labels(plan, plan.entry):,} of"
        f" {_labels(plan, slice(None)):,}"
        f" ({_labels(plan, plan.entry) / _labels(plan, slice(None)):.1%})",
        f"weighting={plan.weighting} normalise={plan.normalise}"
        f" {_settings(plan.settings)}",
        "",
        "cluster       size      share     kept   kept/size   weight w_i",
    ]
    static_K = plan.num_kept * plan.cluster_share / np.maximum(plan.quota, 1)
    for c in range(min(plan.num_clusters, _MOST_CLUSTERS)):
        lines.append(
            f"{c:7d} {plan.cluster_size[c]:10,d} {plan.cluster_share[c]:10.4f}"
            f" {plan.quota[c]:8,d} {plan.quota[c] / plan.cluster_size[c]:11.3f}"
            f" {static_K[c]:12.4f}"
        )
    if plan.num_clusters > _MOST_CLUSTERS:
        lines.append(f"… {plan.num_clusters - _MOST_CLUSTERS} more clusters")
    return [*lines, "", *_sources(plan), *_forced(plan), *_fingerprints(plan)]


def difference(a: plan_lib.SelectionPlan, b: plan_lib.SelectionPlan) -> list[str]:
    """What plan b keeps instead of what plan a keeps.

    Clusters of b get the name of the cluster of a that they are matched with: by
    centroids where both plans have them in one space, else by shared candidates.
    """
    shared, row_a, row_b = np.intersect1d(
        a.candidate_uid, b.candidate_uid, return_indices=True
    )
    kept_a, kept_b = a.copies[row_a] > 0, b.copies[row_b] > 0
    lines = _setting_changes(a, b)
    lines += [
        f"candidates: {len(a.candidate_id):,} and {len(b.candidate_id):,},"
        f" {len(shared):,} in both",
        f"kept: {a.num_kept:,} and {b.num_kept:,};"
        f" both keep {int((kept_a & kept_b).sum()):,}, only the first"
        f" {int((kept_a & ~kept_b).sum()):,}, only the second"
        f" {int((kept_b & ~kept_a).sum()):,}",
    ]
    pairs, how = match_clusters(a, b, row_a, row_b)
    name_b = {j: i for i, j in pairs}
    group_b = np.array([name_b.get(c, -1) for c in range(b.num_clusters)])
    moved = a.candidate_cluster[row_a] != group_b[b.candidate_cluster[row_b]]
    lines += [
        f"clusters matched by {how}: {len(pairs)} of {a.num_clusters} and"
        f" {b.num_clusters}; {int(moved.sum()):,} candidates changed theirs",
        "",
        "first second     size          share              kept",
    ]
    lines += [
        f"{i:5d} {j:6d} {a.cluster_size[i]:6,d} {b.cluster_size[j]:6,d}"
        f"   {a.cluster_share[i]:.4f} {b.cluster_share[j]:.4f}"
        f"   {a.quota[i]:6,d} {b.quota[j]:6,d}"
        for i, j in pairs[:_MOST_CLUSTERS]
    ]
    return lines


def match_clusters(
    a: plan_lib.SelectionPlan,
    b: plan_lib.SelectionPlan,
    row_a: np.ndarray,
    row_b: np.ndarray,
) -> tuple[list[tuple[int, int]], str]:
    """Pairs of clusters of least total cost (Hungarian method), and what was compared.

    Args:
      a: the first plan.
      b: the second plan.
      row_a: int, candidates of `a` that are also in `b`.
      row_b: int, the same candidates in `b`.
    """
    same_space = a.centroids.shape[1] == b.centroids.shape[1] > 0 and (
        a.fingerprints.get("model") == b.fingerprints.get("model")
    )
    if same_space:
        names_b = clustering.match_centroids(a.centroids, b.centroids)
        pairs = [(int(i), j) for j, i in enumerate(names_b) if i < a.num_clusters]
        return sorted(pairs), "centroids"
    if len(row_a):
        shared = np.zeros((a.num_clusters, b.num_clusters))
        at = a.candidate_cluster[row_a], b.candidate_cluster[row_b]
        np.add.at(shared, at, 1)
        rows, columns = optimize.linear_sum_assignment(shared, maximize=True)
        return list(zip(rows.tolist(), columns.tolist())), "shared candidates"
    raise errors.PlanError(
        "the plans share no candidate and no feature space: nothing to compare"
    )


def _labels(plan: plan_lib.SelectionPlan, rows: np.ndarray | slice) -> int:
    return int(plan.num_labels[rows].sum(dtype=np.int64))


def _settings(settings: dict) -> str:
    names = ("quota", "ratio", "target_fraction", "keep", "share", "seed")
    return " ".join(f"{name}={settings[name]}" for name in names if name in settings)


def _sources(plan: plan_lib.SelectionPlan) -> list[str]:
    count = max(len(plan.source_names), int(plan.source_id.max()) + 1)
    all_of = np.bincount(plan.source_id, minlength=count)
    kept = np.bincount(plan.source_id[plan.entry], minlength=count)
    names = [*plan.source_names, *map(str, range(len(plan.source_names), count))]
    parts = [f"{n} {k:,} of {m:,}" for n, k, m in zip(names, kept, all_of)]
    return [f"sources kept: {'; '.join(parts)}"]


def _forced(plan: plan_lib.SelectionPlan) -> list[str]:
    counts = np.bincount(plan.kept_by, minlength=len(plan_lib.KEPT_BY_NAMES))
    parts = [f"{n} {c:,}" for n, c in zip(plan_lib.KEPT_BY_NAMES, counts) if c]
    notes = [f"note: {note}" for note in plan.notes]
    return [f"decided by: {'; '.join(parts)}", *notes]


def _fingerprints(plan: plan_lib.SelectionPlan) -> list[str]:
    parts = {**plan.fingerprints, "plan": plan.fingerprint}
    return [f"{name} fingerprint {value}" for name, value in parts.items() if value]


def _setting_changes(a: plan_lib.SelectionPlan, b: plan_lib.SelectionPlan) -> list[str]:
    lines = []
    for name in sorted(a.settings.keys() | b.settings.keys()):
        first, second = a.settings.get(name), b.settings.get(name)
        if first != second:
            lines.append(f"selection.{name}: {first} → {second}")
    for name in sorted(a.fingerprints.keys() & b.fingerprints.keys()):
        if a.fingerprints[name] != b.fingerprints[name]:
            lines.append(f"another {name} ({a.fingerprints[name]} →"
                         f" {b.fingerprints[name]})")  # fmt: skip
    return lines or ["same settings and inputs"]

"""`select`: from clusters and features to a plan (METHOD §3 and the shares of §4)."""

from __future__ import annotations

import dataclasses

import numpy as np

from clusterjax import config, datatypes, errors, herding
from clusterjax import plan as plans
from clusterjax.selection import baselines, candidates, choices, forced, keep, quotas

CLUSTERED_METHODS = ("cluster", "stratified", "uniform")


def select(
    clusters: datatypes.Clustering | None,
    feats: datatypes.GradientFeatures | None,
    cfg: config.SelectionConfig,
    *,
    corpus: datatypes.Corpus | None = None,
    subset_rules: keep.SubsetRules | None = None,
    target: datatypes.GradientFeatures | None = None,
) -> plans.SelectionPlan:
    """Chooses the examples that are kept.

    Args:
      clusters: needed by `method = cluster | stratified | uniform`.
      feats: gradient features; not needed by `full` and `random`.
      cfg: selection settings.
      corpus: candidates of `full` and `random`, which need no feature. Without it they
        choose among the examples with a feature.
      subset_rules: `k_center` and `herding` on accelerators; NumPy forms otherwise.
      target: features of the target set, for `method = target`.

    Returns:
      The plan. A function of its inputs and `cfg.seed` only.

    Raises:
      errors.PlanError: a plan that is impossible or keeps too little, with the sizes.
      errors.ConfigError: a setting out of range.
    """
    _check_settings(cfg)
    rows = _candidates(clusters, feats, cfg, corpus)
    rules = keep.NumpyRules() if subset_rules is None else subset_rules
    forced_n = forced.resolve(rows, cfg)
    if cfg.method == "cluster":
        choice = _by_cluster(rows, cfg, rules, forced_n)
    else:
        choice = baselines.choose(rows, cfg, rules, forced_n, target)
    return _make_plan(rows, cfg, choice)


def cluster_share(
    rows: candidates.Candidates, share: str, weighting: str
) -> np.ndarray:
    """π_c, float64 [K], sums to 1 (METHOD §4). User weights enter the sizes."""
    mass_n = rows.user_weight.astype(np.float64)
    if share == "tokens":
        mass_n = mass_n * rows.num_labels
    mass_K = np.bincount(rows.cluster_id, mass_n, minlength=rows.num_clusters)
    if weighting == "sqrt":
        mass_K = np.sqrt(mass_K)
    elif weighting == "uniform":
        mass_K = np.ones_like(mass_K)
    return mass_K / mass_K.sum()


def _candidates(
    clusters: datatypes.Clustering | None,
    feats: datatypes.GradientFeatures | None,
    cfg: config.SelectionConfig,
    corpus: datatypes.Corpus | None,
) -> candidates.Candidates:
    if cfg.method in ("full", "random") and corpus is not None:
        return candidates.from_corpus(corpus)
    if feats is None:
        raise errors.ConfigError(
            f"selection.method={cfg.method!r} needs gradient features and got none; run"
            " the features stage first, or choose method='random' or 'full'"
        )
    if cfg.method in CLUSTERED_METHODS:
        if clusters is None:
            raise errors.ConfigError(
                f"selection.method={cfg.method!r} needs clusters and got none; run the"
                " cluster stage first"
            )
        return candidates.from_features(feats, clusters)
    return candidates.from_features(feats, None)


def _by_cluster(
    rows: candidates.Candidates,
    cfg: config.SelectionConfig,
    rules: keep.SubsetRules,
    forced_n: forced.Forced,
) -> choices.Choice:
    quota_K = _quotas(rows, cfg, forced_n)
    rank_n = np.zeros(len(rows), np.int64)
    for cluster in range(rows.num_clusters):
        members = np.flatnonzero(rows.cluster_id == cluster)
        order = _order(rows, members, int(quota_K[cluster]), cfg, rules, forced_n)
        rank_n[members[order]] = np.arange(len(members))
    kept_by_n = forced.fill(rows, cfg, forced_n, rank_n, quota_K)
    return choices.Choice((kept_by_n != plans.PRUNED).astype(np.int32), kept_by_n)


def _quotas(
    rows: candidates.Candidates,
    cfg: config.SelectionConfig,
    forced_n: forced.Forced,
) -> np.ndarray:
    """q_c, int64 [K]; must-keep ids count towards it, never-keep ids can't fill it."""
    clusters, count = rows.cluster_id, rows.num_clusters
    allowed_K = np.bincount(clusters[~forced_n.never], minlength=count)
    must_K = np.bincount(clusters[forced_n.must], minlength=count)
    if cfg.keep == "all":
        return allowed_K
    if cfg.quota == "min":
        quota_K = np.maximum(quotas.minimum(allowed_K, cfg.ratio), must_K)
    else:
        total = quotas.target_count(cfg.target_fraction, len(rows))
        quota_K = quotas.waterfill(allowed_K, total, must_K)
    if (quota_K == 0).any():
        empty = int(np.argmin(np.where(quota_K == 0, allowed_K, len(rows))))
        setting = (
            f"selection.ratio={cfg.ratio}"
            if cfg.quota == "min"
            else f"selection.target_fraction={cfg.target_fraction}"
        )
        raise errors.PlanError(
            f"{setting} keeps 0 examples of cluster {empty}; cluster"
            f" sizes are {_list(rows.sizes)}; raise it, or use fewer clusters"
        )
    if cfg.quota == "min" and quota_K.sum() < cfg.min_kept_fraction * len(rows):
        raise errors.PlanError(
            f"the plan keeps {quota_K.sum():,} of {len(rows):,} examples, below"
            f" selection.min_kept_fraction={cfg.min_kept_fraction}: quota='min' gives"
            f" every cluster what the smallest allows, and the cluster sizes are"
            f" {_list(rows.sizes)}; raise clustering.min_cluster_size, or use"
            " selection.quota='waterfill'"
        )
    return quota_K


def _order(
    rows: candidates.Candidates,
    members: np.ndarray,
    quota: int,
    cfg: config.SelectionConfig,
    rules: keep.SubsetRules,
    forced_n: forced.Forced,
) -> np.ndarray:
    """Positions in `members`, the first to be kept first: must-keep ids lead."""
    must = forced_n.must[members]
    free = np.flatnonzero(~must & ~forced_n.never[members])
    chosen = members[free]
    order = _rule_order(rows, chosen, max(quota - int(must.sum()), 0), cfg, rules)
    last = np.flatnonzero(forced_n.never[members])
    return np.concatenate([np.flatnonzero(must), free[order], last])


def _rule_order(
    rows: candidates.Candidates,
    chosen: np.ndarray,
    quota: int,
    cfg: config.SelectionConfig,
    rules: keep.SubsetRules,
) -> np.ndarray:
    distance = rows.distance[chosen]
    match cfg.keep:
        case "farthest":
            return keep.farthest(distance)
        case "nearest":
            return keep.nearest(distance)
        case "mixed":
            return keep.mixed(distance, quota)
        case "random":
            return keep.at_random(rows.example_id[chosen], cfg.seed)
        case "largest_norm":
            return keep.largest_norm(rows.norm[chosen])
        case "all":
            return np.arange(len(chosen))
    if quota == 0:
        return np.arange(len(chosen))
    assert rows.values is not None
    if cfg.keep == "k_center":
        start = int(np.argmax(rows.norm[chosen]))
        picked = rules.k_center(rows.values[chosen], quota, start)
    else:
        picked = rules.herding(_herding_vectors(rows, chosen, cfg), quota)
    return keep.then_the_rest(np.asarray(picked), len(chosen))


def _herding_vectors(
    rows: candidates.Candidates, chosen: np.ndarray, cfg: config.SelectionConfig
) -> np.ndarray:
    """Float32 [q, D], scaled so that the longest has length 1 (the order is equal)."""
    assert rows.values is not None
    vectors = herding.vectors(
        rows.values[chosen],
        rows.norm[chosen],
        rows.num_labels[chosen],
        rows.user_weight[chosen],
        np.zeros(len(chosen), np.int32),
        np.ones(1),
        cfg.normalise,
    )
    longest = float(np.sqrt((vectors**2).sum(1).max()))
    return vectors / max(longest, 1e-30)


def _make_plan(
    rows: candidates.Candidates, cfg: config.SelectionConfig, choice: choices.Choice
) -> plans.SelectionPlan:
    weighting = "uniform" if cfg.method == "uniform" else cfg.weighting
    quota_K = np.bincount(
        rows.cluster_id, choice.copies, minlength=rows.num_clusters
    ).astype(np.int64)
    return plans.SelectionPlan(
        candidate_id=rows.example_id,
        candidate_uid=rows.uid,
        candidate_cluster=rows.cluster_id,
        copies=choice.copies,
        kept_by=choice.kept_by,
        num_labels=rows.num_labels,
        user_weight=rows.user_weight,
        source_id=rows.source_id,
        distance=np.asarray(rows.distance, np.float32),
        norm=np.asarray(rows.norm, np.float32),
        loss=np.asarray(rows.loss, np.float32),
        cluster_size=rows.sizes,
        cluster_share=cluster_share(rows, cfg.share, weighting),
        quota=quota_K,
        source_names=rows.source_names,
        centroids=np.asarray(rows.centroids, np.float32),
        method=cfg.method,
        weighting=weighting,
        normalise=cfg.normalise,
        num_corpus=rows.num_corpus,
        fingerprints={**rows.fingerprints, "config": config.fingerprint(cfg)},
        settings=_plain(dataclasses.asdict(cfg)),
        notes=choice.notes,
    )


def _check_settings(cfg: config.SelectionConfig) -> None:
    for name in ("ratio", "target_fraction"):
        value = getattr(cfg, name)
        if not 0 < value <= 1:
            raise errors.ConfigError(f"selection.{name}={value} is outside (0, 1]")
    if not 0 <= cfg.min_kept_fraction <= 1:
        raise errors.ConfigError(
            f"selection.min_kept_fraction={cfg.min_kept_fraction} is outside [0, 1]"
        )
    if cfg.num_kept is not None and cfg.num_kept < 1:
        raise errors.ConfigError(f"selection.num_kept={cfg.num_kept} is below 1")
    if cfg.num_kept is not None and cfg.budget == "tokens":
        raise errors.ConfigError(
            "selection.num_kept counts examples and can't be used with budget='tokens';"
            " set selection.target_fraction instead"
        )
    if cfg.min_per_source < 0:
        raise errors.ConfigError(
            f"selection.min_per_source={cfg.min_per_source} is below 0"
        )


def _list(sizes_K: np.ndarray) -> str:
    shown = ", ".join(f"{size:,}" for size in sizes_K[:16])
    return shown + (f", … ({len(sizes_K)} clusters)" if len(sizes_K) > 16 else "")


def _plain(settings: dict) -> dict:
    """As JSON gives it back, so that a saved and loaded plan is equal."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in settings.items()
    }

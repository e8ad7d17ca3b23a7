"""Baselines at an equal budget: other ways to choose as many examples or tokens."""

from __future__ import annotations

import numpy as np

from clusterjax import config, datatypes, errors, shuffling
from clusterjax import plan as plans
from clusterjax.selection import candidates, choices, forced, keep, quotas

_SALT = 0xBA5E


def choose(
    rows: candidates.Candidates,
    cfg: config.SelectionConfig,
    rules: keep.SubsetRules,
    forced_n: forced.Forced,
    target: datatypes.GradientFeatures | None,
) -> choices.Choice:
    """The choice of every method but `cluster`.

    `full` keeps everything; `random`, `highest_loss`, `largest_norm`, `k_center`,
    `near_duplicate` and `target` rank all candidates and keep the first of them up to
    the budget; `stratified` draws from every cluster in proportion; `uniform` draws
    equally from every cluster, repeating the examples of small ones.
    """
    if cfg.method == "full":
        kept_n = ~forced_n.never
        return choices.from_mask(kept_n, forced_n)
    if cfg.method == "stratified":
        return _stratified(rows, cfg, forced_n)
    if cfg.method == "uniform":
        return _uniform(rows, cfg, forced_n)
    order, notes = _ranking(rows, cfg, rules, forced_n, target)
    order = order[~forced_n.never[order]]
    order = np.concatenate([order[forced_n.must[order]], order[~forced_n.must[order]]])
    count = _prefix_in_budget(rows, cfg, order)
    if count < int(forced_n.must.sum()):
        raise errors.PlanError(
            f"{int(forced_n.must.sum()):,} ids of selection.must_keep don't fit the"
            f" budget of {count:,} examples; raise selection.target_fraction"
        )
    rank_n = np.full(len(rows), len(rows), np.int64)
    rank_n[order] = np.arange(len(order))
    kept_by_n = forced.fill(rows, cfg, forced_n, rank_n, np.array([count]))
    copies_n = (kept_by_n != plans.PRUNED).astype(np.int32)
    return choices.Choice(copies_n, kept_by_n, notes)


def _budget(rows: candidates.Candidates, cfg: config.SelectionConfig) -> int:
    """Examples, or label tokens with `budget = tokens`."""
    if cfg.budget == "tokens":
        total = int(rows.num_labels.sum(dtype=np.int64))
        return quotas.target_count(cfg.target_fraction, total)
    if cfg.num_kept is None:
        return quotas.target_count(cfg.target_fraction, len(rows))
    if cfg.num_kept > len(rows):
        raise errors.PlanError(
            f"selection.num_kept={cfg.num_kept:,} is more than the {len(rows):,} valid"
            " examples; lower it"
        )
    return cfg.num_kept


def _prefix_in_budget(
    rows: candidates.Candidates, cfg: config.SelectionConfig, order: np.ndarray
) -> int:
    """Length of the prefix of `order` whose cost is nearest to the budget, 1 at least.

    Counted in tokens, the nearest (not the last below) is taken: otherwise orders that
    begin with long examples would systematically get less.
    """
    budget = _budget(rows, cfg)
    if cfg.budget == "examples":
        return max(min(budget, len(order)), 1)
    cost = np.cumsum(rows.num_labels[order], dtype=np.int64)
    return int(np.argmin(np.abs(cost - budget))) + 1


def _ranking(
    rows: candidates.Candidates,
    cfg: config.SelectionConfig,
    rules: keep.SubsetRules,
    forced_n: forced.Forced,
    target: datatypes.GradientFeatures | None,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Candidates, the first to be kept first (possibly fewer than all)."""
    match cfg.method:
        case "random":
            return keep.at_random(rows.example_id, cfg.seed), ()
        case "highest_loss":
            return np.argsort(-rows.loss, kind="stable"), ()
        case "largest_norm":
            return keep.largest_norm(rows.norm), ()
        case "target":
            return np.argsort(-_similarity(rows, target), kind="stable"), ()
        case "near_duplicate":
            return _without_near_duplicates(rows, cfg, forced_n)
    return _cover(rows, cfg, rules, forced_n), ()


def _cover(
    rows: candidates.Candidates,
    cfg: config.SelectionConfig,
    rules: keep.SubsetRules,
    forced_n: forced.Forced,
) -> np.ndarray:
    """All allowed candidates, those of the greedy cover first and in its order."""
    assert rows.values is not None
    allowed = np.flatnonzero(~forced_n.never)
    # A budget of tokens holds most examples when they are short: a cover so long
    # begins with every shorter one.
    shortest = allowed[np.argsort(rows.num_labels[allowed], kind="stable")]
    count = _prefix_in_budget(rows, cfg, shortest)
    start = int(np.argmax(rows.norm[allowed]))
    picked = np.asarray(rules.k_center(rows.values[allowed], count, start))
    return allowed[keep.then_the_rest(picked, len(allowed))]


def _similarity(
    rows: candidates.Candidates, target: datatypes.GradientFeatures | None
) -> np.ndarray:
    """Greatest cosine to the mean feature of a target source, float64 [n].

    References:
      Xia et al., "LESS: Selecting Influential Data for Targeted Instruction Tuning",
      2024: the maximum over the target's subtasks of the similarity to their gradients.
    """
    if target is None or rows.values is None:
        raise errors.ConfigError(
            "selection.method='target' needs features of a target set; set"
            " selection.target_source to the name of an entry of data.eval_sources"
        )
    if target.values.shape[1] != rows.values.shape[1]:
        raise errors.PlanError(
            f"target features are {target.values.shape[1]} wide and those of the"
            f" candidates {rows.values.shape[1]}; make both with the same settings"
        )
    best_n = np.full(len(rows), -np.inf)
    for source in np.unique(target.source_id):
        mean_D = target.values[target.source_id == source].mean(0, dtype=np.float64)
        mean_D /= max(np.linalg.norm(mean_D), 1e-30)
        best_n = np.maximum(best_n, rows.values @ mean_D)
    return best_n


def _without_near_duplicates(
    rows: candidates.Candidates, cfg: config.SelectionConfig, forced_n: forced.Forced
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Survivors of near-duplicate removal, in random order.

    Examples are visited in random order (must-keep ids first); one whose cosine to a
    survivor is above the threshold is dropped. Cost O(n · survivors · D), blocked.
    """
    assert rows.values is not None
    order = keep.at_random(rows.example_id, cfg.seed)
    order = order[np.argsort(~forced_n.must[order], kind="stable")]
    survivors: list[np.ndarray] = []
    for begin in range(0, len(order), 1024):
        block = order[begin : begin + 1024]
        fresh_b = np.ones(len(block), bool)
        for known in survivors:
            near = rows.values[block] @ rows.values[known].T
            fresh_b &= (near <= cfg.near_duplicate_cosine).all(1)
        block = block[fresh_b | forced_n.must[block]]
        near_bb = rows.values[block] @ rows.values[block].T > cfg.near_duplicate_cosine
        alive_b = np.ones(len(block), bool)
        for i in range(len(block)):
            if alive_b[i]:
                alive_b[i + 1 :] &= ~near_bb[i, i + 1 :]
        survivors.append(block[alive_b | forced_n.must[block]])
    kept = np.concatenate(survivors)
    dropped = len(rows) - len(kept)
    note = (
        f"{dropped:,} of {len(rows):,} examples are near duplicates (cosine above"
        f" {cfg.near_duplicate_cosine})"
    )
    budget = _budget(rows, cfg)
    if cfg.budget == "examples" and len(kept) < budget:
        note += f"; only {len(kept):,} are left for a budget of {budget:,}"
    return kept, (note,)


def _stratified(
    rows: candidates.Candidates, cfg: config.SelectionConfig, forced_n: forced.Forced
) -> choices.Choice:
    """Random inside clusters, each in proportion to its size."""
    rank_n = _random_rank_in_clusters(rows, cfg, forced_n)
    clusters, count = rows.cluster_id, rows.num_clusters
    allowed_K = np.bincount(clusters[~forced_n.never], minlength=count)
    must_K = np.bincount(clusters[forced_n.must], minlength=count)
    if cfg.budget == "tokens":
        quota_K = _token_quotas(rows, cfg, rank_n, allowed_K, must_K)
    else:
        quota_K = quotas.proportional(allowed_K, _budget(rows, cfg), must_K)
    kept_by_n = forced.fill(rows, cfg, forced_n, rank_n, quota_K)
    copies_n = (kept_by_n != plans.PRUNED).astype(np.int32)
    return choices.Choice(copies_n, kept_by_n)


def _token_quotas(
    rows: candidates.Candidates,
    cfg: config.SelectionConfig,
    rank_n: np.ndarray,
    allowed_K: np.ndarray,
    must_K: np.ndarray,
) -> np.ndarray:
    """Proportional quotas whose label tokens come nearest to the budget."""
    budget = _budget(rows, cfg)
    order = np.lexsort((rank_n, rows.cluster_id))
    cost = np.concatenate([[0], np.cumsum(rows.num_labels[order], dtype=np.int64)])
    first_K = np.cumsum(rows.sizes) - rows.sizes

    def tokens(total: int) -> tuple[int, np.ndarray]:
        quota_K = quotas.proportional(allowed_K, total, must_K)
        return int((cost[first_K + quota_K] - cost[first_K]).sum()), quota_K

    low = max(len(allowed_K), int(np.maximum(must_K, 1).sum()))
    high = int(allowed_K.sum())
    low = min(low, high)
    while low < high:  # the least total that reaches the budget
        middle = (low + high) // 2
        if tokens(middle)[0] < budget:
            low = middle + 1
        else:
            high = middle
    options = [tokens(low)]
    if low - 1 >= int(np.maximum(must_K, 1).sum()):
        options.append(tokens(low - 1))
    return min(options, key=lambda option: abs(option[0] - budget))[1]


def _uniform(
    rows: candidates.Candidates, cfg: config.SelectionConfig, forced_n: forced.Forced
) -> choices.Choice:
    """Equally many draws from every cluster; small clusters are repeated whole."""
    if cfg.budget == "tokens" or cfg.min_per_source:
        raise errors.ConfigError(
            "selection.method='uniform' has budget='examples' and no min_per_source:"
            " its draws per cluster are fixed"
        )
    allowed_K = np.bincount(
        rows.cluster_id[~forced_n.never], minlength=rows.num_clusters
    )
    budget = _budget(rows, cfg)
    if budget < rows.num_clusters or (allowed_K == 0).any():
        raise errors.PlanError(
            f"selection.method='uniform' can't draw {budget:,} examples equally from"
            f" {rows.num_clusters} clusters with {allowed_K.tolist()} allowed examples"
        )
    draws_K = quotas.waterfill(np.full(rows.num_clusters, budget), budget)
    rank_n = _random_rank_in_clusters(rows, cfg, forced_n)
    whole_K, rest_K = np.divmod(draws_K, allowed_K)
    copies_n = whole_K[rows.cluster_id] + (rank_n < rest_K[rows.cluster_id])
    copies_n = np.where(forced_n.never, 0, copies_n).astype(np.int32)
    if (copies_n[forced_n.must] == 0).any():
        raise errors.PlanError(
            "a cluster has more selection.must_keep ids than its draws; raise"
            " selection.target_fraction"
        )
    choice = choices.from_mask(copies_n > 0, forced_n)
    return choices.Choice(copies_n, choice.kept_by)


def _random_rank_in_clusters(
    rows: candidates.Candidates, cfg: config.SelectionConfig, forced_n: forced.Forced
) -> np.ndarray:
    """int64 [n]; must-keep ids first, never-keep ids last, the rest by seed."""
    group_n = np.where(forced_n.must, 0, np.where(forced_n.never, 2, 1))
    keys_n = shuffling.random_keys(rows.example_id, cfg.seed, _SALT)
    order = np.lexsort((keys_n, group_n, rows.cluster_id))
    first_K = np.cumsum(rows.sizes) - rows.sizes
    rank_n = np.empty(len(rows), np.int64)
    rank_n[order] = np.arange(len(rows)) - first_K[rows.cluster_id[order]]
    return rank_n

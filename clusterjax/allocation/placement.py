"""Placement: the shard of every example of a step (METHOD §5). Never changes a result.

All functions work on many steps at once: arrays are [S, B] for S steps.
"""

from __future__ import annotations

import numpy as np

from clusterjax import errors

_SWAP_ROUNDS = 12
_CELLS = 4_000_000  # numbers in one work array


def spread(
    cluster_SB: np.ndarray, length_SB: np.ndarray, num_shards: int
) -> np.ndarray:
    """Balanced shares of every cluster (± 1) and of the examples (± 1); even tokens.

    Positions of a step, with the clusters side by side, are dealt to the shards in
    turn: that fixes how many examples of each cluster a shard gets. Which ones is then
    decided by length: the longest first, each to the shard with the fewest tokens that
    still expects one of its cluster; and last, pairs are swapped between the fullest
    and the emptiest shard as long as that helps: two of one cluster, or one each of two
    clusters that the giving shards have one more of.

    Args:
      cluster_SB: int [S, B], equal ones side by side; −1 = no example.
      length_SB: int [S, B] tokens, 0 where there is no example.
      num_shards: R.

    Returns:
      int32 [S, B] shards in [0, R), −1 = no example.
    """
    num_steps, batch = cluster_SB.shape
    if num_shards == 1:
        return np.where(cluster_SB >= 0, 0, -1).astype(np.int32)
    shard_SB = np.empty(cluster_SB.shape, np.int32)
    chunk = max(_CELLS // (batch * max(num_shards, 8)), 1)
    for begin in range(0, num_steps, chunk):
        part = slice(begin, begin + chunk)
        group = _dense_groups(cluster_SB[part])
        shard_SB[part] = _deal(group, length_SB[part], num_shards)
        _swap(shard_SB[part], group, length_SB[part], num_shards)
    shard_SB[cluster_SB < 0] = -1
    return shard_SB


def dedicated(
    cluster_SB: np.ndarray, quota_K: np.ndarray, num_shards: int
) -> np.ndarray:
    """Every shard its own clusters (the paper's), or every cluster its own shards.

    Args:
      cluster_SB: int [S, B], equal ones side by side; −1 = no example.
      quota_K: int [K], which must be equal.
      num_shards: R, a divisor or a multiple of K.

    Returns:
      int32 [S, B] shards in [0, R), −1 = no example.

    Raises:
      errors.PlanError: the quotas differ, or neither of R and K divides the other.
    """
    num_clusters = len(quota_K)
    if len(np.unique(quota_K)) > 1:
        raise errors.PlanError(
            f"allocation.placement='dedicated' needs equal quotas; they are"
            f" {quota_K.min():,} to {quota_K.max():,} here; use placement='spread', or"
            " selection.quota='min'"
        )
    if num_clusters % num_shards and num_shards % num_clusters:
        raise errors.PlanError(
            f"allocation.placement='dedicated' can't give {num_clusters} clusters to"
            f" {num_shards} data shards: one number must divide the other; use"
            " placement='spread', or another clustering.num_clusters"
        )
    if num_clusters >= num_shards:
        shard_SB = cluster_SB // (num_clusters // num_shards)
    else:
        each = num_shards // num_clusters
        # Position inside the cluster's block of the row, dealt to its shards in turn.
        place = np.arange(cluster_SB.shape[1]) - _block_starts(cluster_SB)
        shard_SB = cluster_SB * each + place % each
    return np.where(cluster_SB < 0, -1, shard_SB).astype(np.int32)


def _dense_groups(cluster_SB: np.ndarray) -> np.ndarray:
    """int32 [S, B]: 0, 1, … for the clusters of a row as they come."""
    change = np.zeros(cluster_SB.shape, np.int32)
    change[:, 1:] = cluster_SB[:, 1:] != cluster_SB[:, :-1]
    return np.cumsum(change, axis=1, dtype=np.int32)


def _block_starts(cluster_SB: np.ndarray) -> np.ndarray:
    """int [S, B]: the position where the block of equal clusters begins."""
    position = np.arange(cluster_SB.shape[1])
    change = np.ones(cluster_SB.shape, bool)
    change[:, 1:] = cluster_SB[:, 1:] != cluster_SB[:, :-1]
    return np.maximum.accumulate(np.where(change, position, 0), axis=1)


def _deal(group_SB: np.ndarray, length_SB: np.ndarray, num_shards: int) -> np.ndarray:
    """Longest first, to the emptiest shard that still expects one of the group."""
    num_steps, batch = group_SB.shape
    steps = np.arange(num_steps)
    num_groups = int(group_SB.max()) + 1
    expected = np.zeros((num_steps, num_groups, num_shards), np.int32)
    deal = np.broadcast_to(np.arange(batch) % num_shards, group_SB.shape)
    np.add.at(expected, (steps[:, None], group_SB, deal), 1)
    load = np.zeros((num_steps, num_shards), np.int64)
    shard_SB = np.zeros(group_SB.shape, np.int32)
    order = np.argsort(-length_SB, axis=1, kind="stable")
    full = np.iinfo(np.int64).max
    for i in range(batch):
        item = order[:, i]
        group = group_SB[steps, item]
        open_shards = expected[steps, group] > 0
        shard = np.argmin(np.where(open_shards, load, full), axis=1)
        shard_SB[steps, item] = shard
        expected[steps, group, shard] -= 1
        load[steps, shard] += length_SB[steps, item]
    return shard_SB


def _swap(
    shard_SB: np.ndarray, group_SB: np.ndarray, length_SB: np.ndarray, num_shards: int
) -> None:
    """Swaps pairs between the fullest and the emptiest shard, in place."""
    load = _loads(shard_SB, length_SB, num_shards)
    active = np.arange(len(shard_SB))
    for _ in range(_SWAP_ROUNDS):
        high, low = load[active].argmax(1), load[active].argmin(1)
        gap = load[active, high] - load[active, low]
        worth = gap * 100 * num_shards > load[active].sum(1)  # above 1 % of the mean
        active, high, low, gap = active[worth], high[worth], low[worth], gap[worth]
        if not len(active):
            return
        gain = _best_pairs(shard_SB, group_SB, length_SB, active, high, low, gap)
        better, first, second, moved = gain
        active, first, second = active[better], first[better], second[better]
        high, low, moved = high[better], low[better], moved[better]
        shard_SB[active, first] = low
        shard_SB[active, second] = high
        load[active, high] -= moved
        load[active, low] += moved


def _best_pairs(
    shard_SB: np.ndarray,
    group_SB: np.ndarray,
    length_SB: np.ndarray,
    active: np.ndarray,
    high: np.ndarray,
    low: np.ndarray,
    gap: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For each active step the pair whose difference is nearest to half the gap.

    Returns:
      (whether it helps, position on the fullest shard, position on the emptiest,
      tokens moved), one of each for every active step.
    """
    shard, group, length = shard_SB[active], group_SB[active], length_SB[active]
    first = _members(shard == high[:, None])
    second = _members(shard == low[:, None])
    rows = np.arange(len(active))[:, None]
    difference = length[rows, first][:, :, None] - length[rows, second][:, None, :]
    group_first, group_second = group[rows, first], group[rows, second]
    surplus = _surplus(shard, group, high, low)
    allowed = group_first[:, :, None] == group_second[:, None, :]
    allowed |= (surplus[rows, group_first] > 0)[:, :, None] & (
        surplus[rows, group_second] < 0
    )[:, None, :]
    allowed &= (first >= 0)[:, :, None] & (second >= 0)[:, None, :]
    distance = np.where(
        allowed, np.abs(2 * difference - gap[:, None, None]), np.iinfo(np.int64).max
    )
    best = distance.reshape(len(active), -1).argmin(1)
    i, j = np.divmod(best, second.shape[1])
    moved = difference[rows[:, 0], i, j]
    better = (distance[rows[:, 0], i, j] < gap) & (moved > 0)
    return better, first[rows[:, 0], i], second[rows[:, 0], j], moved


def _surplus(
    shard_SB: np.ndarray, group_SB: np.ndarray, high: np.ndarray, low: np.ndarray
) -> np.ndarray:
    """int [S, groups]: how many more of a group the shard `high` has than `low`."""
    result = np.zeros((len(shard_SB), int(group_SB.max()) + 1), np.int32)
    sign_SB = (shard_SB == high[:, None]).astype(np.int32) - (shard_SB == low[:, None])
    np.add.at(result, (np.arange(len(shard_SB))[:, None], group_SB), sign_SB)
    return result


def _members(mask_SB: np.ndarray) -> np.ndarray:
    """int [S, most]: positions where the mask is true, −1 at the end."""
    count = mask_SB.sum(1)
    position = np.argsort(~mask_SB, axis=1, kind="stable")[:, : max(count.max(), 1)]
    return np.where(np.arange(position.shape[1]) < count[:, None], position, -1)


def _loads(shard_SB: np.ndarray, length_SB: np.ndarray, num_shards: int) -> np.ndarray:
    """int64 [S, R], tokens of each shard."""
    cell = np.arange(len(shard_SB))[:, None] * num_shards + np.maximum(shard_SB, 0)
    total = np.bincount(
        cell.ravel(), length_SB.ravel(), minlength=len(shard_SB) * num_shards
    )
    return total.reshape(len(shard_SB), num_shards).astype(np.int64)

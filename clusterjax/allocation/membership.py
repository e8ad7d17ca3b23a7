"""Membership: the kept entries of every step of one epoch (METHOD §5).

Guarantees, for kept entries M in K clusters with quotas q_c, batch size B and
S = ⌈M/B⌉ steps, all in integer arithmetic:
  - no entry twice in an epoch, and every entry once;
  - every full step holds exactly B entries, ⌊B·q_c/M⌋ or ⌈B·q_c/M⌉ of cluster c;
  - the incomplete last step holds the B' that remain, ⌊B'·q_c/M⌋ or ⌈B'·q_c/M⌉ of
    cluster c.
That is a controlled rounding of the table of fractions B_s·q_c/M; one always exists.

References:
  Bacharach, "Matrix rounding problems", Management Science 12(9), 1966;
  Cox, "A constructive procedure for unbiased controlled rounding", JASA 82, 1987.
"""

from __future__ import annotations

import numpy as np

from clusterjax import shuffling

_ENTRIES, _CLUSTERS, _STEPS, _LAST = range(0xA110C, 0xA110C + 4)


def num_steps(num_entries: int, batch_size: int, last_step: str) -> int:
    """S, steps of one epoch (at least 1)."""
    if last_step == "drop":
        return max(num_entries // batch_size, 1)
    return -(-num_entries // batch_size)


def last_step_counts(
    quota_K: np.ndarray, batch_size: int, order_K: np.ndarray
) -> np.ndarray:
    """n'_c, entries of each cluster in the incomplete last step; zeros if none.

    The bounds keep both the last step and the full steps inside their rounding.

    Args:
      quota_K: int [K].
      batch_size: B.
      order_K: the clusters in the order in which they may round up.

    Returns:
      int64 [K], with sum M mod B.
    """
    quota_K = np.asarray(quota_K, np.int64)
    total = int(quota_K.sum())
    full_steps, rest = divmod(total, batch_size)
    if rest == 0:
        return np.zeros_like(quota_K)
    low_K, high_K = _rounded(quota_K, rest, total)
    full_low_K, full_high_K = _rounded(quota_K, batch_size, total)
    low_K = np.maximum(low_K, quota_K - full_steps * full_high_K)
    high_K = np.minimum(high_K, quota_K - full_steps * full_low_K)
    counts_K = low_K.copy()
    open_K = order_K[(high_K > low_K)[order_K]]
    # At most one more each: low and high differ by at most one where they are open.
    counts_K[open_K[: rest - int(low_K.sum())]] += 1
    return counts_K


def epoch_members(
    cluster_id_M: np.ndarray,
    quota_K: np.ndarray,
    ids_M: np.ndarray,
    batch_size: int,
    seed: int,
    epoch: int,
) -> np.ndarray:
    """The entries of every step of an epoch, those of a cluster side by side.

    The entries are laid out cluster by cluster on a line, and position p goes to step
    p mod S: consecutive positions of a cluster meet every step equally (± 1). Order of
    clusters, steps and entries is drawn by (seed, epoch).

    Args:
      cluster_id_M: int [M].
      quota_K: int [K], entries of each cluster.
      ids_M: integer ids that the random order hangs on.
      batch_size: B.
      seed: seed of the order.
      epoch: from 0.

    Returns:
      int32 [⌈M/B⌉, B] entries in [0, M), −1 after the end of an incomplete last step.
    """
    clusters_K = np.arange(len(quota_K))
    rank_K = np.empty(len(quota_K), np.uint64)
    order_K = shuffling.random_order(clusters_K, seed, epoch, _CLUSTERS)
    rank_K[order_K] = clusters_K
    line = _by_cluster_then_random(cluster_id_M, rank_K, ids_M, seed, epoch)
    last_K = last_step_counts(
        quota_K,
        batch_size,
        shuffling.random_order(clusters_K, seed, epoch, _LAST),
    )
    full, last = _split_last(line, quota_K[order_K], last_K[order_K])
    full_steps = len(full) // batch_size
    steps_SB = full.reshape(batch_size, full_steps).T
    steps_SB = steps_SB[
        shuffling.random_order(np.arange(full_steps), seed, epoch, _STEPS)
    ]
    if len(last):
        row = np.full((1, batch_size), -1, line.dtype)
        row[0, : len(last)] = last
        steps_SB = np.concatenate([steps_SB, row])
    return np.ascontiguousarray(steps_SB)


def _rounded(
    quota_K: np.ndarray, size: int, total: int
) -> tuple[np.ndarray, np.ndarray]:
    """Floor and ceiling of size·q_c/M."""
    product_K = quota_K * size
    return product_K // total, -(-product_K // total)


def _by_cluster_then_random(
    cluster_id_M: np.ndarray,
    rank_K: np.ndarray,
    ids_M: np.ndarray,
    seed: int,
    epoch: int,
) -> np.ndarray:
    """int32 [M]: entries sorted by rank of the cluster, at random inside it."""
    bits = max(int(len(rank_K) - 1).bit_length(), 1)
    keys_M = shuffling.random_keys(ids_M, seed, epoch, _ENTRIES) >> np.uint64(bits)
    keys_M |= rank_K[cluster_id_M] << np.uint64(64 - bits)
    return np.argsort(keys_M, kind="stable").astype(np.int32)


def _split_last(
    line: np.ndarray, quota: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Takes the first `last` entries of each cluster's block out of the line."""
    if not last.any():
        return line, line[:0]
    begin = np.cumsum(quota) - quota
    position = np.arange(len(line)) - np.repeat(begin, quota)
    is_last = position < np.repeat(last, quota)
    return line[~is_last], line[is_last]

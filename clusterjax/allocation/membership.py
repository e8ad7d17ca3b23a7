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

_ENTRIES, _CLUSTERS, _STEPS, _LAST, _STRATA = range(0xA110C, 0xA110C + 5)


def num_steps(num_entries: int, batch_size: int, last_step: str) -> int:
    """S, steps of one epoch (at least 1)."""
    if last_step == "drop":
        return max(num_entries // batch_size, 1)
    return -(-num_entries // batch_size)


def last_step_counts(
    quota_K: np.ndarray, batch_size: int, order_K: np.ndarray
) -> np.ndarray:
    """n'_c, entries of each cluster in the incomplete last step; zeros if none.

    Any rounding of B'·q_c/M will do: with x = B·q_c/M, the full steps are left
    q_c − n'_c entries, and since q_c = (S−1)·x + B'·q_c/M and counts are integers,
    (S−1)·⌊x⌋ ≤ q_c − n'_c ≤ (S−1)·⌈x⌉.

    Args:
      quota_K: int [K].
      batch_size: B.
      order_K: the clusters in the order in which they may round up.

    Returns:
      int64 [K], with sum M mod B.
    """
    quota_K = np.asarray(quota_K, np.int64)
    total = int(quota_K.sum())
    rest = total % batch_size
    if rest == 0:
        return np.zeros_like(quota_K)
    counts_K, remainder_K = np.divmod(quota_K * rest, total)
    open_K = order_K[remainder_K[order_K] > 0]
    counts_K[open_K[: rest - int(counts_K.sum())]] += 1
    return counts_K


def epoch_members(
    cluster_id_M: np.ndarray,
    quota_K: np.ndarray,
    ids_M: np.ndarray,
    batch_size: int,
    seed: int,
    epoch: int,
    size_M: np.ndarray | None = None,
) -> np.ndarray:
    """The entries of every step of an epoch, those of a cluster side by side.

    The entries are laid out cluster by cluster on a line, and position p goes to step
    p mod S: consecutive positions of a cluster meet every step equally (± 1). Order of
    clusters, steps and entries is drawn by (seed, epoch).

    With `size_M`, entries of a cluster are laid out by size, S at a time in random
    order: every step draws one from each such stratum, so that steps hold about equally
    many tokens. Each entry is still in each step with equal probability.

    Args:
      cluster_id_M: int [M].
      quota_K: int [K], entries of each cluster.
      ids_M: integer ids that the random order hangs on.
      batch_size: B.
      seed: seed of the order.
      epoch: from 0.
      size_M: int [M], e.g. label tokens; None: no strata.

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
    if size_M is not None and full_steps:
        rest = (quota_K - last_K)[order_K]
        full = _by_strata(full, rest, full_steps, size_M, ids_M, (seed, epoch))
    steps_SB = full.reshape(batch_size, full_steps).T
    steps_SB = steps_SB[
        shuffling.random_order(np.arange(full_steps), seed, epoch, _STEPS)
    ]
    if len(last):
        row = np.full((1, batch_size), -1, line.dtype)
        row[0, : len(last)] = last
        steps_SB = np.concatenate([steps_SB, row])
    return np.ascontiguousarray(steps_SB)


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


def _by_strata(
    line: np.ndarray,
    quota: np.ndarray,
    num_steps: int,
    size_M: np.ndarray,
    ids_M: np.ndarray,
    salts: tuple[int, int],
) -> np.ndarray:
    """Lays out each cluster's block of the line in strata of equal sizes.

    The first q_c mod S entries, drawn at random, stay where they are; the others are
    sorted by size and cut into strata of S, each in random order.

    Args:
      line: entries, cluster by cluster, at random inside them.
      quota: entries of each cluster, in the order of the line.
      num_steps: S.
    """
    begin = np.repeat(np.cumsum(quota) - quota + quota % num_steps, quota)
    position = np.arange(len(line)) - begin
    where = np.flatnonzero(position >= 0)
    block = np.repeat(np.arange(len(quota)), quota)[where]
    entry = line[where]
    widest = int(size_M.max(initial=0)) + 1
    order = np.argsort(block * widest + size_M[entry], kind="stable")
    entry = entry[order]
    # The block's entries now lie by size: every S of them are one stratum.
    keys = shuffling.random_keys(ids_M[entry], *salts, _STRATA)
    stratum = np.arange(len(entry)) // num_steps
    bits = max(int(len(entry) // num_steps).bit_length(), 1)
    keys >>= np.uint64(bits)
    keys |= stratum.astype(np.uint64) << np.uint64(64 - bits)
    result = line.copy()
    result[where] = entry[np.argsort(keys, kind="stable")]
    return result


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

"""Packing: rows and offsets of a shard's examples. Never changes a result.

Functions work on many steps at once: arrays are [S, B] for S steps.
"""

from __future__ import annotations

import itertools

import numpy as np

_CELLS = 4_000_000  # numbers in one work array


def one_per_row(shard_SB: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every example has a row of its own.

    Args:
      shard_SB: int [S, B], −1 = no example.

    Returns:
      (row int32 [S, B] inside the shard, start int32 [S, B] = 0); −1 = no example.
    """
    order, position = _rank_in_shard(shard_SB, np.zeros_like(shard_SB))
    row_SB = np.empty(shard_SB.shape, np.int32)
    np.put_along_axis(row_SB, order, position, axis=1)
    row_SB[shard_SB < 0] = -1
    return row_SB, np.where(shard_SB < 0, -1, 0).astype(np.int32)


def best_fit(
    shard_SB: np.ndarray, length_SB: np.ndarray, num_shards: int, row_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing: the longest first, each into the fullest row it fits.

    Args:
      shard_SB: int [S, B], −1 = no example.
      length_SB: int [S, B] tokens, at most `row_length`.
      num_shards: R.
      row_length: T.

    Returns:
      (row int32 [S, B] inside the shard, start int32 [S, B] in the row); −1 = no
      example. At most 11/9 · optimum + 1 rows are used.

    References:
      Johnson et al., "Worst-case performance bounds for simple one-dimensional packing
      algorithms", SIAM J. Computing 3(4), 1974.
    """
    row_SB = np.full(shard_SB.shape, -1, np.int32)
    start_SB = np.full(shard_SB.shape, -1, np.int32)
    chunk = max(_CELLS // (shard_SB.shape[1] * max(num_shards, 4)), 1)
    for begin in range(0, len(shard_SB), chunk):
        part = slice(begin, begin + chunk)
        _pack(
            shard_SB[part],
            length_SB[part],
            num_shards,
            row_length,
            row_SB[part],
            start_SB[part],
        )
    return row_SB, start_SB


def _pack(
    shard_SB: np.ndarray,
    length_SB: np.ndarray,
    num_shards: int,
    row_length: int,
    row_SB: np.ndarray,
    start_SB: np.ndarray,
) -> None:
    """Fills `row_SB`, `start_SB` in place; a bin of rows for each (step, shard)."""
    order, position = _rank_in_shard(shard_SB, -length_SB)
    step, slot = np.nonzero(np.take_along_axis(shard_SB, order, 1) >= 0)
    item = order[step, slot]
    turn = position[step, slot]
    bin_of = step * num_shards + shard_SB[step, item]
    # All first items of their shards, then all second ones, …: a bin once in a turn.
    by_turn = np.argsort(turn, kind="stable")
    step, item, bin_of, turn = (
        step[by_turn],
        item[by_turn],
        bin_of[by_turn],
        turn[by_turn],
    )
    edges = np.searchsorted(turn, np.arange(turn.max(initial=-1) + 2))
    free = np.full((len(shard_SB) * num_shards, 1), row_length, np.int32)
    for first, last in itertools.pairwise(edges):
        part = slice(first, last)
        length = length_SB[step[part], item[part]].astype(np.int32)
        left = free[bin_of[part]]
        left = np.where(left >= length[:, None], left, row_length + 1)
        row = left.argmin(1)
        if (left[np.arange(len(row)), row] > row_length).any():
            more = np.full(
                (len(free), max(free.shape[1] // 2, 1)), row_length, np.int32
            )
            free = np.concatenate([free, more], axis=1)
            left = free[bin_of[part]]
            row = np.where(left >= length[:, None], left, row_length + 1).argmin(1)
        row_SB[step[part], item[part]] = row
        start_SB[step[part], item[part]] = row_length - free[bin_of[part], row]
        free[bin_of[part], row] -= length


def _rank_in_shard(
    shard_SB: np.ndarray, key_SB: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Order by (shard, key, position), and the rank of each inside its shard."""
    key_SB = key_SB - key_SB.min(initial=0)
    width = int(key_SB.max(initial=0)) + 1
    order = np.argsort(
        shard_SB.astype(np.int64) * width + key_SB, axis=1, kind="stable"
    )
    sorted_shard = np.take_along_axis(shard_SB, order, 1)
    position = np.arange(shard_SB.shape[1])
    change = np.ones(shard_SB.shape, bool)
    change[:, 1:] = sorted_shard[:, 1:] != sorted_shard[:, :-1]
    begin = np.maximum.accumulate(np.where(change, position, 0), axis=1)
    return order, (position - begin).astype(np.int32)

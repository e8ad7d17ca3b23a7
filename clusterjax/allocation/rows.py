"""Packing: rows and offsets of a shard's examples. Never changes a result.

Functions work on many steps at once: arrays are [S, B] for S steps.
"""

from __future__ import annotations

import itertools

import numpy as np

from clusterjax import shuffling

_CELLS = 4_000_000  # numbers in one work array
_ORDERS = 8  # tried where best-fit decreasing leaves room


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

    Where a shard needs more rows than its tokens fill, a few other orders are tried.

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
        row_SB[part], start_SB[part] = _best_of_orders(
            shard_SB[part], length_SB[part], num_shards, row_length
        )
    return row_SB, start_SB


def _best_of_orders(
    shard_SB: np.ndarray, length_SB: np.ndarray, num_shards: int, row_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """(row, start), from the order that needs the fewest rows in each shard."""
    row_SB, start_SB = _pack(shard_SB, length_SB, length_SB, num_shards, row_length)
    tokens_SR = _per_shard(np.add, shard_SB, length_SB, num_shards)
    least_SR = -(-tokens_SR // row_length)
    used_SR = _per_shard(np.maximum, shard_SB, row_SB + 1, num_shards)
    for attempt in range(_ORDERS):
        again = np.flatnonzero((used_SR > least_SR).any(1))
        if not len(again):
            break
        shard, length = shard_SB[again], length_SB[again]
        # Lengths, each made up to a half longer, give an order that is still nearly
        # decreasing. A step's order must not depend on the steps beside it.
        noise_B = shuffling.random_keys(np.arange(shard.shape[1]), attempt)
        key = length * (256 + (noise_B % np.uint64(128)).astype(np.int64))[None]
        row, start = _pack(shard, length, key, num_shards, row_length)
        used = _per_shard(np.maximum, shard, row + 1, num_shards)
        better = used < used_SR[again]
        take = better[np.arange(len(again))[:, None], shard] & (shard >= 0)
        row_SB[again] = np.where(take, row, row_SB[again])
        start_SB[again] = np.where(take, start, start_SB[again])
        used_SR[again] = np.minimum(used, used_SR[again])
    return row_SB, start_SB


def _per_shard(
    combine: np.ufunc, shard_SB: np.ndarray, value_SB: np.ndarray, num_shards: int
) -> np.ndarray:
    """int64 [S, R]: the values of each shard's examples, combined; 0 without any."""
    result_SR = np.zeros((len(shard_SB), num_shards), np.int64)
    step, slot = np.nonzero(shard_SB >= 0)
    at = step, shard_SB[step, slot]
    combine.at(result_SR, at, value_SB[step, slot])
    return result_SR


def _pack(
    shard_SB: np.ndarray,
    length_SB: np.ndarray,
    key_SB: np.ndarray,
    num_shards: int,
    row_length: int,
) -> tuple[np.ndarray, np.ndarray]:
    """(row, start): best fit in order of falling keys, in each (step, shard) apart."""
    row_SB = np.full(shard_SB.shape, -1, np.int32)
    start_SB = np.full(shard_SB.shape, -1, np.int32)
    order, position = _rank_in_shard(shard_SB, -key_SB)
    step, slot = np.nonzero(np.take_along_axis(shard_SB, order, 1) >= 0)
    # All first items of their shards, then all second ones, …: a shard once in a turn.
    turn = position[step, slot]
    by_turn = np.argsort(turn, kind="stable")
    step, item = step[by_turn], order[step, slot][by_turn]
    bin_of = step * num_shards + shard_SB[step, item]
    length_of = length_SB[step, item].astype(np.int32)
    edges = np.searchsorted(turn[by_turn], np.arange(turn.max(initial=-1) + 2))
    free = np.full((len(shard_SB) * num_shards, 1), row_length, np.int32)
    for first, last in itertools.pairwise(edges):
        part = slice(first, last)
        bins, length = bin_of[part], length_of[part]
        row, fits = _fullest(free[bins], length, row_length)
        if not fits:
            more = np.full((len(free), free.shape[1] // 2 + 1), row_length, np.int32)
            free = np.concatenate([free, more], axis=1)
            row, _ = _fullest(free[bins], length, row_length)
        row_SB[step[part], item[part]] = row
        start_SB[step[part], item[part]] = row_length - free[bins, row]
        free[bins, row] -= length
    return row_SB, start_SB


def _fullest(
    free: np.ndarray, length: np.ndarray, row_length: int
) -> tuple[np.ndarray, bool]:
    """The fullest row that each example fits in, and whether all found one."""
    left = np.where(free >= length[:, None], free, row_length + 1)
    row = left.argmin(1)
    return row, bool((left[np.arange(len(row)), row] <= row_length).all())


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

"""Packing: examples of many lengths share rows of one length. Imports no jax."""

from __future__ import annotations

import itertools

import numpy as np


def pack(lengths: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing: the longest first, each into the fullest row it fits.

    Equal lengths are placed together, so the cost grows with the number of different
    lengths and not with N: a million examples take a second.

    Args:
      lengths: int [N] tokens of each example, in [1, row_length].
      row_length: T, tokens of a row.

    Returns:
      (row int64 [N], start int64 [N] of the example in its row). Rows are numbered
      from 0 in the order of their opening; at most 11/9 · optimum + 1 are used.

    Raises:
      ValueError: a length that does not fit.

    References:
      Johnson et al., "Worst-case performance bounds for simple one-dimensional packing
      algorithms", SIAM J. Computing 3(4), 1974.
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= row_length:
        raise ValueError(
            f"lengths from {lengths.min()} to {lengths.max()} in rows of {row_length}"
        )
    order = np.argsort(-lengths, kind="stable")
    edges = [0, *(np.flatnonzero(np.diff(lengths[order])) + 1), len(lengths)]
    row, start = np.empty_like(lengths), np.empty_like(lengths)
    rows = _Rows(row_length)
    for first, last in itertools.pairwise(edges):
        if first < last:
            same = order[first:last]
            row[same], start[same] = rows.place(int(lengths[same[0]]), last - first)
    return row, start


class _Rows:
    """Open rows by what is left in them."""

    def __init__(self, row_length: int):
        self._row_length = row_length
        self._count = 0
        self._by_left: dict[int, list[np.ndarray]] = {}
        self._is_used = np.zeros(row_length + 1, bool)

    def place(self, length: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(row, start) of `count` examples of one length."""
        rows, starts = [], []
        fitting = length + np.flatnonzero(self._is_used[length:])
        for left in [*fitting.tolist(), self._row_length]:
            # A row that takes one example stays the fullest that fits, and so takes
            # the next ones until it is full.
            each = left // length
            wanted = -(-count // each)
            taken = self._take(left, wanted, new=left == self._row_length)
            many = min(len(taken) * each, count)
            turn = np.arange(many)
            rows.append(taken[turn // each])
            starts.append(self._row_length - left + turn % each * length)
            self._put(left - each * length, taken[: many // each])
            self._put(left - many % each * length, taken[many // each :])
            count -= many
            if not count:
                break
        return np.concatenate(rows), np.concatenate(starts)

    def _take(self, left: int, wanted: int, new: bool) -> np.ndarray:
        if new:
            self._count += wanted
            return np.arange(self._count - wanted, self._count)
        rows = np.sort(np.concatenate(self._by_left.pop(left)))
        self._is_used[left] = False
        self._put(left, rows[wanted:])
        return rows[:wanted]

    def _put(self, left: int, rows: np.ndarray) -> None:
        if len(rows):
            self._by_left.setdefault(left, []).append(rows)
            self._is_used[left] = True

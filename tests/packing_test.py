"""Best-fit decreasing against a naive twin, and its bounds."""

import time

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from clusterjax import packing


def _naive(lengths: list[int], row_length: int) -> tuple[list[int], list[int]]:
    """One example at a time: the fullest row that fits, the first among equals."""
    left: list[int] = []
    row, start = [0] * len(lengths), [0] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = [(r, k) for k, r in enumerate(left) if r >= lengths[i]]
        if not fits:
            left.append(row_length)
            fits = [(row_length, len(left) - 1)]
        room, k = min(fits)
        row[i], start[i] = k, row_length - room
        left[k] -= lengths[i]
    return row, start


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 45))
def test_equals_the_naive_algorithm(lengths, row_length):
    row, start = packing.pack(np.array(lengths, int), row_length)
    assert (row.tolist(), start.tolist()) == _naive(lengths, row_length)


def test_by_hand():
    # 6+4, 5+3+2: two full rows of ten.
    row, start = packing.pack(np.array([2, 4, 5, 6, 3]), 10)
    assert row.tolist() == [1, 0, 1, 0, 1]
    assert start.tolist() == [8, 6, 0, 0, 5]


def test_a_million_examples_in_seconds_without_overlap(rng):
    lengths = np.minimum(rng.geometric(1 / 200, 1_000_000), 1024)
    begin = time.perf_counter()
    row, start = packing.pack(lengths, 1024)
    assert time.perf_counter() - begin < 15
    order = np.lexsort((start, row))
    end = (start + lengths)[order]
    same_row = np.diff(row[order]) == 0
    assert np.all(start[order][1:][same_row] == end[:-1][same_row])
    assert end.max() <= 1024
    lower_bound = -(-lengths.sum() // 1024)
    assert row.max() + 1 <= 1.001 * lower_bound


@pytest.mark.parametrize("length", [0, 11])
def test_a_length_that_does_not_fit(length):
    with pytest.raises(ValueError, match="rows of 10"):
        packing.pack(np.array([3, length]), 10)

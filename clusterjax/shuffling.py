"""Stateless random order: a pure function of ids and salts.

A run must draw the same order again years later, on another machine and after a
restart. NumPy may change its Generator's stream between versions, and a permutation
drawn by position changes everywhere when one example is added. So order comes from
sorting a 64-bit hash of each id, which has neither trouble.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def random_keys(ids: np.ndarray, *salts: int) -> np.ndarray:
    """uint64 keys, one for each id: the splitmix64 finaliser chained over the salts.

    Args:
      ids: integer array of any shape.
      *salts: integers (seed, epoch, purpose) that choose another, independent draw.

    References:
      Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    state = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for salt in salts:
            state = _mix(state + np.uint64(salt & 0xFFFFFFFFFFFFFFFF))
        return _mix(np.asarray(ids).astype(np.uint64) * _GOLDEN + state)


def random_order(ids: np.ndarray, *salts: int) -> np.ndarray:
    """int64 [n]: positions of `ids` in random order (see `random_keys`)."""
    return np.argsort(random_keys(ids, *salts), kind="stable")


def _mix(value: np.ndarray) -> np.ndarray:
    value = np.asarray(value + _GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * _MULTIPLIER_1
    value = (value ^ (value >> np.uint64(27))) * _MULTIPLIER_2
    return value ^ (value >> np.uint64(31))

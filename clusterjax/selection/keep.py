"""Keep rules: the order in which a cluster's examples are kept (METHOD §3).

A rule returns positions of the cluster's members, the first to be kept first. Ties are
broken by example id: members come in ascending id, and every sort is stable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from clusterjax import shuffling


class SubsetRules(Protocol):
    """The rules that need more than a sort; `clusterjax.subset` has jitted ones."""

    def k_center(self, values_ND: np.ndarray, count: int, start: int) -> np.ndarray:
        """int [count] rows: the greedy farthest-first cover, from row `start`."""
        ...

    def herding(self, vectors_ND: np.ndarray, count: int) -> np.ndarray:
        """int [count] rows: each leaves the running sum of vectors nearest to zero."""
        ...


def nearest(distance_n: np.ndarray) -> np.ndarray:
    """Nearest to the centre first."""
    return np.argsort(distance_n, kind="stable")


def farthest(distance_n: np.ndarray) -> np.ndarray:
    """Farthest from the centre first (the paper's default)."""
    return np.argsort(-distance_n, kind="stable")


def mixed(distance_n: np.ndarray, quota: int) -> np.ndarray:
    """⌊quota/2⌋ nearest, then the farthest of the rest."""
    order_n = nearest(distance_n)
    half = quota // 2
    rest_n = order_n[half:]
    return np.concatenate(
        [order_n[:half], np.sort(rest_n)[farthest(distance_n[np.sort(rest_n)])]]
    )


def largest_norm(norm_n: np.ndarray) -> np.ndarray:
    """Greatest raw gradient norm first."""
    return np.argsort(-norm_n, kind="stable")


def at_random(id_n: np.ndarray, seed: int) -> np.ndarray:
    """A random order that depends on ids and seed only."""
    return shuffling.random_order(id_n, seed, _SALT)


def then_the_rest(chosen_q: np.ndarray, count: int) -> np.ndarray:
    """`chosen_q`, then all other positions below `count`, ascending."""
    rest_n = np.setdiff1d(np.arange(count), chosen_q)
    return np.concatenate([np.asarray(chosen_q, np.int64), rest_n])


class NumpyRules:
    """Plain NumPy forms of `SubsetRules`: exact, slow beyond some thousand rows."""

    def k_center(self, values_ND: np.ndarray, count: int, start: int) -> np.ndarray:
        """See `SubsetRules`; in float64, ties to the smaller row."""
        values_ND = np.asarray(values_ND, np.float64)
        return _greedy(
            count, start, lambda row: ((values_ND - values_ND[row]) ** 2).sum(1)
        )

    def herding(self, vectors_ND: np.ndarray, count: int) -> np.ndarray:
        """See `SubsetRules`; in float64, ties to the smaller row."""
        vectors_ND = np.asarray(vectors_ND, np.float64)
        square_N = (vectors_ND**2).sum(1)
        total_D = np.zeros(vectors_ND.shape[1])
        chosen = np.zeros(count, np.int64)
        for i in range(count):
            cost_N = 2 * vectors_ND @ total_D + square_N
            chosen[i] = np.argmin(cost_N)
            square_N[chosen[i]] = np.inf
            total_D += vectors_ND[chosen[i]]
        return chosen


def _greedy(
    count: int, start: int, distance_to: Callable[[int], np.ndarray]
) -> np.ndarray:
    chosen = np.zeros(count, np.int64)
    chosen[0] = start
    nearest_N = distance_to(start)
    nearest_N[start] = -1.0
    for i in range(1, count):
        chosen[i] = np.argmax(nearest_N)
        nearest_N = np.minimum(nearest_N, distance_to(chosen[i]))
        nearest_N[chosen[i]] = -1.0
    return chosen


_SALT = 0x5E1EC7

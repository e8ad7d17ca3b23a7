"""Stable cluster names between two clusterings of related data."""

from __future__ import annotations

import numpy as np
from scipy import optimize


def match_centroids(old_KD: np.ndarray, new_LD: np.ndarray) -> np.ndarray:
    """Names every new cluster after the old one that it continues.

    The pairing has the least sum of squared distances between paired centroids
    (Hungarian method). New clusters beyond the old ones get the names K, K + 1, …

    Args:
      old_KD: float [K, D].
      new_LD: float [L, D].

    Returns:
      int64 [L], the name of each new cluster; all different.
    """
    old = np.asarray(old_KD, np.float64)
    new = np.asarray(new_LD, np.float64)
    cost_LK = np.stack([((new - center) ** 2).sum(axis=1) for center in old], axis=1)
    row, column = optimize.linear_sum_assignment(cost_LK)
    names_L = np.full(len(new), -1, np.int64)
    names_L[row] = column
    unnamed = names_L < 0
    names_L[unnamed] = len(old) + np.arange(unnamed.sum())
    return names_L

"""The floor: clusters below a minimum size are dissolved (METHOD §2)."""

from __future__ import annotations

import numpy as np


def dissolve_small(
    values_ND: np.ndarray,
    centroids_KD: np.ndarray,
    label_N: np.ndarray,
    min_cluster_size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Drops the smallest cluster until every cluster has `min_cluster_size` points.

    The points of a dropped cluster go to their nearest remaining centre; centres do
    not move. Of equally small clusters the one with the lowest id goes first. One
    cluster always remains.

    Args:
      values_ND: float [N, D].
      centroids_KD: float32 [K, D].
      label_N: int [N], in [0, K).
      min_cluster_size: points.

    Returns:
      The old ids of the clusters that remain, int64 [K'], ascending, and the labels
      int32 [N] in [0, K').
    """
    label_N = label_N.copy()
    remaining = np.arange(len(centroids_KD))
    while len(remaining) > 1:
        sizes = np.bincount(label_N, minlength=len(centroids_KD))[remaining]
        smallest = int(np.argmin(sizes))
        if sizes[smallest] >= min_cluster_size:
            break
        moved = np.flatnonzero(label_N == remaining[smallest])
        remaining = np.delete(remaining, smallest)
        label_N[moved] = remaining[_nearest(values_ND[moved], centroids_KD[remaining])]
    renamed = np.full(len(centroids_KD), -1, np.int32)
    renamed[remaining] = np.arange(len(remaining))
    return remaining, renamed[label_N]


def _nearest(points_PD: np.ndarray, centroids_KD: np.ndarray) -> np.ndarray:
    distance = np.empty((len(points_PD), len(centroids_KD)))
    for c, center_D in enumerate(centroids_KD.astype(np.float64)):
        distance[:, c] = np.sum((points_PD - center_D) ** 2, axis=1)
    return np.argmin(distance, axis=1)

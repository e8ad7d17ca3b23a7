"""Two-dimensional views of high-dimensional features."""

from __future__ import annotations

import numpy as np


def principal_components(
    values_ND: np.ndarray, num_components: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Leading principal components by a randomised SVD.

    Source: Halko, Martinsson, Tropp, SIAM Review 53 (2011), algorithm 4.4: a random
    range, sharpened by power iterations, then the exact SVD of the small matrix.

    Args:
      values_ND: float [N, D].
      num_components: components wanted; fewer come back when N or D is smaller.
      rng: for the random range.

    Returns:
      (scores [N, c] float32, share of the total variance [c]).
    """
    centered_ND = np.asarray(values_ND, np.float32)
    centered_ND = centered_ND - centered_ND.mean(0)
    rank = min(num_components, *centered_ND.shape)
    width = min(rank + 10, *centered_ND.shape)
    range_Nw = centered_ND @ rng.standard_normal(
        (centered_ND.shape[1], width), np.float32
    )
    for _ in range(7):
        basis_Nw = np.linalg.qr(range_Nw)[0]
        range_Nw = centered_ND @ (centered_ND.T @ basis_Nw)
    basis_Nw = np.linalg.qr(range_Nw)[0]
    left_ww, scale_w, _ = np.linalg.svd(basis_Nw.T @ centered_ND, full_matrices=False)
    scores_Nw = basis_Nw @ (left_ww * scale_w)
    total = float(np.sum(centered_ND.astype(np.float64) ** 2)) or 1.0
    return scores_Nw[:, :rank], (scale_w[:rank].astype(np.float64) ** 2) / total


def between_cluster_axes(
    values_ND: np.ndarray, cluster_id_N: np.ndarray, num_axes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Projection on the directions in which the cluster means differ most.

    The principal axes of the size-weighted cluster means: K clusters lie in K − 1
    dimensions, which principal components of all points may well miss.

    Returns:
      (scores [N, c] float32, share of the between-cluster variance [c]).
    """
    names, label_N = np.unique(cluster_id_N, return_inverse=True)
    size_K = np.bincount(label_N)
    mean_KD = np.zeros((len(names), values_ND.shape[1]))
    np.add.at(mean_KD, label_N, values_ND)
    mean_KD /= size_K[:, None]
    center_D = values_ND.mean(0, dtype=np.float64)
    spread_KD = np.sqrt(size_K)[:, None] * (mean_KD - center_D)
    _, scale, axes = np.linalg.svd(spread_KD, full_matrices=False)
    count = min(num_axes, len(names) - 1, int((scale > 1e-9).sum()))
    scores = (values_ND - center_D) @ axes[:count].T
    return scores.astype(np.float32), scale[:count] ** 2 / max(np.sum(scale**2), 1e-30)

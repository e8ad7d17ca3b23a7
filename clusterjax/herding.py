"""Herding vectors: what a prefix of examples adds to the error of the mean gradient.

Used to choose examples (keep = herding) and to order them (order = herded); the greedy
choice itself lives in `subset` (jitted) and `selection.keep` (NumPy).
"""

from __future__ import annotations

import numpy as np


def vectors(
    values_ND: np.ndarray,
    norm_N: np.ndarray,
    num_labels_N: np.ndarray,
    user_weight_N: np.ndarray,
    cluster_id_N: np.ndarray,
    share_K: np.ndarray,
    normalise: str,
) -> np.ndarray:
    """v_i of METHOD §3, over raw (not unit) gradients g_i = norm_i · values_i.

    For `example`: v_i = (π_c/q_c) (w_i / mean_c w) (g_i − ḡ_c); for `token` w_i is
    replaced by w_i |𝒯_i|. ḡ_c is the mean with the same weights, so the vectors of a
    cluster sum to zero.

    Args:
      values_ND: float32 unit features.
      norm_N: raw lengths.
      num_labels_N: label tokens |𝒯_i|.
      user_weight_N: w_i.
      cluster_id_N: int in [0, K).
      share_K: π_c.
      normalise: `token` or `example`.

    Returns:
      float32 [N, D].
    """
    weight_N = user_weight_N.astype(np.float64)
    if normalise == "token":
        weight_N = weight_N * num_labels_N
    result_ND = np.empty(values_ND.shape, np.float32)
    for cluster in range(len(share_K)):
        members = np.flatnonzero(cluster_id_N == cluster)
        if not len(members):
            continue
        weight = weight_N[members]
        gradients = values_ND[members] * norm_N[members, None].astype(np.float32)
        mean_D = weight @ gradients.astype(np.float64) / weight.sum()
        scale = share_K[cluster] * weight / weight.sum()
        result_ND[members] = (gradients - mean_D.astype(np.float32)) * scale[
            :, None
        ].astype(np.float32)
    return result_ND

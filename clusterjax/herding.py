"""Herding vectors: what a prefix of examples adds to the error of the mean gradient.

Used to choose examples (keep = herding) and to order them (order = herded); the greedy
choice itself lives in `subset` (jitted) and `selection.keep` (NumPy).
"""

from __future__ import annotations

import numpy as np

# Share of the gradients' energy that the balance of label tokens has: enough to even
# them out, little enough to leave the choice to the gradients.
_TOKEN_ENERGY = 0.1


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

    With `token` a mean is divided by the label tokens that it holds: a set of few
    tokens would count too much, and where they vary between steps, the mean over the
    steps is not the cluster's. So one more coordinate for each cluster holds how many
    tokens more than the mean an example has, with a tenth of the gradients' energy.

    Args:
      values_ND: float32 unit features.
      norm_N: raw lengths.
      num_labels_N: label tokens |𝒯_i|.
      user_weight_N: w_i.
      cluster_id_N: int in [0, K).
      share_K: π_c.
      normalise: `token` or `example`.

    Returns:
      float32 [N, D], or [N, D + K] for `token`.
    """
    weight_N = user_weight_N.astype(np.float64)
    if normalise == "token":
        weight_N = weight_N * num_labels_N
    result_ND = np.empty(values_ND.shape, np.float32)
    columns = len(share_K) if normalise == "token" else 0
    balance_NK = np.zeros((len(values_ND), columns), np.float32)
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
        if balance_NK.size:
            excess = weight / weight.mean() - 1
            balance_NK[members, cluster] = excess * _unit(excess, result_ND[members])
    return np.hstack([result_ND, balance_NK]) if balance_NK.size else result_ND


def _unit(excess_n: np.ndarray, vectors_nD: np.ndarray) -> float:
    """What an excess of one mean counts, as a length of the vectors."""
    square = float((excess_n**2).sum())
    energy = _TOKEN_ENERGY * float((vectors_nD**2).sum(dtype=np.float64))
    return (energy / square) ** 0.5 if square else 0.0

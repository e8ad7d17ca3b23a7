"""Per-token weights u_it of METHOD §4, for all steps of an epoch at once."""

from __future__ import annotations

import numpy as np


def epoch_weights(
    members_SB: np.ndarray,
    cluster_id_M: np.ndarray,
    num_labels_M: np.ndarray,
    user_weight_M: np.ndarray,
    share_K: np.ndarray,
    weighting: str,
    normalise: str,
) -> np.ndarray:
    """u_i, the weight of each label token of entry i in its step.

        token:    u_i = π_c (S/S_c) w_i / Σ_{j∈𝓑_c} w_j |𝒯_j|
        example:  u_i = π_c (S/S_c) w_i / (|𝒯_i| Σ_{j∈𝓑_c} w_j)

    With `weighting = none` all examples of the step form one group of share 1. A
    cluster without an entry in the whole epoch (possible when the last step is dropped)
    gives its share to the others in proportion.

    Args:
      members_SB: int [S, B] entries, −1 = none; the entries of a cluster lie side by
        side in a row.
      cluster_id_M: int [M].
      num_labels_M: int [M], |𝒯_i|.
      user_weight_M: float [M], w_i.
      share_K: float64 [K], π_c.
      weighting: `none`, or anything else for clusters.
      normalise: `token` or `example`.

    Returns:
      float64 [S, B], 0 where there is no entry.
    """
    step, slot = np.nonzero(members_SB >= 0)
    entry = members_SB[step, slot]
    group = np.zeros(len(entry), np.int64)
    if weighting != "none":
        group = cluster_id_M[entry].astype(np.int64)
    user = user_weight_M[entry].astype(np.float64)
    labels = num_labels_M[entry].astype(np.float64)
    mass = user * labels if normalise == "token" else user
    change = np.flatnonzero((np.diff(step) != 0) | (np.diff(group) != 0)) + 1
    begin = np.concatenate([[0], change])
    size = np.diff(np.append(begin, len(entry)))
    total = np.repeat(np.add.reduceat(mass, begin), size)
    scale = _epoch_share(group[begin], share_K, len(members_SB), weighting)
    weight = np.repeat(scale, size) * user / total
    if normalise == "example":
        weight /= labels
    result_SB = np.zeros(members_SB.shape)
    result_SB[step, slot] = weight
    return result_SB


def _epoch_share(
    group_g: np.ndarray, share_K: np.ndarray, num_steps: int, weighting: str
) -> np.ndarray:
    """π_c·S/S_c of each (step, cluster) group that occurs."""
    if weighting == "none":
        return np.ones(len(group_g))
    steps_K = np.bincount(group_g, minlength=len(share_K))  # S_c
    present_K = np.where(steps_K > 0, share_K, 0.0)
    if (steps_K == 0).any():
        present_K = present_K / present_K.sum()
    return (present_K * num_steps / np.maximum(steps_K, 1))[group_g]

"""Exchanges between steps, after a greedy order: steps nearer to the mean gradient.

The greedy order keeps prefix sums small and looks at one example at a time. Exchanging
examples between two steps, as long as that brings both nearer to the mean, reaches what
it can't: on the embedded model the noise of a step falls by a further tenth.
"""

from __future__ import annotations

import numpy as np

_GRAM_BYTES = 2**29

# Exchanges must gain more than rounding: relative to the squared lengths involved.
_GAIN = 1e-6


def improve(
    order_M: np.ndarray,
    vectors_MD: np.ndarray,
    cluster_id_M: np.ndarray,
    counts_SK: np.ndarray,
    rounds: int,
    seed: int,
) -> np.ndarray:
    """Exchanges examples of the same cluster between pairs of steps.

    Every round pairs all steps at random. Two steps a and b hold sums P_a and P_b of
    herding vectors; as P_a + P_b is fixed, |P_a|² + |P_b|² is least where
    |P_a − P_b|² = |Σ_i s_i v_i|² with s_i = ±1 is, and the best exchange is made until
    none gains. What a step holds of each cluster stays as it is.

    Args:
      order_M: int [M], entries, step after step.
      vectors_MD: float32 [M, D], herding vectors.
      cluster_id_M: int [M], by entry.
      counts_SK: int [S, K], examples of each cluster in each step.
      rounds: how often all steps are paired; 0 = the order as it is.
      seed: of the pairs.

    Returns:
      int64 [M], entries in the new order. O(rounds · M · B · D) without, and
      O(M² · D + rounds · M · B) with room for all inner products (0.5 GB).
    """
    order_M = np.asarray(order_M, np.int64).copy()
    size_S = counts_SK.sum(1)
    full = np.flatnonzero(size_S == size_S.max())  # a padded last step stays alone
    begin_S = np.concatenate([[0], np.cumsum(size_S)[:-1]])
    step_SB = begin_S[full, None] + np.arange(size_S.max())
    inner = _Inner(np.asarray(vectors_MD, np.float32), bool(rounds))
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        shuffled = rng.permutation(len(step_SB))
        for a, b in zip(shuffled[0::2], shuffled[1::2]):
            slots = np.concatenate([step_SB[a], step_SB[b]])
            entry = order_M[slots]
            sign = _best_signs(inner(entry), cluster_id_M[entry])
            order_M[step_SB[a]] = entry[sign > 0]
            order_M[step_SB[b]] = entry[sign < 0]
    return order_M


def _best_signs(inner_nn: np.ndarray, cluster_n: np.ndarray) -> np.ndarray:
    """+1 for what the first step holds, −1 for the second, after all exchanges.

    Changing s_i from + to − and s_j from − to + changes sᵀWs by
    4 ((Ws)_j − (Ws)_i) + 4 (W_ii + W_jj − 2 W_ij).
    """
    half = len(inner_nn) // 2
    sign = np.repeat(np.array([1.0, -1.0], np.float32), half)
    square = inner_nn.diagonal()
    least = -_GAIN * float(square.sum())
    for _ in range(4 * half):
        pull = inner_nn @ sign
        out, into = np.flatnonzero(sign > 0), np.flatnonzero(sign < 0)
        change = (pull[into][None] - pull[out][:, None]) + (
            square[out][:, None] + square[into][None] - 2 * inner_nn[np.ix_(out, into)]
        )
        change[cluster_n[out][:, None] != cluster_n[into][None]] = np.inf
        i, j = np.unravel_index(change.argmin(), change.shape)
        if change[i, j] >= least:
            break
        sign[out[i]], sign[into[j]] = -1, 1
    return sign


class _Inner:
    """Inner products of vectors: looked up where all fit into memory."""

    def __init__(self, vectors_MD: np.ndarray, needed: bool):
        self._vectors_MD = vectors_MD
        fits = 4 * len(vectors_MD) ** 2 <= _GRAM_BYTES
        self._gram_MM = vectors_MD @ vectors_MD.T if fits and needed else None

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """float32 [n, n] for these rows."""
        if self._gram_MM is not None:
            return self._gram_MM[np.ix_(rows, rows)]
        part_nD = self._vectors_MD[rows]
        return part_nD @ part_nD.T

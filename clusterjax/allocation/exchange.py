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

    Every round pairs all steps at random. Two steps a and b with sums P_a and P_b of
    herding vectors make the best exchange, that of least w_a |P_a|² + w_b |P_b|², until
    none gains. A step's mean gradient is its sum over its size, so that w = 1, and
    (B / size)² for an incomplete last step. What a step holds of each cluster stays as
    it is.

    Args:
      order_M: int [M], entries, step after step.
      vectors_MD: float32 [M, D], herding vectors.
      cluster_id_M: int [M], by entry.
      counts_SK: int [S, K], examples of each cluster in each step.
      rounds: how often all steps are paired; 0 = the order as it is.
      seed: of the pairs.

    Returns:
      int64 [M], entries in the new order. A round takes the inner products of every
      pair of steps, O(M · B · D), or looks them up where all M² fit into 0.5 GB, and
      O(B²) for each exchange.
    """
    order_M = np.asarray(order_M, np.int64).copy()
    size_S = counts_SK.sum(1)
    used = np.flatnonzero(size_S)
    parts = np.split(order_M, np.cumsum(size_S)[:-1])  # views
    weight_S = (size_S.max() / np.maximum(size_S, 1)) ** 2.0
    inner = _Inner(np.asarray(vectors_MD, np.float32), bool(rounds))
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        shuffled = rng.permutation(used)
        for a, b in zip(shuffled[0::2], shuffled[1::2]):
            entry = np.concatenate([parts[a], parts[b]])
            in_a = _exchanged(
                inner(entry), cluster_id_M[entry], size_S[a], weight_S[a], weight_S[b]
            )
            parts[a][:], parts[b][:] = entry[in_a], entry[~in_a]
    return order_M


def _exchanged(
    inner_nn: np.ndarray,
    cluster_n: np.ndarray,
    size_a: int,
    weight_a: float,
    weight_b: float,
) -> np.ndarray:
    """bool [n], which entries the first step holds after all exchanges that gain.

    With u = v_j − v_i for i leaving a and j leaving b, the objective changes by
    2 u·(w_a P_a − w_b P_b) + (w_a + w_b) |u|².
    """
    in_a = np.arange(len(inner_nn)) < size_a
    square = inner_nn.diagonal()
    least = -_GAIN * float(square.sum())
    for _ in range(2 * len(in_a)):
        pull = inner_nn @ np.where(in_a, weight_a, -weight_b).astype(np.float32)
        i, j = np.flatnonzero(in_a), np.flatnonzero(~in_a)
        u_square = square[i][:, None] + square[j][None] - 2 * inner_nn[np.ix_(i, j)]
        change = 2 * (pull[j][None] - pull[i][:, None])
        change += (weight_a + weight_b) * u_square
        change[cluster_n[i][:, None] != cluster_n[j][None]] = np.inf
        best = np.unravel_index(change.argmin(), change.shape)
        if not change[best] < least:
            break
        in_a[i[best[0]]], in_a[j[best[1]]] = False, True
    return in_a


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

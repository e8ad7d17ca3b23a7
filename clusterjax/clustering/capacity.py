"""Assignment to fixed centres under a capacity (METHOD §2).

Taking (point, centre) pairs in order of (distance, point, centre) gives the stable
matching in which points prefer near centres and centres prefer near points. Deferred
acceptance (Gale and Shapley 1962) reaches the same matching in rounds over all
rejected points at once. A full centre has a cutoff, the key of the worst point it
holds; cutoffs only fall, so they alone say who was rejected where: memory is
O(N + block · K), with no N × K matrix.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from clusterjax import errors

# Rows whose distances to all centres are in memory at once.
BLOCK_ROWS = 1 << 14


def assign_with_capacity(
    values_ND: np.ndarray,
    centroids_KD: np.ndarray,
    capacity: int,
    method: Literal["greedy", "optimal"] = "greedy",
) -> np.ndarray:
    """Assigns every point to a centre, at most `capacity` points to each.

    Args:
      values_ND: float [N, D], host array or memory map.
      centroids_KD: float [K, D].
      capacity: points that a centre has room for; K × capacity ≥ N.
      method: `greedy` is the matching of METHOD §2. `optimal` has the least sum of
        squared distances, in O(N² · K · capacity) time and N × K × capacity memory:
        for comparison on small N.

    Returns:
      int32 [N], the centre of each point.

    Raises:
      UserError: the points do not fit.
    """
    num_points, num_clusters = len(values_ND), len(centroids_KD)
    if capacity * num_clusters < num_points:
        raise errors.UserError(
            f"{num_clusters} clusters with room for {capacity} points each cannot hold"
            f" {num_points:,} points; the capacity must be at least"
            f" {-(-num_points // num_clusters)}."
        )
    if method == "optimal":
        return _optimal(values_ND, centroids_KD, capacity)
    return _deferred_acceptance(values_ND, centroids_KD, capacity)


def squared_distance(
    values_ND: np.ndarray, centroids_KD: np.ndarray, label_N: np.ndarray
) -> np.ndarray:
    """float32 [N]: squared euclidean distance of each point to its own centre."""
    distance_N = np.empty(len(values_ND), np.float32)
    for start in range(0, len(values_ND), BLOCK_ROWS):
        part = slice(start, start + BLOCK_ROWS)
        difference = values_ND[part] - centroids_KD[label_N[part]]
        distance_N[part] = np.einsum("nd,nd->n", difference, difference)
    return distance_N


def _deferred_acceptance(
    values_ND: np.ndarray, centroids_KD: np.ndarray, capacity: int
) -> np.ndarray:
    num_clusters = len(centroids_KD)
    # Distances are made from products; around the middle of the centres these cancel
    # least.
    offset_D = np.asarray(np.mean(centroids_KD, axis=0, dtype=np.float64), np.float32)
    centers_KD = jnp.asarray(centroids_KD - offset_D, jnp.float32)
    cutoff_K = np.full(num_clusters, np.inf, np.float32)
    cutoff_id_K = np.full(num_clusters, -1, np.int32)
    held: list[tuple[np.ndarray, np.ndarray]] = [
        (np.empty(0, np.int32), np.empty(0, np.float32)) for _ in range(num_clusters)
    ]
    pending = np.arange(len(values_ND), dtype=np.int32)
    while pending.size:
        choice, distance = _propose(
            values_ND, pending, offset_D, centers_KD, cutoff_K, cutoff_id_K
        )
        order = np.argsort(choice, kind="stable")
        bounds = np.searchsorted(choice[order], np.arange(num_clusters + 1))
        rejected = []
        for c in np.flatnonzero(np.diff(bounds)):
            new = order[bounds[c] : bounds[c + 1]]
            ids = np.concatenate([held[c][0], pending[new]])
            near = np.concatenate([held[c][1], distance[new]])
            if len(ids) >= capacity:
                kept, cutoff_K[c], cutoff_id_K[c] = _nearest(ids, near, capacity)
                rejected.append(ids[~kept])
                ids, near = ids[kept], near[kept]
            held[c] = (ids, near)
        pending = np.sort(np.concatenate(rejected)) if rejected else pending[:0]
    label_N = np.empty(len(values_ND), np.int32)
    for c, (ids, _) in enumerate(held):
        label_N[ids] = c
    return label_N


def _nearest(
    ids: np.ndarray, distance: np.ndarray, capacity: int
) -> tuple[np.ndarray, float, int]:
    """Mask of the `capacity` least (distance, id), and the greatest key among them."""
    limit = np.partition(distance, capacity - 1)[capacity - 1]
    kept = distance < limit
    tied = np.flatnonzero(distance == limit)
    tied = tied[np.argsort(ids[tied])][: capacity - int(kept.sum())]
    kept[tied] = True
    return kept, float(limit), int(ids[tied[-1]])


def _propose(
    values_ND: np.ndarray,
    pending: np.ndarray,
    offset_D: np.ndarray,
    centers_KD: jax.Array,
    cutoff_K: np.ndarray,
    cutoff_id_K: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Nearest centre that would still take the point, and the squared distance."""
    choice = np.empty(len(pending), np.int32)
    distance = np.empty(len(pending), np.float32)
    size = min(BLOCK_ROWS, 1 << int(np.ceil(np.log2(len(values_ND) + 1))))
    for start in range(0, len(pending), size):
        ids = pending[start : start + size]
        x_bD = np.zeros((size, values_ND.shape[1]), np.float32)
        np.subtract(values_ND[ids], offset_D, out=x_bD[: len(ids)])
        id_b = np.zeros(size, np.int32)
        id_b[: len(ids)] = ids
        choice_b, distance_b = _open_nearest(
            x_bD, id_b, centers_KD, cutoff_K, cutoff_id_K
        )
        choice[start : start + len(ids)] = np.asarray(choice_b)[: len(ids)]
        distance[start : start + len(ids)] = np.asarray(distance_b)[: len(ids)]
    return choice, distance


@jax.jit
def _open_nearest(
    x_bD: jax.Array,
    id_b: jax.Array,
    centers_KD: jax.Array,
    cutoff_K: jax.Array,
    cutoff_id_K: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    dot_bK = jnp.matmul(x_bD, centers_KD.T, precision=jax.lax.Precision.HIGHEST)
    square_b = jnp.sum(x_bD**2, axis=1)
    square_K = jnp.sum(centers_KD**2, axis=1)
    d_bK = jnp.maximum(square_b[:, None] + square_K[None] - 2 * dot_bK, 0)
    open_bK = (d_bK < cutoff_K[None]) | (
        (d_bK == cutoff_K[None]) & (id_b[:, None] < cutoff_id_K[None])
    )
    choice_b = jnp.argmin(jnp.where(open_bK, d_bK, jnp.inf), axis=1)
    nearest_b = jnp.take_along_axis(d_bK, choice_b[:, None], axis=1)[:, 0]
    return choice_b.astype(jnp.int32), nearest_b


def _optimal(
    values_ND: np.ndarray, centroids_KD: np.ndarray, capacity: int
) -> np.ndarray:
    from scipy import optimize

    values = np.asarray(values_ND, np.float64)
    cost = np.stack([((values - c) ** 2).sum(axis=1) for c in centroids_KD], axis=1)
    # Each centre is as many columns as it has places.
    places = min(capacity, len(values))
    point, column = optimize.linear_sum_assignment(np.repeat(cost, places, axis=1))
    label_N = np.empty(len(values), np.int32)
    label_N[point] = column // places
    return label_N

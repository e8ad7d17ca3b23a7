"""Search for the best start: many k-means++ starts, and one put together from them."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from clusterjax.clustering import assignment, bounded, lloyd, seeding
from clusterjax.clustering import rows as rows_lib

# Columns of the distance product that starts running together may fill.
GROUP_COLUMNS = 64
# From so many clusters on, CPUs add rows up one by one rather than by products.
SCATTER_CLUSTERS = 16


@dataclasses.dataclass(frozen=True)
class Limits:
    """When Lloyd's iterations stop: `tol` × mean feature variance, or a number."""

    tol: float
    max_iterations: int


def search(
    rows: rows_lib.Rows,
    sample: rows_lib.Rows,
    num_clusters: int,
    num_restarts: int,
    limits: Limits,
    key: jax.Array,
) -> lloyd.LoopState:
    """Runs the starts on `sample`, then the best one on all rows.

    To these starts come others, from clustering all their final centres (Bradley and
    Fayyad 1998): centres carry less noise than rows, and a good centre that only one
    start has found is not lost.

    Returns:
      The converged best start, as a group of one.
    """
    start_key, centers_key = jax.random.split(key)
    starts_RKD = seeding.plus_plus(sample, num_clusters, num_restarts, start_key)
    states = converge(sample, starts_RKD, limits)
    best, least = _least(sample, states)
    if num_restarts > 1:
        refined_RKD = _recombine(sample, states, limits, centers_key)
        refined, _ = _least(sample, lloyd.initial(refined_RKD))
        refined, inertia = _least(sample, converge(sample, refined.centers_GKD, limits))
        best = refined if inertia < least else best
    if sample is rows:
        return best
    moved = best.centers_GKD + (sample.offset_D - rows.offset_D)[None, None]
    return converge(rows, moved, limits)


def best_of(
    rows: rows_lib.Rows, starts_RKD: jax.Array, limits: Limits
) -> lloyd.LoopState:
    """Runs given starts on all rows; the one of least inertia, as a group of one."""
    return _least(rows, converge(rows, starts_RKD, limits))[0]


def default_sample(num_clusters: int) -> int:
    """Rows on which starts are compared: 256 per cluster, at least 8,192."""
    return max(8192, 256 * num_clusters)


def draw_sample(
    values_ND: np.ndarray,
    weights: np.ndarray | None,
    rows: rows_lib.Rows,
    size: int,
    num_clusters: int,
    key: jax.Array,
) -> rows_lib.Rows:
    """Uniform rows to compare starts on.

    All rows come back for `size` 0, where a sample would save little, and when the
    sample has no more distinct rows than clusters.
    """
    if not 0 < size < rows.num_rows // 2:
        return rows
    seed = np.asarray(jax.random.key_data(key)).ravel()
    chosen = np.sort(
        np.random.default_rng(seed).choice(rows.num_rows, size, replace=False)
    )
    part = values_ND[chosen]
    part_weights = None if weights is None else weights[chosen]
    if distinct_rows(part, part_weights, num_clusters) is not None:
        return rows
    return rows_lib.place(
        part,
        part_weights,
        rows.mesh,
        spherical=rows.spherical,
        block_rows=rows.block,
    )


def distinct_rows(
    values_ND: np.ndarray, weights: np.ndarray | None, limit: int
) -> np.ndarray | None:
    """The distinct rows (weight above 0) if there are at most `limit`, else None."""
    found = np.empty((0, values_ND.shape[1]), values_ND.dtype)
    start, size = 0, 2 * limit + 64
    while start < len(values_ND):
        part = np.asarray(values_ND[start : start + size])
        if weights is not None:
            part = part[weights[start : start + size] > 0]
        # Adding zero makes −0 and 0 the same bytes.
        found = np.unique(np.concatenate([found, part + 0.0]), axis=0)
        if len(found) > limit:
            return None
        start, size = start + size, min(2 * size, 1 << 16)
    return found


def converge(
    rows: rows_lib.Rows, starts_RKD: jax.Array, limits: Limits
) -> lloyd.LoopState:
    """Lloyd's iterations from every start to its end, in groups that fit a product."""
    restarts, clusters, _ = starts_RKD.shape
    group = _group_size(restarts, clusters)
    parts = [
        _iterate(rows, lloyd.initial(starts_RKD[i : i + group]), limits)
        for i in range(0, restarts, group)
    ]
    return jax.tree.map(lambda *a: jnp.concatenate(a), *parts)


def loop_options(rows: rows_lib.Rows, num_clusters: int) -> lloyd.Options:
    return lloyd.Options(
        spherical=rows.spherical,
        mesh=rows.mesh,
        block=rows.block,
        scatter=_on_cpu(rows) and num_clusters >= SCATTER_CLUSTERS,
    )


def _on_cpu(rows: rows_lib.Rows) -> bool:
    return rows.mesh.devices.flat[0].platform == "cpu"


def fill(
    rows: rows_lib.Rows, centers_KD: np.ndarray, empty_K: np.ndarray
) -> np.ndarray:
    """Empty clusters take the rows that are farthest from their centres."""
    _, distance_N = assignment.assign(rows, jnp.asarray(centers_KD))
    weight_N = rows_lib.to_host(rows.weight_N, rows.num_rows)
    distance_N = np.where(weight_N > 0, distance_N, -1)
    farthest = np.argsort(-distance_N, kind="stable")[: empty_K.sum()]
    filled_KD = centers_KD.copy()
    filled_KD[np.flatnonzero(empty_K)[: len(farthest)]] = rows.fetch(farthest)
    return filled_KD


def _iterate(
    rows: rows_lib.Rows, state: lloyd.LoopState, limits: Limits
) -> lloyd.LoopState:
    """Lloyd's iterations of one group; an empty cluster takes the farthest row."""
    groups, clusters, _ = state.centers_GKD.shape
    bounds_help = groups == 1 and clusters > 1 and _on_cpu(rows)
    run = bounded.run if bounds_help else lloyd.run
    options = loop_options(rows, clusters)
    while True:
        state = run(
            rows, state, limits.tol * rows.variance, limits.max_iterations, options
        )
        empty_GK = np.asarray(state.empty_GK)
        if not empty_GK.any():
            return state
        centers_GKD = np.array(state.centers_GKD)
        for group in np.flatnonzero(empty_GK.any(axis=1)):
            centers_GKD[group] = fill(rows, centers_GKD[group], empty_GK[group])
        state = state._replace(
            centers_GKD=jnp.asarray(centers_GKD),
            empty_GK=jnp.zeros_like(state.empty_GK),
        )


def _least(
    rows: rows_lib.Rows, states: lloyd.LoopState
) -> tuple[lloyd.LoopState, float]:
    """The start of least inertia, as a group of one, and its inertia."""
    inertia_R = np.asarray(assignment.inertia(rows, states.centers_GKD))
    r = int(np.argmin(inertia_R))
    return jax.tree.map(lambda a: a[r : r + 1], states), float(inertia_R[r])


def _recombine(
    sample: rows_lib.Rows, states: lloyd.LoopState, limits: Limits, key: jax.Array
) -> jax.Array:
    """float32 [G, K, D]: the best group of starts from clustering all final centres."""
    restarts, clusters, dim = states.centers_GKD.shape
    centers = rows_lib.place(
        np.asarray(states.centers_GKD).reshape(-1, dim),
        np.asarray(states.weight_GK).reshape(-1),
        sample.mesh,
        spherical=sample.spherical,
        block_rows=sample.block,
        like=sample,
    )
    starts_RKD = seeding.plus_plus(centers, clusters, restarts, key)
    # The centres are few and their clusters coarse: more iterations change nothing.
    few = dataclasses.replace(limits, max_iterations=min(limits.max_iterations, 20))
    refined = converge(centers, starts_RKD, few).centers_GKD
    refined = refined + centers.offset_D[None, None]
    best_R = np.argsort(np.asarray(assignment.inertia(sample, refined)), kind="stable")
    return refined[best_R[: _group_size(restarts, clusters)]]


def _group_size(restarts: int, clusters: int) -> int:
    """Starts that run together; groups of about one size, as each size is compiled."""
    most = min(restarts, max(1, GROUP_COLUMNS // clusters))
    return math.ceil(restarts / math.ceil(restarts / most))

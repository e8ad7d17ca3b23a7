"""K-means: best of several k-means++ starts, Lloyd's iterations to convergence."""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from clusterjax import datatypes, errors
from clusterjax.clustering import lloyd, seeding
from clusterjax.clustering import rows as rows_lib

# Columns of the distance product that starts running together may fill.
GROUP_COLUMNS = 64
# From so many clusters on, CPUs add rows up one by one rather than by products.
SCATTER_CLUSTERS = 16


def kmeans(
    values_ND: Any,
    num_clusters: int,
    *,
    key: jax.Array,
    num_restarts: int = 10,
    max_iterations: int = 300,
    tol: float = 1e-4,
    metric: Literal["euclidean", "spherical"] = "euclidean",
    weights: np.ndarray | None = None,
    init: np.ndarray | None = None,
    restart_sample: int | None = None,
    mesh: Mesh | None = None,
    row_names: Any = None,
    block_rows: int = rows_lib.BLOCK_ROWS,
) -> datatypes.Clustering:
    """Clusters the rows of a matrix (METHOD §2, without floor and capacity).

    The result is the same partition on any number of shards: random choices hang on
    global row numbers, only sums differ in their last bits.

    Args:
      values_ND: float [N, D], host array or memory map.
      num_clusters: K. With fewer distinct rows than K there are fewer clusters, and a
        warning.
      key: JAX key of the starts.
      num_restarts: independent k-means++ starts; the least inertia wins.
      max_iterations: most Lloyd iterations of a start.
      tol: a start has converged when the squared shift of all its centres together is
        at most `tol` × the mean variance of a feature.
      metric: `spherical` scales rows and centres to unit length.
      weights: float [N], row weights ≥ 0.
      init: float [K, D] or [R, K, D], own starts instead of k-means++.
      restart_sample: choose the best start on this many rows, then go on with it on
        all; None lets `default_sample` decide, 0 takes all rows.
      mesh: rows are split over its axes `data` and `fsdp`; None is one device.
      row_names: ids of rows for error messages.
      block_rows: most rows whose distances are in memory at once.

    Raises:
      UserError: non-finite rows (named), impossible sizes or weights.
    """
    _check(values_ND, num_clusters, num_restarts, init)
    values_ND = np.asarray(values_ND)
    rows = rows_lib.place(
        values_ND,
        weights,
        mesh,
        spherical=metric == "spherical",
        row_names=row_names,
        block_rows=block_rows,
    )
    distinct = distinct_rows(values_ND, weights, num_clusters)
    if distinct is not None:
        if len(distinct) < num_clusters:
            warnings.warn(
                f"{len(distinct)} distinct rows give {len(distinct)} clusters, not the"
                f" {num_clusters} asked for.",
                stacklevel=2,
            )
        centers_KD = jnp.asarray(distinct, jnp.float32) - rows.offset_D[None]
        state = lloyd.initial(centers_KD[None])
        return _finish(rows, state, weights)

    starter = rows
    if restart_sample is None:
        restart_sample = default_sample(num_clusters)
    if init is None and num_restarts > 1 and 0 < restart_sample < rows.num_rows // 2:
        starter = _sample(values_ND, weights, rows, restart_sample, num_clusters, key)
    if init is None:
        centers_RKD = seeding.plus_plus(starter, num_clusters, num_restarts, key)
    else:
        centers_RKD = jnp.asarray(init, jnp.float32).reshape(
            -1, num_clusters, rows.values_ND.shape[1]
        )
        if metric == "spherical":
            centers_RKD = lloyd.unit(centers_RKD)
        centers_RKD = centers_RKD - rows.offset_D[None, None]

    best = _best_start(starter, centers_RKD, tol, max_iterations)
    if starter is not rows:
        moved = best.centers_GKD + (starter.offset_D - rows.offset_D)[None, None]
        best = iterate(rows, lloyd.initial(moved), tol, max_iterations)
    return _finish(rows, best, weights)


def default_sample(num_clusters: int) -> int:
    """Rows on which starts are compared: 256 per cluster, at least 8,192."""
    return max(8192, 256 * num_clusters)


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


def iterate(
    rows: rows_lib.Rows, state: lloyd.LoopState, tol: float, max_iterations: int
) -> lloyd.LoopState:
    """Lloyd's iterations to the end; an empty cluster takes the farthest row."""
    options = lloyd.Options(
        max_iterations=max_iterations,
        spherical=rows.spherical,
        mesh=rows.mesh,
        block=rows.block,
        scatter=_scatters(rows, state),
    )
    while True:
        state = lloyd.run(rows, state, tol * rows.variance, options)
        empty_GK = np.asarray(state.empty_GK)
        if not empty_GK.any():
            return state
        centers_GKD = np.array(state.centers_GKD)
        for group in np.flatnonzero(empty_GK.any(axis=1)):
            centers_GKD[group] = _fill(rows, centers_GKD[group], empty_GK[group])
        state = state._replace(
            centers_GKD=jnp.asarray(centers_GKD),
            empty_GK=jnp.zeros_like(state.empty_GK),
        )


def _scatters(rows: rows_lib.Rows, state: lloyd.LoopState) -> bool:
    on_cpu = rows.mesh.devices.flat[0].platform == "cpu"
    return on_cpu and state.centers_GKD.shape[1] >= SCATTER_CLUSTERS


def _fill(
    rows: rows_lib.Rows, centers_KD: np.ndarray, empty_K: np.ndarray
) -> np.ndarray:
    """Empty clusters take the rows that are farthest from their centres."""
    _, distance_N = lloyd.assign(rows, jnp.asarray(centers_KD))
    weight_N = rows_lib.to_host(rows.weight_N, rows.num_rows)
    distance_N = np.where(weight_N > 0, distance_N, -1)
    farthest = np.argsort(-distance_N, kind="stable")[: empty_K.sum()]
    filled_KD = centers_KD.copy()
    filled_KD[np.flatnonzero(empty_K)[: len(farthest)]] = rows.fetch(farthest)
    return filled_KD


def _sample(
    values_ND: np.ndarray,
    weights: np.ndarray | None,
    rows: rows_lib.Rows,
    size: int,
    num_clusters: int,
    key: jax.Array,
) -> rows_lib.Rows:
    """Uniform rows to choose the start on; all rows if the sample is too poor."""
    seed = np.asarray(jax.random.key_data(jax.random.fold_in(key, 1))).ravel()
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


def _best_start(
    rows: rows_lib.Rows, centers_RKD: jax.Array, tol: float, max_iterations: int
) -> lloyd.LoopState:
    """Runs the starts in groups; the one of least inertia, as a group of one."""
    restarts, clusters, _ = centers_RKD.shape
    group = min(restarts, max(1, GROUP_COLUMNS // clusters))
    group = math.ceil(restarts / math.ceil(restarts / group))
    best, least = None, np.inf
    for start in range(0, restarts, group):
        part = centers_RKD[start : start + group]
        state = iterate(rows, lloyd.initial(part), tol, max_iterations)
        if restarts == 1:
            return state
        inertia_G = np.asarray(
            lloyd.inertia(
                rows.values_ND,
                rows.weight_N,
                rows.square_N,
                state.centers_GKD,
                mesh=rows.mesh,
                block=rows.block,
            )
        )
        g = int(np.argmin(inertia_G))
        if best is None or inertia_G[g] < least:
            best, least = jax.tree.map(lambda a, g=g: a[g : g + 1], state), inertia_G[g]
    assert best is not None
    return best


def _finish(
    rows: rows_lib.Rows, state: lloyd.LoopState, weights: np.ndarray | None
) -> datatypes.Clustering:
    """Final labels and distances of one start; no cluster stays empty."""
    centers_KD = np.asarray(state.centers_GKD[0])
    for _ in range(len(centers_KD)):
        label_N, distance_N = lloyd.assign(rows, jnp.asarray(centers_KD))
        sizes_K = np.bincount(
            label_N if weights is None else label_N[weights > 0],
            minlength=len(centers_KD),
        )
        if sizes_K.all():
            break
        centers_KD = _fill(rows, centers_KD, sizes_K == 0)
    weight_N = 1.0 if weights is None else weights
    sizes_K = np.bincount(label_N, minlength=len(centers_KD))
    return datatypes.Clustering(
        cluster_id=label_N,
        centroids=centers_KD + rows.offset_D,
        distance=distance_N,
        inertia=float(np.sum(weight_N * distance_N.astype(np.float64))),
        num_iterations=int(state.iterations_G[0]),
        converged=bool(state.converged_G[0]),
        kmeans_sizes=sizes_K,
        floor_sizes=sizes_K,
        capacity=None,
        fingerprint="",
    )


def _check(
    values_ND: Any, num_clusters: int, num_restarts: int, init: np.ndarray | None
) -> None:
    if num_clusters < 1 or num_restarts < 1:
        raise errors.UserError(
            "num_clusters and num_restarts must be at least 1, found"
            f" {num_clusters} and {num_restarts}."
        )
    if init is not None and np.shape(init)[-2:] != (num_clusters, values_ND.shape[1]):
        raise errors.UserError(
            f"init must have shape [..., {num_clusters}, {values_ND.shape[1]}], found"
            f" {np.shape(init)}."
        )

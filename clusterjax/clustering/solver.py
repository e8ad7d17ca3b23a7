"""K-means: best of several k-means++ starts, Lloyd's iterations to convergence."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from clusterjax import datatypes, errors
from clusterjax.clustering import assignment, lloyd, restarts
from clusterjax.clustering import rows as rows_lib


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
        all; None lets `restarts.default_sample` decide, 0 takes all rows.
      mesh: rows are split over its axes `data` and `fsdp`; None is one device.
      row_names: ids of rows for error messages.
      block_rows: most rows whose distances are in memory at once.

    Returns:
      Labels, centroids and squared distances; `inertia` is weighted, and
      `num_iterations` counts those on all rows.

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
    limits = restarts.Limits(tol, max_iterations)
    distinct = restarts.distinct_rows(values_ND, weights, num_clusters)
    if distinct is not None:
        if len(distinct) < num_clusters:
            warnings.warn(
                f"{len(distinct)} distinct rows give {len(distinct)} clusters, not the"
                f" {num_clusters} asked for.",
                stacklevel=2,
            )
        best = restarts.best_of(rows, _own_starts(rows, distinct[None]), limits)
    elif init is not None:
        best = restarts.best_of(rows, _own_starts(rows, init), limits)
    else:
        sample_key, search_key = jax.random.split(key)
        sample = rows
        if num_restarts > 1:
            if restart_sample is None:
                restart_sample = restarts.default_sample(num_clusters)
            sample = restarts.draw_sample(
                values_ND, weights, rows, restart_sample, num_clusters, sample_key
            )
        best = restarts.search(
            rows, sample, num_clusters, num_restarts, limits, search_key
        )
    return _finish(rows, best, weights)


def _own_starts(rows: rows_lib.Rows, init: np.ndarray) -> jax.Array:
    """Given starts in the coordinates of `rows`: float32 [R, K, D]."""
    starts_RKD = jnp.asarray(init, jnp.float32).reshape(-1, *np.shape(init)[-2:])
    if rows.spherical:
        starts_RKD = lloyd.unit(starts_RKD)
    return starts_RKD - rows.offset_D[None, None]


def _finish(
    rows: rows_lib.Rows, state: lloyd.LoopState, weights: np.ndarray | None
) -> datatypes.Clustering:
    """Final labels and distances of one start; no cluster stays empty."""
    centers_KD = np.asarray(state.centers_GKD[0])
    label_N, distance_N = assignment.assign(rows, jnp.asarray(centers_KD))
    for _ in range(len(centers_KD)):
        counted_N = label_N if weights is None else label_N[weights > 0]
        empty_K = np.bincount(counted_N, minlength=len(centers_KD)) == 0
        if not empty_K.any():
            break
        centers_KD = restarts.fill(rows, centers_KD, empty_K)
        label_N, distance_N = assignment.assign(rows, jnp.asarray(centers_KD))
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

"""Mini-batch k-means (Sculley 2010) over a feature store larger than memory.

Starts are compared on a sample in memory. Then batches of rows stream by, and every
centre is the running mean of the rows it has been given.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from clusterjax import datatypes, errors
from clusterjax.clustering import assignment, lloyd, restarts
from clusterjax.clustering import rows as rows_lib

# Neighbouring rows that are read together; a batch is made of random groups.
_READ_ROWS = 256
# Most Lloyd iterations of a start on the sample.
_SAMPLE_ITERATIONS = 300


def mini_batch_kmeans(
    values_ND: Any,
    num_clusters: int,
    *,
    key: jax.Array,
    batch_rows: int,
    num_restarts: int = 10,
    max_passes: int = 20,
    tol: float = 1e-4,
    metric: Literal["euclidean", "spherical"] = "euclidean",
    weights: np.ndarray | None = None,
    restart_sample: int | None = None,
    mesh: Mesh | None = None,
    row_names: Any = None,
) -> datatypes.Clustering:
    """K-means that holds one batch of rows at a time, and O(N) labels.

    Args:
      values_ND: float [N, D], usually a memory map.
      num_clusters: K.
      key: JAX key of starts and batches.
      batch_rows: rows of a batch, rounded up to whole groups of 256.
      num_restarts: k-means++ starts, compared on the sample.
      max_passes: most passes over the rows.
      tol: stop when a pass shifts all centres together by less than `tol` × the mean
        variance of a feature (squared).
      metric: `spherical` scales rows and centres to unit length.
      weights: float [N], row weights ≥ 0.
      restart_sample: rows of the sample; None is 256 K, at least 8,192.
      mesh: the rows of a batch are split over its axes `data` and `fsdp`.
      row_names: ids of rows for error messages.

    Returns:
      As `kmeans`; `num_iterations` counts batches. A cluster that ends without rows
      is left out, with a warning.

    Raises:
      UserError: non-finite rows (named), impossible sizes.
    """
    num_rows = len(values_ND)
    if num_clusters > num_rows:
        raise errors.UserError(
            f"num_clusters={num_clusters} is more than the {num_rows:,} rows."
        )
    names = np.arange(num_rows) if row_names is None else np.asarray(row_names)
    store = _Store(values_ND, weights, names, metric == "spherical", mesh)
    sample_key, search_key = jax.random.split(key)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(sample_key)).ravel())
    size = min(num_rows, restart_sample or restarts.default_sample(num_clusters))
    sample = store.place(np.sort(rng.choice(num_rows, size, replace=False)), size)
    limits = restarts.Limits(tol, _SAMPLE_ITERATIONS)
    best = restarts.search(
        sample, sample, num_clusters, num_restarts, limits, search_key
    )
    centers_KD = np.asarray(best.centers_GKD[0]) + sample.offset_D
    batch_rows = min(-(-batch_rows // _READ_ROWS), -(-num_rows // _READ_ROWS))
    batch_rows *= _READ_ROWS
    seen_K = np.zeros(num_clusters)
    num_batches, converged = 0, False
    for _ in range(max_passes):
        before_KD = centers_KD
        for batch in _batches(num_rows, batch_rows, rng):
            centers_KD = _update(store.place(batch, batch_rows), centers_KD, seen_K)
            num_batches += 1
        shift = float(np.sum((centers_KD - before_KD) ** 2))
        converged = shift <= tol * sample.variance
        if converged:
            break
    label_N, distance_N = _label(store, batch_rows, centers_KD)
    return _clustering(label_N, distance_N, centers_KD, weights, num_batches, converged)


@dataclasses.dataclass(frozen=True)
class _Store:
    """Rows that are read from the store when they are needed."""

    values_ND: Any
    weights: np.ndarray | None
    names: np.ndarray
    spherical: bool
    mesh: Mesh | None

    def place(self, chosen: np.ndarray, size: int) -> rows_lib.Rows:
        """Rows `chosen`, padded with weight 0 to `size`: one shape, one program."""
        padded = np.concatenate([chosen, np.full(size - len(chosen), chosen[0])])
        weight = np.ones(size, np.float32)
        if self.weights is not None:
            weight = np.asarray(self.weights[padded], np.float32)
        weight[len(chosen) :] = 0
        return rows_lib.place(
            self.values_ND[padded],
            weight,
            self.mesh,
            spherical=self.spherical,
            row_names=self.names[padded],
        )


def _batches(
    num_rows: int, batch_rows: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Every row once: batches of random groups of neighbouring rows."""
    groups = rng.permutation(-(-num_rows // _READ_ROWS))
    per_batch = batch_rows // _READ_ROWS
    for start in range(0, len(groups), per_batch):
        first = np.sort(groups[start : start + per_batch]) * _READ_ROWS
        chosen = (first[:, None] + np.arange(_READ_ROWS)).ravel()
        yield chosen[chosen < num_rows]


def _update(
    rows: rows_lib.Rows,
    centers_KD: np.ndarray,
    seen_K: np.ndarray,
) -> np.ndarray:
    """Centres after one batch; `seen_K`, the weight they have seen, grows in place."""
    options = restarts.loop_options(rows, len(centers_KD))
    local_KD = jnp.asarray(centers_KD - rows.offset_D, jnp.float32)
    total_KE = np.asarray(lloyd.totals(rows, local_KD[None], options)[0], np.float64)
    weight_K = total_KE[:, -1]
    seen_K += weight_K
    sums_KD = total_KE[:, :-1] + weight_K[:, None] * rows.offset_D
    step_K = weight_K / np.maximum(seen_K, 1e-30)
    means_KD = sums_KD / np.maximum(weight_K, 1e-30)[:, None]
    moved_KD = centers_KD + step_K[:, None] * (means_KD - centers_KD)
    if rows.spherical:
        moved_KD /= np.maximum(np.linalg.norm(moved_KD, axis=1, keepdims=True), 1e-30)
    return np.where(weight_K[:, None] > 0, moved_KD, centers_KD).astype(np.float32)


def _label(
    store: _Store, batch_rows: int, centers_KD: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Labels and squared distances of all rows, batch by batch."""
    num_rows = len(store.values_ND)
    label_N = np.empty(num_rows, np.int32)
    distance_N = np.empty(num_rows, np.float32)
    for start in range(0, num_rows, batch_rows):
        chosen = np.arange(start, min(start + batch_rows, num_rows))
        rows = store.place(chosen, batch_rows)
        label, distance = assignment.assign(
            rows, jnp.asarray(centers_KD - rows.offset_D)
        )
        label_N[chosen] = label[: len(chosen)]
        distance_N[chosen] = distance[: len(chosen)]
    return label_N, distance_N


def _clustering(
    label_N: np.ndarray,
    distance_N: np.ndarray,
    centers_KD: np.ndarray,
    weights: np.ndarray | None,
    num_batches: int,
    converged: bool,
) -> datatypes.Clustering:
    sizes_K = np.bincount(label_N, minlength=len(centers_KD))
    used = np.flatnonzero(sizes_K)
    if len(used) < len(centers_KD):
        warnings.warn(
            f"{len(centers_KD) - len(used)} of {len(centers_KD)} clusters ended without"
            " rows and are left out.",
            stacklevel=3,
        )
        label_N = np.searchsorted(used, label_N).astype(np.int32)
    weight_N = 1.0 if weights is None else weights
    return datatypes.Clustering(
        cluster_id=label_N,
        centroids=centers_KD[used],
        distance=distance_N,
        inertia=float(np.sum(weight_N * distance_N.astype(np.float64))),
        num_iterations=num_batches,
        converged=converged,
        kmeans_sizes=sizes_K[used],
        floor_sizes=sizes_K[used],
        capacity=None,
        fingerprint="",
    )

"""An aid for choosing K: inertia and silhouette over a range of K, on a sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from clusterjax.clustering import solver


@dataclasses.dataclass(frozen=True)
class KChoice:
    """What one K gives on the sample.

    Attributes:
      num_clusters: K that was asked for.
      found_clusters: clusters found (fewer with too few distinct rows).
      inertia: mean squared distance of a row to its centroid.
      silhouette: mean silhouette in [−1, 1]; 0 for K = 1.
      smallest: rows of the smallest cluster, as a share of the sample.
      largest: the same of the largest.
    """

    num_clusters: int
    found_clusters: int
    inertia: float
    silhouette: float
    smallest: float
    largest: float


def choose_k(
    values_ND: Any,
    candidates: Sequence[int],
    *,
    key: jax.Array,
    sample: int = 4096,
    num_restarts: int = 5,
    mesh: Mesh | None = None,
) -> list[KChoice]:
    """Clusters a sample for every K in `candidates`.

    Inertia always falls with K: look for the K after which it falls slowly, and for a
    high silhouette.

    Args:
      values_ND: float [N, D].
      candidates: values of K; those above the size of the sample are left out.
      key: JAX key of sample and starts.
      sample: rows looked at; silhouettes take O(sample²) memory and work.
      num_restarts: starts for each K.
      mesh: rows are split over its axes `data` and `fsdp`.
    """
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
    size = min(sample, len(values_ND))
    chosen = np.sort(rng.choice(len(values_ND), size, replace=False))
    part_ND = np.asarray(values_ND[chosen], np.float32)
    choices = []
    for k in sorted(set(candidates)):
        if k > size:
            break
        found = solver.kmeans(
            part_ND,
            k,
            key=jax.random.fold_in(key, k),
            num_restarts=num_restarts,
            restart_sample=0,
            mesh=mesh,
        )
        choices.append(
            KChoice(
                num_clusters=k,
                found_clusters=found.num_clusters,
                inertia=found.inertia / size,
                silhouette=silhouette(part_ND, found.cluster_id),
                smallest=float(found.sizes.min()) / size,
                largest=float(found.sizes.max()) / size,
            )
        )
    return choices


def silhouette(values_ND: np.ndarray, label_N: np.ndarray) -> float:
    """Mean silhouette (Rousseeuw 1987) under the euclidean distance.

    For a row with mean distance a to the others of its cluster and b to the nearest
    other cluster it is (b − a) / max(a, b); 0 for a row alone in its cluster.
    """
    clusters = int(label_N.max()) + 1
    if clusters < 2:
        return 0.0
    centered = np.asarray(values_ND, np.float32)
    centered = centered - centered.mean(axis=0, keepdims=True)
    one_hot_NK = np.eye(clusters, dtype=np.float32)[label_N]
    return float(_silhouette(jnp.asarray(centered), jnp.asarray(one_hot_NK)))


@jax.jit
def _silhouette(x_ND: jax.Array, one_hot_NK: jax.Array) -> jax.Array:
    highest = jax.lax.Precision.HIGHEST
    square_N = jnp.sum(x_ND**2, axis=1)
    dot_NN = jnp.matmul(x_ND, x_ND.T, precision=highest)
    d_NN = jnp.sqrt(jnp.maximum(square_N[:, None] + square_N[None] - 2 * dot_NN, 0))
    # A product is not exactly zero between a row and itself.
    d_NN = jnp.where(jnp.eye(len(x_ND), dtype=bool), 0, d_NN)
    size_K = jnp.sum(one_hot_NK, axis=0)
    sum_NK = jnp.matmul(d_NN, one_hot_NK, precision=highest)
    own_N = jnp.sum(sum_NK * one_hot_NK, axis=1)
    size_N = one_hot_NK @ size_K
    a_N = own_N / jnp.maximum(size_N - 1, 1)
    others = (one_hot_NK == 0) & (size_K > 0)[None]
    b_N = jnp.min(
        jnp.where(others, sum_NK / jnp.maximum(size_K, 1)[None], jnp.inf), axis=1
    )
    s_N = (b_N - a_N) / jnp.maximum(jnp.maximum(a_N, b_N), 1e-30)
    return jnp.mean(jnp.where(size_N > 1, s_N, 0))

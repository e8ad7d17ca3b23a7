"""From gradient features to clusters: k-means, then the floor, then the capacity."""

from __future__ import annotations

import dataclasses
import fractions
import hashlib
import json
import math

import jax
import numpy as np
from jax.sharding import Mesh

from clusterjax import config, datatypes, errors
from clusterjax.clustering import capacity as capacity_lib
from clusterjax.clustering import floor, minibatch, solver


def fit(
    feats: datatypes.GradientFeatures,
    cfg: config.ClusteringConfig,
    mesh: Mesh | None,
    key: jax.Array,
    perf: config.PerfConfig | None = None,
) -> datatypes.Clustering:
    """Clusters gradient features (METHOD §2): k-means, floor, capacity.

    Args:
      feats: one unit row per valid example, weighted by `user_weight`.
      cfg: the `clustering` part of the config.
      mesh: rows are split over its axes `data` and `fsdp`; None is one device.
      key: JAX key of the starts.
      perf: the `perf` part of the config (`kmeans_block`).

    Returns:
      The final labels, with the sizes after each of the three steps.

    Raises:
      UserError: more clusters than examples, non-finite features (by uid).
    """
    num_valid = len(feats.values)
    if cfg.num_clusters > num_valid:
        raise errors.UserError(
            f"clustering.num_clusters={cfg.num_clusters} is more than the"
            f" {num_valid:,} examples with a usable feature ({feats.num_corpus:,} in"
            f" the corpus, {len(feats.rejects):,} rejected by the feature pass); lower"
            " it, or look at the rejects."
        )
    clusters = _kmeans(feats, cfg, mesh, key, perf or config.PerfConfig())
    clusters = apply_floor(feats.values, clusters, cfg.min_cluster_size)
    clusters = apply_capacity(feats.values, clusters, cfg.capacity_factor)
    return dataclasses.replace(clusters, fingerprint=_fingerprint(feats, cfg, key))


def _kmeans(
    feats: datatypes.GradientFeatures,
    cfg: config.ClusteringConfig,
    mesh: Mesh | None,
    key: jax.Array,
    perf: config.PerfConfig,
) -> datatypes.Clustering:
    weights = _weights(feats.user_weight)
    if cfg.mini_batch is not None:
        return minibatch.mini_batch_kmeans(
            feats.values,
            cfg.num_clusters,
            key=key,
            batch_rows=cfg.mini_batch,
            num_restarts=cfg.num_restarts,
            max_passes=cfg.max_iterations,
            tol=cfg.tol,
            metric=cfg.metric,
            weights=weights,
            restart_sample=cfg.restart_sample,
            mesh=mesh,
            row_names=feats.uid,
        )
    return solver.kmeans(
        feats.values,
        cfg.num_clusters,
        key=key,
        num_restarts=cfg.num_restarts,
        max_iterations=cfg.max_iterations,
        tol=cfg.tol,
        metric=cfg.metric,
        weights=weights,
        restart_sample=cfg.restart_sample,
        mesh=mesh,
        row_names=feats.uid,
        block_rows=perf.kmeans_block,
    )


def apply_floor(
    values_ND: np.ndarray, clusters: datatypes.Clustering, min_cluster_size: int
) -> datatypes.Clustering:
    """Dissolves clusters below `min_cluster_size` points."""
    remaining, label_N = floor.dissolve_small(
        values_ND, clusters.centroids, clusters.cluster_id, min_cluster_size
    )
    return _relabelled(
        values_ND,
        dataclasses.replace(
            clusters,
            floor_sizes=np.bincount(label_N, minlength=len(remaining)),
            centroids=clusters.centroids[remaining],
        ),
        label_N,
        np.flatnonzero(remaining[label_N] != clusters.cluster_id),
    )


def apply_capacity(
    values_ND: np.ndarray, clusters: datatypes.Clustering, factor: float
) -> datatypes.Clustering:
    """Assigns again with a capacity if the largest cluster exceeds factor × N / K."""
    # As a decimal fraction: 1.1 · 100 / 10 is 11, not 11.000000000000002.
    limit = fractions.Fraction(str(factor)) * len(values_ND) / clusters.num_clusters
    if max(clusters.sizes) <= limit:
        return clusters
    room = math.ceil(limit)
    label_N = capacity_lib.assign_with_capacity(values_ND, clusters.centroids, room)
    return _relabelled(
        values_ND,
        dataclasses.replace(clusters, capacity=room),
        label_N,
        np.flatnonzero(label_N != clusters.cluster_id),
    )


def _relabelled(
    values_ND: np.ndarray,
    clusters: datatypes.Clustering,
    label_N: np.ndarray,
    moved: np.ndarray,
) -> datatypes.Clustering:
    distance_N = clusters.distance.copy()
    distance_N[moved] = capacity_lib.squared_distance(
        values_ND[moved], clusters.centroids, label_N[moved]
    )
    return dataclasses.replace(clusters, cluster_id=label_N, distance=distance_N)


def _weights(user_weight_N: np.ndarray) -> np.ndarray | None:
    """None for equal weights, which is the common case and needs no copy."""
    same = len(user_weight_N) == 0 or bool((user_weight_N == user_weight_N[0]).all())
    return None if same else np.asarray(user_weight_N, np.float32)


def _fingerprint(
    feats: datatypes.GradientFeatures, cfg: config.ClusteringConfig, key: jax.Array
) -> str:
    key_data = np.asarray(jax.random.key_data(key)).ravel().tolist()
    text = json.dumps([feats.fingerprint, dataclasses.asdict(cfg), key_data])
    return hashlib.sha256(text.encode()).hexdigest()[:16]

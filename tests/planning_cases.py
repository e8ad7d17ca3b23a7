"""Small made-up features, clusters and corpora for tests of the planner."""

from __future__ import annotations

import numpy as np

from clusterjax import config, datatypes, selection


def features(
    count: int,
    *,
    dim: int = 6,
    seed: int = 0,
    num_sources: int = 3,
    num_labels: np.ndarray | None = None,
    values: np.ndarray | None = None,
    norm: np.ndarray | None = None,
    user_weight: np.ndarray | None = None,
) -> datatypes.GradientFeatures:
    """Unit features at random; uids `s:<row>`."""
    rng = np.random.default_rng(seed)
    raw = rng.normal(size=(count, dim)) if values is None else values
    unit = raw / np.linalg.norm(raw, axis=1, keepdims=True)
    labels = rng.integers(1, 40, count) if num_labels is None else num_labels
    weight = np.ones(count) if user_weight is None else user_weight
    return datatypes.GradientFeatures(
        values=unit.astype(np.float32),
        norm=(rng.random(count) + 0.1 if norm is None else norm).astype(np.float32),
        loss=rng.random(count).astype(np.float32),
        num_labels=np.asarray(labels, np.int32),
        user_weight=np.asarray(weight, np.float32),
        example_id=np.arange(count),
        uid=np.array([f"s:{i}" for i in range(count)]),
        source_id=rng.integers(0, num_sources, count).astype(np.int32),
        kind="proxy",
        fingerprint="features",
        corpus_fingerprint="corpus",
        model_fingerprint="model",
        num_corpus=count,
        source_names=tuple("abcdefgh"[:num_sources]),
    )


def clusters(
    cluster_id: np.ndarray, *, seed: int = 0, dim: int = 6
) -> datatypes.Clustering:
    """A clustering with these labels and random distances."""
    rng = np.random.default_rng(seed)
    sizes = np.bincount(cluster_id)
    return datatypes.Clustering(
        cluster_id=np.asarray(cluster_id, np.int32),
        centroids=rng.normal(size=(len(sizes), dim)).astype(np.float32),
        distance=rng.random(len(cluster_id)).astype(np.float32),
        inertia=1.0,
        num_iterations=3,
        converged=True,
        kmeans_sizes=sizes,
        floor_sizes=sizes,
        capacity=None,
        fingerprint="clustering",
    )


def sized(sizes: list[int], seed: int = 0) -> np.ndarray:
    """Labels with these cluster sizes, in random order."""
    label = np.repeat(np.arange(len(sizes)), sizes)
    return np.random.default_rng(seed).permutation(label)


def plan(
    sizes: list[int],
    *,
    num_labels: np.ndarray | None = None,
    user_weight: np.ndarray | None = None,
    seed: int = 0,
    **settings,
) -> selection.SelectionPlan:
    """A plan that keeps everything (unless told) of clusters with these sizes."""
    count = sum(sizes)
    feats = features(count, num_labels=num_labels, user_weight=user_weight, seed=seed)
    settings = {"keep": "all", **settings}
    return selection.select(
        clusters(sized(sizes, seed), seed=seed),
        feats,
        config.SelectionConfig(**settings),
    )


def corpus(
    lengths: np.ndarray, num_labels: np.ndarray, *, vocab: int = 50, seed: int = 0
) -> datatypes.Corpus:
    """Random tokens; the last `num_labels` tokens of each example are labels."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.zeros(offsets[-1], bool)
    for end, count in zip(offsets[1:], num_labels):
        mask[end - count : end] = True
    count = len(lengths)
    return datatypes.Corpus(
        tokens=rng.integers(0, vocab, offsets[-1]).astype(np.int32),
        offsets=offsets,
        label_mask=mask,
        num_labels=np.asarray(num_labels, np.int32),
        user_weight=np.ones(count, np.float32),
        source_id=np.zeros(count, np.int32),
        source_names=("a",),
        row=np.arange(count),
        content_hash=np.zeros((count, 2), np.uint64),
        uid=np.array([f"s:{i}" for i in range(count)]),
        fingerprint="corpus",
        num_read=count,
    )

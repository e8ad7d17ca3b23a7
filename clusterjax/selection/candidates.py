"""The rows that selection chooses from: valid features, or a whole corpus."""

from __future__ import annotations

import dataclasses

import numpy as np

from clusterjax import datatypes, errors


@dataclasses.dataclass(frozen=True)
class Candidates:
    """What is known of each of the n candidates; arrays as in `SelectionPlan`.

    Attributes:
      example_id: int64 [n], rows of the corpus, ascending.
      values: float32 [n, D] unit features, or None.
      centroids: float32 [K, D], or [0, 0].
    """

    example_id: np.ndarray
    uid: np.ndarray
    cluster_id: np.ndarray
    num_labels: np.ndarray
    user_weight: np.ndarray
    source_id: np.ndarray
    source_names: tuple[str, ...]
    distance: np.ndarray
    norm: np.ndarray
    loss: np.ndarray
    values: np.ndarray | None
    centroids: np.ndarray
    num_clusters: int
    num_corpus: int
    fingerprints: dict[str, str]

    def __len__(self) -> int:
        return len(self.example_id)

    @property
    def sizes(self) -> np.ndarray:
        """int64 [K], n_c."""
        return np.bincount(self.cluster_id, minlength=self.num_clusters)


def from_features(
    feats: datatypes.GradientFeatures, clusters: datatypes.Clustering | None
) -> Candidates:
    """Every valid feature is a candidate; without clusters all are in cluster 0."""
    count = len(feats.example_id)
    if clusters is not None and len(clusters.cluster_id) != count:
        raise errors.PlanError(
            f"the clustering has {len(clusters.cluster_id):,} rows and the features"
            f" have {count:,}: they do not belong together; cluster again"
        )
    fingerprints = {
        "data": feats.corpus_fingerprint,
        "features": feats.fingerprint,
        "model": feats.model_fingerprint,
        "clustering": clusters.fingerprint if clusters is not None else "",
    }
    return Candidates(
        example_id=np.asarray(feats.example_id, np.int64),
        uid=feats.uid,
        cluster_id=_cluster_id(clusters, count),
        num_labels=np.asarray(feats.num_labels, np.int32),
        user_weight=np.asarray(feats.user_weight, np.float32),
        source_id=np.asarray(feats.source_id, np.int32),
        source_names=feats.source_names,
        distance=_unknown(count) if clusters is None else clusters.distance,
        norm=feats.norm,
        loss=feats.loss,
        values=np.asarray(feats.values),
        centroids=_no_centroids() if clusters is None else clusters.centroids,
        num_clusters=1 if clusters is None else clusters.num_clusters,
        num_corpus=feats.num_corpus,
        fingerprints=fingerprints,
    )


def from_corpus(corpus: datatypes.Corpus) -> Candidates:
    """Every example is a candidate, in one cluster."""
    count = corpus.num_examples
    return Candidates(
        example_id=np.arange(count, dtype=np.int64),
        uid=corpus.uid,
        cluster_id=_cluster_id(None, count),
        num_labels=np.asarray(corpus.num_labels, np.int32),
        user_weight=np.asarray(corpus.user_weight, np.float32),
        source_id=np.asarray(corpus.source_id, np.int32),
        source_names=corpus.source_names,
        distance=_unknown(count),
        norm=_unknown(count),
        loss=_unknown(count),
        values=None,
        centroids=_no_centroids(),
        num_clusters=1,
        num_corpus=count,
        fingerprints={"data": corpus.fingerprint},
    )


def _cluster_id(clusters: datatypes.Clustering | None, count: int) -> np.ndarray:
    if clusters is None:
        return np.zeros(count, np.int32)
    return np.asarray(clusters.cluster_id, np.int32)


def _unknown(count: int) -> np.ndarray:
    return np.full(count, np.nan, np.float32)


def _no_centroids() -> np.ndarray:
    return np.zeros((0, 0), np.float32)

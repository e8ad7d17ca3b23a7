"""The values that the stages hand to one another (bottom module: imports no stage).

    Corpus → GradientFeatures → Clustering → SelectionPlan → Schedule → TrainState

Axis key, one meaning everywhere (suffixes of array names): N examples · M kept ·
T tokens in a row · V vocabulary · H hidden width · D feature width · K clusters ·
S optimiser steps · R data shards · A accumulation micro-steps · L rows per shard and
micro-step · B examples of one optimiser step (the global batch).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class Reject:
    """One row or example that was left out, and why.

    Attributes:
      source: name of the data source.
      row: row in the source, from 0 (for a text file: the line minus one).
      reason: short machine-readable kind, e.g. `no_label_tokens`, `duplicate`.
      detail: one sentence for people.
      uid: the example's stable id, empty when none could be made.
    """

    source: str
    row: int
    reason: str
    detail: str
    uid: str = ""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokenised examples, ragged, possibly memory-mapped. Example i is row i.

    Example i's tokens are `tokens[offsets[i]:offsets[i + 1]]`. A token with
    `label_mask` true is a label: the model is trained to predict it from the tokens
    before it (so the first token of an example is never a label).

    Attributes:
      tokens: int32 [sum of lengths].
      offsets: int64 [N + 1].
      label_mask: bool [sum of lengths].
      num_labels: int32 [N], label tokens of each example (at least 1).
      user_weight: float32 [N], the user's own weight (1 by default, above 0).
      source_id: int32 [N], index into `source_names`.
      source_names: names of the sources (used in reports and evaluation only).
      group: optional int32 [N], ground-truth group (task family), −1 = unknown.
      group_names: names of the groups.
      row: int64 [N], row of the example in its source.
      content_hash: uint64 [N, 2], hash of (tokens, label mask, user weight).
      uid: str array [N], stable id `source:row:hash`.
      fingerprint: hash of everything that identifies this corpus.
      rejects: rows that did not become examples.
      num_read: rows read (= N + len(rejects), always).
    """

    tokens: np.ndarray
    offsets: np.ndarray
    label_mask: np.ndarray
    num_labels: np.ndarray
    user_weight: np.ndarray
    source_id: np.ndarray
    source_names: tuple[str, ...]
    row: np.ndarray
    content_hash: np.ndarray
    uid: np.ndarray
    fingerprint: str
    group: np.ndarray | None = None
    group_names: tuple[str, ...] = ()
    rejects: tuple[Reject, ...] = ()
    num_read: int = 0

    @property
    def num_examples(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64 [N], tokens of each example."""
        return np.diff(self.offsets)

    def example(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32 [n], label_mask bool [n]) of example i."""
        span = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return np.asarray(self.tokens[span]), np.asarray(self.label_mask[span])


@dataclasses.dataclass(frozen=True)
class GradientFeatures:
    """One gradient feature per valid example (METHOD §1).

    Attributes:
      values: float32 [n, D], unit rows (after centring, when asked).
      norm: float32 [n], raw length before scaling to unit length.
      loss: float32 [n], mean loss over the label tokens, in nats.
      num_labels: int32 [n].
      user_weight: float32 [n].
      example_id: int64 [n], row of each feature in the corpus, ascending.
      uid: str array [n].
      source_id: int32 [n], for minima per source and reports.
      kind: `proxy`, `head`, `probe` or `per_example`.
      fingerprint: hash of (corpus, model, settings).
      corpus_fingerprint: of the corpus the features were made from.
      model_fingerprint: of the parameters the features were made with.
      num_corpus: N, examples of the corpus.
      rejects: examples without a usable feature.
    """

    values: np.ndarray
    norm: np.ndarray
    loss: np.ndarray
    num_labels: np.ndarray
    user_weight: np.ndarray
    example_id: np.ndarray
    uid: np.ndarray
    source_id: np.ndarray
    kind: str
    fingerprint: str
    corpus_fingerprint: str
    model_fingerprint: str
    num_corpus: int
    source_names: tuple[str, ...] = ()
    rejects: tuple[Reject, ...] = ()


@dataclasses.dataclass(frozen=True)
class Clustering:
    """Clusters of the n valid features, after floor and capacity (METHOD §2).

    Attributes:
      cluster_id: int32 [n], final label in [0, K).
      centroids: float32 [K, D].
      distance: float32 [n], squared euclidean distance to the own centroid.
      inertia: sum of `distance` at the end of k-means (before floor and capacity).
      num_iterations: Lloyd iterations of the best start.
      converged: whether that start met the tolerance.
      kmeans_sizes: int64 [K before the floor], sizes as k-means left them.
      floor_sizes: int64 [K], sizes after the floor.
      capacity: largest allowed size when the capacity rule was applied, else None.
      fingerprint: hash of (features, settings, seed).
    """

    cluster_id: np.ndarray
    centroids: np.ndarray
    distance: np.ndarray
    inertia: float
    num_iterations: int
    converged: bool
    kmeans_sizes: np.ndarray
    floor_sizes: np.ndarray
    capacity: int | None
    fingerprint: str

    @property
    def num_clusters(self) -> int:
        return len(self.centroids)

    @property
    def sizes(self) -> np.ndarray:
        """int64 [K], final cluster sizes."""
        return np.bincount(self.cluster_id, minlength=self.num_clusters)


class Batch(NamedTuple):
    """The rows of one optimiser step, a device pytree. All leaves are [A, R·L, T].

    Attributes:
      inputs: int32 token ids.
      targets: int32, the next token of the same example (0 where there is none).
      segment_ids: int32, 1, 2, … for the examples of a row, 0 = padding.
      positions: int32, position inside the example.
      loss_weights: float32, u_it of METHOD §4 (0 where there is no label).
      example_id: int32, the corpus row of each token, −1 = none.
    """

    inputs: Any
    targets: Any
    segment_ids: Any
    positions: Any
    loss_weights: Any
    example_id: Any


class TrainState(NamedTuple):
    """Everything a step changes; donated to it.

    Attributes:
      step: int32 scalar, optimiser steps done.
      params: pytree of float32 masters (the LoRA factors alone, with LoRA).
      opt_state: optax state.
    """

    step: Any
    params: Any
    opt_state: Any

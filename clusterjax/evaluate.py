"""Held-out loss, never weighted: sums and counts by source and by group.

Every example stands in a row of its own, padded to one of a few lengths. The device
returns one sum per example; the host adds them up in float64 in order of the examples,
so that the figures do not depend on the mesh beyond the rounding of a single example.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from clusterjax import config, datatypes
from clusterjax import loss as loss_lib
from clusterjax import mesh as mesh_lib
from clusterjax import step as step_lib

_NUM_LENGTHS = 6
_LENGTH_STEP = 32


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Unweighted loss on held-out examples.

    Attributes:
      nll: float64 [N], sum of −log p over the label tokens of each example, in nats.
      num_labels: int64 [N].
      source_id: int32 [N], index into `source_names`.
      group: int32 [N], index into `group_names`, −1 = unknown; or None.
    """

    nll: np.ndarray
    num_labels: np.ndarray
    source_id: np.ndarray
    source_names: tuple[str, ...]
    group: np.ndarray | None = None
    group_names: tuple[str, ...] = ()

    @property
    def loss(self) -> float:
        """Mean over label tokens, in nats."""
        return float(self.nll.sum() / max(self.num_labels.sum(), 1))

    @property
    def example_loss(self) -> float:
        """Mean over examples of their mean loss, in nats."""
        return float(np.mean(self.nll / self.num_labels)) if len(self.nll) else 0.0

    def summary(self) -> dict[str, Any]:
        """Plain numbers for `metrics.jsonl`: overall, by source and by group."""
        result: dict[str, Any] = {
            "loss": self.loss,
            "example_loss": self.example_loss,
            "labels": int(self.num_labels.sum()),
            "examples": len(self.nll),
            "sources": self._parts(self.source_id, self.source_names),
        }
        if self.group is not None:
            result["groups"] = self._parts(self.group, self.group_names)
        return result

    def _parts(self, part: np.ndarray, names: tuple[str, ...]) -> dict[str, Any]:
        known = part >= 0
        total, labels, count = (
            np.bincount(part[known], weights, minlength=len(names))
            for weights in (self.nll[known], self.num_labels[known], None)
        )
        return {
            name: {
                "nll_sum": float(total[i]),
                "labels": int(labels[i]),
                "examples": int(count[i]),
                "loss": float(total[i] / labels[i]),
            }
            for i, name in enumerate(names)
            if count[i]
        }


class Evaluator:
    """Evaluates parameters on a fixed corpus; compiled once for each row length."""

    def __init__(
        self,
        tmpl: step_lib.Template,
        corpus: datatypes.Corpus,
        mesh: jax.sharding.Mesh,
        cfg: config.EvalConfig,
        perf: config.PerfConfig,
    ):
        self._corpus = corpus
        self._mesh = mesh
        self._tokens_per_device = perf.eval_batch_tokens
        self._chosen = choose(corpus, cfg.max_examples)
        self._run = jax.jit(
            functools.partial(
                _example_nll,
                tmpl,
                num_shards=mesh_lib.num_shards(mesh),
                vocab_chunk=perf.vocab_chunk,
                vocab_shards=step_lib.vocab_shards(tmpl, mesh),
            ),
            out_shardings=mesh_lib.replicated(mesh),
            static_argnames="size",
        )

    def __call__(self, params: step_lib.Params, frozen: step_lib.Params) -> Evaluation:
        """Evaluates; with several processes all of them must call it."""
        corpus, chosen = self._corpus, self._chosen
        nll = np.zeros(corpus.num_examples)
        for ids_B, rows, size in self._batches():
            sums_B = self._run(params, frozen, *self._put(rows), size=size)
            # Fetching at once keeps a single collective program in flight.
            real = ids_B >= 0
            nll[ids_B[real]] = np.asarray(sums_B, np.float64)[real]
        group = None if corpus.group is None else corpus.group[chosen]
        return Evaluation(
            nll[chosen],
            corpus.num_labels[chosen].astype(np.int64),
            corpus.source_id[chosen],
            corpus.source_names,
            group,
            corpus.group_names,
        )

    def _batches(self) -> Iterator[tuple[np.ndarray, tuple[np.ndarray, ...], int]]:
        """Yields example ids [B] (−1 = padding), arrays [B, T], label slots a shard."""
        shards = mesh_lib.num_shards(self._mesh)
        lengths = self._corpus.lengths[self._chosen]
        for width in row_lengths(lengths):
            ids = self._chosen[_bucket(lengths) == width]
            per_shard = max(self._tokens_per_device // width, 1)
            per_shard = min(per_shard, -(-len(ids) // shards))
            batch = shards * per_shard
            padded = np.full(-(-len(ids) // batch) * batch, -1)
            padded[: len(ids)] = ids
            most = int(self._corpus.num_labels[ids].max())
            for ids_B in padded.reshape(-1, batch):
                yield ids_B, _rows(self._corpus, ids_B, width), per_shard * most

    def _put(self, rows: tuple[np.ndarray, ...]) -> list[jax.Array]:
        sharding = NamedSharding(self._mesh, PartitionSpec(mesh_lib.BATCH_AXES))
        return [
            jax.make_array_from_callback(x.shape, sharding, lambda i, x=x: x[i])
            for x in rows
        ]


def choose(corpus: datatypes.Corpus, max_examples: int | None) -> np.ndarray:
    """Ids of at most `max_examples` examples, spread evenly over the corpus."""
    count = corpus.num_examples
    if max_examples is None or max_examples >= count:
        return np.arange(count)
    return np.arange(max_examples) * count // max_examples


def row_lengths(lengths: np.ndarray) -> np.ndarray:
    """The row lengths that `lengths` are padded to, ascending, at most six."""
    return np.unique(_bucket(lengths))


def _bucket(lengths: np.ndarray) -> np.ndarray:
    """Pads each length to the nearest of six quantiles above it."""
    if not len(lengths):
        return lengths
    inputs = np.maximum(lengths - 1, 1)  # the last token predicts nothing
    quantiles = np.quantile(inputs, np.linspace(0, 1, _NUM_LENGTHS + 1)[1:])
    edges = np.unique(-(-np.ceil(quantiles).astype(int) // _LENGTH_STEP) * _LENGTH_STEP)
    return edges[np.searchsorted(edges, inputs)]


def _rows(
    corpus: datatypes.Corpus, ids_B: np.ndarray, width: int
) -> tuple[np.ndarray, ...]:
    """Inputs, targets, segment ids (int32) and label mask (bool), each [B, T]."""
    shape = (len(ids_B), width)
    inputs, targets, segments = (np.zeros(shape, np.int32) for _ in range(3))
    mask = np.zeros(shape, bool)
    for row, i in enumerate(ids_B):
        if i < 0:
            continue
        tokens, is_label = corpus.example(i)
        n = len(tokens) - 1
        inputs[row, :n], targets[row, :n] = tokens[:-1], tokens[1:]
        mask[row, :n] = is_label[1:]
        segments[row, :n] = 1
    return inputs, targets, segments, mask


def _example_nll(
    tmpl: step_lib.Template,
    params: step_lib.Params,
    frozen: step_lib.Params,
    inputs_BT: jax.Array,
    targets_BT: jax.Array,
    segments_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    size: int,
    num_shards: int,
    vocab_chunk: int,
    vocab_shards: int,
) -> jax.Array:
    """Σ_t ℓ_it of every row, [B] float32."""
    model, adapters = tmpl.merge(params, frozen)
    hidden_BTH = model.hidden(inputs_BT, segments_BT, adapters=adapters)
    labels = loss_lib.find_labels(mask_BT, size, num_shards)
    nll_P: Any = loss_lib.token_nll(
        labels.take(hidden_BTH),
        jnp.where(labels.valid_P, labels.take(targets_BT), 0),
        model.output_matrix(),
        vocab_chunk,
        vocab_shards,
    )
    rows, width = inputs_BT.shape
    row_P = jnp.where(labels.valid_P, labels.index_P // width, rows)
    return jax.ops.segment_sum(nll_P, row_P, num_segments=rows + 1)[:-1]

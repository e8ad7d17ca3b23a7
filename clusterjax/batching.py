"""Fills the rows of a step's batch on the host, all shards or some of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing

from clusterjax import datatypes, steps


def fill(
    corpus: datatypes.Corpus,
    placed: steps.Placement,
    shards: Sequence[int] | None = None,
    weight_dtype: np.typing.DTypeLike = np.float32,
) -> datatypes.Batch:
    """The NumPy arrays of one optimiser step.

    The weight u_it stands at the position whose next token is the label; the last token
    of an example predicts nothing.

    Args:
      corpus: token ids and label masks.
      placed: where each example lies (`Schedule.place`).
      shards: data shards to fill, in the order of the result; all by default. A
        process of several fills only those of its own devices.
      weight_dtype: float64 for checks under x64.

    Returns:
      `datatypes.Batch` of [A, len(shards)·L, T] arrays.
    """
    shards = range(placed.num_shards) if shards is None else shards
    local_R = np.full(placed.num_shards, -1)
    local_R[list(shards)] = np.arange(len(shards))
    mine = np.flatnonzero(local_R[placed.shard] >= 0)
    num_rows = len(shards) * placed.num_rows
    shape = (placed.num_micro_steps, num_rows, placed.row_length)
    batch = _empty(shape, weight_dtype)
    if not len(mine):
        return batch

    length = placed.length[mine]
    example, offset = _ragged(length)
    chosen = mine[example]
    row = local_R[placed.shard[mine]] * placed.num_rows + placed.row[mine]
    first = (placed.micro_step[mine] * num_rows + row) * placed.row_length
    where = (first + placed.start[mine])[example] + offset
    source = corpus.offsets[placed.step.example_id[mine]][example] + offset
    tokens = np.asarray(corpus.tokens[source])
    labels = np.asarray(corpus.label_mask[source])

    def put(array: np.ndarray, position: np.ndarray, values: np.ndarray) -> None:
        array.reshape(-1)[position] = values

    put(batch.inputs, where, tokens)
    put(batch.segment_ids, where, placed.segment[chosen])
    put(batch.positions, where, offset)
    put(batch.example_id, where, placed.step.example_id[chosen])
    predicts = np.flatnonzero(offset > 0)  # tokens that the one before them predicts
    put(batch.targets, where[predicts] - 1, tokens[predicts])
    weight = placed.step.weight[chosen[predicts]] * labels[predicts]
    put(batch.loss_weights, where[predicts] - 1, weight)
    return batch


def _empty(
    shape: tuple[int, int, int], weight_dtype: np.typing.DTypeLike
) -> datatypes.Batch:
    return datatypes.Batch(
        inputs=np.zeros(shape, np.int32),
        targets=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        loss_weights=np.zeros(shape, weight_dtype),
        example_id=np.full(shape, -1, np.int32),
    )


def _ragged(length_b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(example, offset inside it) of every token of examples laid end to end."""
    example = np.repeat(np.arange(len(length_b)), length_b)
    begin = np.cumsum(length_b) - length_b
    return example, np.arange(len(example)) - begin[example]

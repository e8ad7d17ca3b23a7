"""Rows of the feature pass: examples sorted by length into a few static shapes.

One example is one row. Lengths are rounded up to one of a few bucket lengths, so that
each shape is compiled once, and the examples of a batch are alike in length and in
label count, so that little of it is padding.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from clusterjax import datatypes

# Bucket lengths are multiples of this: the lane width of vector units, and few enough
# candidates for an exact choice.
LENGTH_MULTIPLE = 16
# Label slots are rounded up to one of these sixteenths of the positions: each number of
# slots is a program of its own, so there are few, and finer where labels are rare.
_SLOT_SIXTEENTHS = (1, 2, 3, 4, 6, 8, 12, 16)


class Rows(NamedTuple):
    """The rows of one forward pass. All leaves are int32 [R · rows, T].

    Attributes:
      tokens: token ids; any id where nothing is.
      targets: the next token of the same example, where that is a label.
      slot: number, inside the shard, of the example whose label the position
        predicts; −1 where the next token is no label.
      segment_ids: 1, 2, … for the examples of a row, 0 = padding; None: every row is
        one example, padded on the right.
      positions: position inside the example; None: counted from the segment's start.
    """

    tokens: Any
    targets: Any
    slot: Any
    segment_ids: Any = None
    positions: Any = None


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One static shape.

    Attributes:
      length: T, positions of a row.
      rows: rows of each shard.
      turns: equal groups of a shard's rows that a backward pass takes one after
        another; divides `rows`.
    """

    length: int
    rows: int
    turns: int = 1


class Sizes(NamedTuple):
    """Static sizes of a batch's step.

    Attributes:
      shard: label slots of a shard.
      row: label slots of a row.
      turns: groups of rows taken one after another (`Bucket.turns`).
      turn: label slots of a shard's rows in one turn.
    """

    shard: int
    row: int
    turns: int
    turn: int


@dataclasses.dataclass(frozen=True)
class Windows:
    """The part of each example that the pass reads.

    Attributes:
      start: int64 [N], first token, counted in `corpus.tokens`.
      length: int64 [N], tokens.
      num_labels: int32 [N], labels that are predicted inside the window.
    """

    start: np.ndarray
    length: np.ndarray
    num_labels: np.ndarray


def windows(corpus: datatypes.Corpus, max_tokens: int | None) -> Windows:
    """Chooses what the pass reads of each example: all of it, up to `max_tokens`.

    A longer example is cut at the end. When its first label lies behind the middle of
    the cut, the window begins later, so that half of it can hold labels: a long prompt
    never costs an example its place.
    """
    lengths = corpus.lengths
    start = np.asarray(corpus.offsets[:-1], np.int64).copy()
    length = lengths.copy()
    if max_tokens is not None:
        cut = lengths > max_tokens
        first = first_label(corpus)
        shift = np.clip(first - max_tokens // 2, 0, lengths - max_tokens)
        start[cut] += shift[cut]
        length[cut] = max_tokens
    # The first token of a window has nothing before it, so it is not predicted.
    before = np.concatenate([[0], np.cumsum(corpus.label_mask, dtype=np.int64)])
    end = start + length
    num_labels = before[end] - before[np.minimum(start + 1, end)]
    return Windows(start, length, num_labels.astype(np.int32))


def first_label(corpus: datatypes.Corpus) -> np.ndarray:
    """int64 [N], place of each example's first label; its length if there is none."""
    places = np.append(np.flatnonzero(corpus.label_mask), len(corpus.label_mask))
    offsets = np.asarray(corpus.offsets, np.int64)
    nearest = places[np.searchsorted(places, offsets[:-1])]
    return np.minimum(nearest, offsets[1:]) - offsets[:-1]


def choose_lengths(lengths: np.ndarray, num_buckets: int) -> list[int]:
    """Bucket lengths, ascending, that waste the fewest padded positions.

    Exact, by dynamic programming over the multiples of `LENGTH_MULTIPLE`.

    Args:
      lengths: int [N], at least one.
      num_buckets: most buckets.
    """
    rounded = -(-np.maximum(lengths, 1) // LENGTH_MULTIPLE)
    candidates, counts = np.unique(rounded, return_counts=True)
    # Hundreds of candidates are plenty; merge neighbours beyond that.
    while len(candidates) > 512:
        pairs = np.arange(len(candidates)) // 2
        counts = np.bincount(pairs, weights=counts)
        candidates = np.append(candidates[1::2], candidates[-1])[: len(counts)]
    total = np.concatenate([[0.0], np.cumsum(counts)])
    size = len(candidates)
    cost = np.full((num_buckets + 1, size + 1), np.inf)
    cost[0, 0] = 0.0
    choice = np.zeros((num_buckets + 1, size + 1), np.int64)
    for used in range(1, num_buckets + 1):
        for end in range(1, size + 1):
            spent = cost[used - 1, :end] + candidates[end - 1] * (
                total[end] - total[:end]
            )
            choice[used, end] = np.argmin(spent)
            cost[used, end] = spent[choice[used, end]]
    used, end, ends = int(np.argmin(cost[:, size])), size, []
    while end:
        ends.append(int(candidates[end - 1]) * LENGTH_MULTIPLE)
        end = int(choice[used, end])
        used -= 1
    return ends[::-1]


def choose_buckets(
    lengths: np.ndarray,
    num_buckets: int,
    batch_tokens: int,
    num_shards: int,
    turn_tokens: int | None = None,
) -> list[Bucket]:
    """Shapes for examples of these lengths.

    Args:
      lengths: int [N], positions of each example.
      num_buckets: most different lengths.
      batch_tokens: positions of a shard's batch, at most (one row at least).
      num_shards: R; a bucket with few examples gets no more rows than they need.
      turn_tokens: positions of a shard's turn, about (one row at least); None: all
        rows at once.
    """
    result = []
    ends = choose_lengths(lengths, num_buckets)
    for shorter, length in zip([0, *ends[:-1]], ends):
        count = int(np.sum((lengths > shorter) & (lengths <= length)))
        if shorter == 0:
            count += int(np.sum(lengths == 0))
        needed = max(-(-count // num_shards), 1)
        num_batches = -(-needed // max(batch_tokens // length, 1))
        # Of equal size, so that the last batch is hardly emptier than the others.
        rows = -(-needed // num_batches)
        result.append(in_turns(length, rows, turn_tokens or batch_tokens))
    return result


def in_turns(length: int, rows: int, turn_tokens: int) -> Bucket:
    """A bucket of so many rows, or a few more, in equal turns.

    Turns are between a half and 5/4 of `turn_tokens`: the size that leaves the fewest
    rows empty, and of these the largest.
    """
    most = max(turn_tokens // length, 1)
    sizes = range(min(most + most // 4, rows), min(most, rows) // 2, -1)
    size = min(sizes, key=lambda size: -(-rows // size) * size)
    turns = -(-rows // size)
    return Bucket(length, turns * size, turns)


def by_turn(array: Any, shards: int, turns: int) -> Any:
    """[R · rows, ...] → [turns, R · rows / turns, ...]; row r is in turn r mod turns.

    Neighbours are alike in labels, so every turn gets a fair mixture of them.
    """
    split = array.reshape(shards, -1, turns, *array.shape[1:])
    split = split.transpose(2, 0, 1, *range(3, split.ndim))
    return split.reshape(turns, -1, *array.shape[1:])


def from_turns(array: Any, shards: int) -> Any:
    """The inverse of `by_turn`."""
    split = array.reshape(array.shape[0], shards, -1, *array.shape[2:])
    split = split.transpose(1, 2, 0, *range(3, split.ndim))
    return split.reshape(-1, *array.shape[2:])


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which examples share a batch.

    Attributes:
      bucket: of each batch.
      example_id: of each batch, int64 [R · rows], −1 = an empty row.
      sizes: of each batch.
    """

    bucket: list[Bucket]
    example_id: list[np.ndarray]
    sizes: list[Sizes]

    def padding(self, lengths: np.ndarray) -> float:
        """Share of all positions that hold no token."""
        total = sum(b.length * len(i) for b, i in zip(self.bucket, self.example_id))
        used = sum(int(lengths[i[i >= 0]].sum()) for i in self.example_id)
        return 1.0 - used / max(total, 1)


def bucket_of(positions: np.ndarray, buckets: list[Bucket]) -> np.ndarray:
    """int64 [N], the shortest bucket that holds each example."""
    return np.searchsorted([bucket.length for bucket in buckets], positions)


def order(example_id: np.ndarray, where: Windows, buckets: list[Bucket]) -> np.ndarray:
    """The ids sorted by (bucket, labels, length, id): neighbours share a batch."""
    chosen = np.asarray(example_id)
    keys = (
        chosen,
        where.length[chosen],
        where.num_labels[chosen],
        bucket_of(where.length[chosen] - 1, buckets),
    )
    return chosen[np.lexsort(keys)]


def plan_batches(
    example_id: np.ndarray, where: Windows, buckets: list[Bucket], num_shards: int
) -> Plan:
    """Cuts examples, already in `order`, into batches of one bucket each."""
    result = Plan([], [], [])
    index = bucket_of(where.length[example_id] - 1, buckets)
    for b, bucket in enumerate(buckets):
        members = example_id[index == b]
        width = bucket.rows * num_shards
        for begin in range(0, len(members), width):
            chosen = members[begin : begin + width]
            batch = np.full(width, -1, np.int64)
            batch[: len(chosen)] = chosen
            # Dealt out in turn: shards are alike in rows and in labels.
            batch = batch.reshape(bucket.rows, num_shards).T.reshape(-1)
            labels = np.where(batch >= 0, where.num_labels[batch], 0)
            result.bucket.append(bucket)
            result.example_id.append(batch)
            result.sizes.append(_sizes(labels, bucket, num_shards))
    return result


def _sizes(labels: np.ndarray, bucket: Bucket, num_shards: int) -> Sizes:
    """Sizes for rows with so many labels, int [R · rows]."""
    positions, turns = bucket.rows * bucket.length, bucket.turns
    in_shard = labels.reshape(num_shards, -1).sum(axis=1)
    in_turn = by_turn(labels, num_shards, turns).reshape(turns, num_shards, -1)
    return Sizes(
        shard=_slots(int(in_shard.max()), positions),
        row=_slots(int(labels.max()), bucket.length),
        turns=turns,
        turn=_slots(int(in_turn.sum(axis=2).max()), positions // turns),
    )


def _slots(labels: int, positions: int) -> int:
    """Slots for so many labels, rounded up to one of a few sizes."""
    sizes = [-(-positions * part // 16) for part in _SLOT_SIXTEENTHS]
    return next(size for size in sizes if size >= labels)


def fill(
    corpus: datatypes.Corpus,
    where: Windows,
    example_id: np.ndarray,
    bucket: Bucket,
) -> Rows:
    """Copies examples into rows: inputs are all tokens but the last of each window.

    Args:
      example_id: int64 [rows], −1 = an empty row.
      bucket: its `rows` number the slots of each shard.
    """
    shape = (len(example_id), bucket.length)
    tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    slot = np.full(shape, -1, np.int32)
    for row, i in enumerate(example_id):
        if i < 0:
            continue
        begin, end = int(where.start[i]), int(where.start[i] + where.length[i])
        ids = corpus.tokens[begin:end]
        is_label = np.asarray(corpus.label_mask[begin + 1 : end])
        count = len(ids) - 1
        tokens[row, :count] = ids[:-1]
        targets[row, :count] = np.where(is_label, ids[1:], 0)
        slot[row, :count] = np.where(is_label, row % bucket.rows, -1)
    return Rows(tokens, targets, slot)

"""`Layout`: the arrays of all batches on R shards and A micro-steps (METHOD §5).

Nothing here changes a result: it decides shapes, and so speed and memory. A batch's
shape is a function of its step alone, so that resuming anywhere meets the same shapes.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Protocol

import numpy as np

from clusterjax import config, errors, steps
from clusterjax import plan as plans
from clusterjax.allocation import placement, rows

_BLOCK = 64  # steps that are placed together
_BLOCKS_CACHED = 8
_SAMPLED = 16_384  # examples on which the row length is chosen
_SIZED = 131_072  # examples whose steps decide the usual shape
_GROWTH = 16  # a batch that needs more gets more by multiples of 1/16
_WIDTHS = 24  # row lengths tried
_ATTENTION = 2048  # tokens of a row in which attention costs as much as all else
_MULTIPLE = 8  # of tokens that a row length is a multiple of


class Membership(Protocol):
    """What a layout needs of a schedule."""

    plan: plans.SelectionPlan
    config: config.AllocationConfig
    length: np.ndarray
    num_labels: np.ndarray
    steps_per_epoch: int
    num_steps: int

    @property
    def num_epochs(self) -> int: ...

    def members(self, epoch: int) -> np.ndarray: ...

    def step(self, step: int) -> steps.Step: ...


@dataclasses.dataclass(frozen=True)
class _Block:
    """Some steps, placed.

    Attributes:
      shard, row, start: int32 [S, B], −1 = no example; `row` counts inside the shard.
      rows_S: int64 [S], rows in use on the fullest shard.
      labels_S: int64 [S], most label tokens on one shard in one micro-step.
    """

    shard: np.ndarray
    row: np.ndarray
    start: np.ndarray
    rows_S: np.ndarray
    labels_S: np.ndarray


class Layout:
    """The shape of a run's batches, and the place of every example in them.

    Making it looks at the first steps only, up to 131,072 examples, so that a run of
    any length starts at once and needs no more memory. In a shorter run all batches
    have one shape. In a longer one a later batch may need more room; it then has a
    larger shape of its own, rounded up so that there are few of them.

    Attributes:
      num_shards: R.
      num_micro_steps: A.
      row_length: T. The config's; else, packed, the length from that of the longest
        example to twice it that makes the batches smallest.
      num_rows: L, rows per shard and micro-step of the usual batch.
      num_labels: most label tokens on one shard in one micro-step of it.
    """

    def __init__(self, schedule: Membership, num_shards: int, num_micro_steps: int):
        self.num_shards, self.num_micro_steps = num_shards, num_micro_steps
        self._schedule = schedule
        self._is_herded = schedule.config.order == "herded"
        self._blocks: collections.OrderedDict = collections.OrderedDict()
        self.row_length = self._choose_row_length()
        self.num_rows, self.num_labels = self._usual_sizes()

    @property
    def shape(self) -> tuple[int, int, int]:
        """(A, R·L, T) of the usual batch."""
        rows = self.num_shards * self.num_rows
        return self.num_micro_steps, rows, self.row_length

    def place(self, step: int, num_rows: int | None = None) -> steps.Placement:
        """Where each example of a step lies.

        Args:
          step: optimiser step.
          num_rows: rows per shard and micro-step, instead of those it needs.

        Raises:
          errors.PlanError: the step does not fit in `num_rows`.
        """
        members = self._schedule.step(step)
        index = step % self._schedule.steps_per_epoch
        block = self._place_block(members.epoch, index // _BLOCK)
        used = slice(0, len(members.entry))
        shard, row, start = (
            part[index % _BLOCK, used] for part in (block.shard, block.row, block.start)
        )
        needed, labels = self._sizes_of(block.rows_S, block.labels_S)
        if num_rows is None:
            num_rows = _enlarged(self.num_rows, needed)
        elif int(row.max(initial=-1)) >= num_rows * self.num_micro_steps:
            raise errors.PlanError(
                f"step {step} needs {int(row.max()) + 1} rows on a shard;"
                f" {num_rows} rows × {self.num_micro_steps} micro-steps are too few"
            )
        return steps.Placement(
            step=members,
            length=self._schedule.length[members.entry],
            shard=shard,
            micro_step=row % self.num_micro_steps,
            row=row // self.num_micro_steps,
            start=start,
            segment=_segments(shard, row, start),
            num_shards=self.num_shards,
            num_micro_steps=self.num_micro_steps,
            num_rows=num_rows,
            row_length=self.row_length,
            num_labels=_enlarged(self.num_labels, labels),
        )

    def first_steps(self) -> tuple[np.ndarray, np.ndarray]:
        """(shard, row inside it), int32 [S', B], of the first epoch's first steps.

        As many as decide the usual shape.
        """
        members_SB = self._schedule.members(0)[: self._steps(_SIZED)]
        placed = self._placed(members_SB)
        return placed.shard, placed.row

    def _place_block(self, epoch: int, block: int) -> _Block:
        key = (0 if self._is_herded else epoch, block)
        if key not in self._blocks:
            part = slice(block * _BLOCK, (block + 1) * _BLOCK)
            self._blocks[key] = self._placed(self._schedule.members(epoch)[part])
            while len(self._blocks) > _BLOCKS_CACHED:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(key)
        return self._blocks[key]

    def _shards(self, members_SB: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(shard, length), both [S, B]."""
        schedule = self._schedule
        used = members_SB >= 0
        cluster_SB = np.where(used, schedule.plan.cluster_id[members_SB], -1)
        length_SB = np.where(used, schedule.length[members_SB], 0)
        if schedule.config.placement == "dedicated":
            quota_K = schedule.plan.quota
            shard_SB = placement.dedicated(cluster_SB, quota_K, self.num_shards)
        else:
            shard_SB = placement.spread(cluster_SB, length_SB, self.num_shards)
        return shard_SB, length_SB

    def _rows(
        self, shard_SB: np.ndarray, length_SB: np.ndarray, row_length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """(row inside the shard, start), both [S, B]."""
        if not self._schedule.config.packing:
            return rows.one_per_row(shard_SB)
        return rows.best_fit(shard_SB, length_SB, self.num_shards, row_length)

    def _choose_row_length(self) -> int:
        cfg = self._schedule.config
        if cfg.row_length is not None:
            return cfg.row_length
        longest = _round_up(int(self._schedule.length.max()), _MULTIPLE)
        if not cfg.packing:
            return longest
        members_SB, is_all = self._sample()
        shard_SB, length_SB = self._shards(members_SB)
        stride = _round_up(-(-longest // _WIDTHS), _MULTIPLE)
        # Steps outside the sample may need one more row, which costs its length.
        margin = 0.0 if is_all else 0.25

        def cost(row_length: int) -> float:
            row_SB, _ = self._rows(shard_SB, length_SB, row_length)
            most = int(row_SB.max()) + 1
            positions = (-(-most // self.num_micro_steps) + margin) * row_length
            return positions * (1 + row_length / _ATTENTION)

        return min(range(longest, 2 * longest, stride), key=cost)

    def _sample(self) -> tuple[np.ndarray, bool]:
        """Members of the first steps of the run, and whether those are all."""
        wanted = self._steps(_SAMPLED)
        return self._first_members(wanted), self._schedule.num_steps <= wanted

    def _first_members(self, num_steps: int) -> np.ndarray:
        schedule = self._schedule
        num_steps = min(num_steps, schedule.num_steps)
        epochs = range(-(-num_steps // schedule.steps_per_epoch))
        return np.concatenate([schedule.members(e) for e in epochs])[:num_steps]

    def _steps(self, num_examples: int) -> int:
        return max(num_examples // self._schedule.config.batch_size, _BLOCK)

    def _usual_sizes(self) -> tuple[int, int]:
        """L and label tokens that the first steps need."""
        wanted = self._steps(_SIZED)
        if self._is_herded:  # every epoch repeats the first
            wanted = min(wanted, self._schedule.steps_per_epoch)
        members_SB = self._first_members(wanted)
        sizes = []
        for begin in range(0, len(members_SB), 16 * _BLOCK):
            placed = self._placed(members_SB[begin : begin + 16 * _BLOCK])
            sizes.append(self._sizes_of(placed.rows_S, placed.labels_S))
        num_rows, num_labels = np.max(sizes, axis=0)
        return int(num_rows), int(num_labels)

    def _sizes_of(self, rows_S: np.ndarray, labels_S: np.ndarray) -> tuple[int, int]:
        """(L, label tokens) that all of these steps fit in."""
        return -(-int(rows_S.max()) // self.num_micro_steps), int(labels_S.max())

    def _placed(self, members_SB: np.ndarray) -> _Block:
        shard_SB, length_SB = self._shards(members_SB)
        row_SB, start_SB = self._rows(shard_SB, length_SB, self.row_length)
        step, slot = np.nonzero(members_SB >= 0)
        cell = step * self.num_shards + shard_SB[step, slot]
        cell = cell * self.num_micro_steps + row_SB[step, slot] % self.num_micro_steps
        cells_per_step = self.num_shards * self.num_micro_steps
        labels = np.bincount(
            cell,
            self._schedule.num_labels[members_SB[step, slot]],
            minlength=len(members_SB) * cells_per_step,
        )
        most = labels.reshape(len(members_SB), cells_per_step).max(1)
        rows_S = row_SB.max(1).astype(np.int64) + 1
        return _Block(shard_SB, row_SB, start_SB, rows_S, most.astype(np.int64))


def _enlarged(usual: int, needed: int) -> int:
    """The usual size if it is enough, else the next of few larger ones."""
    step = max(usual // _GROWTH, 1)
    return usual + max(-(-(needed - usual) // step), 0) * step


def check_row_length(length_M: np.ndarray, cfg: config.AllocationConfig) -> None:
    """Raises errors.ConfigError where the config's rows are too short."""
    longest = int(length_M.max())
    if cfg.row_length is not None and cfg.row_length < longest:
        raise errors.ConfigError(
            f"allocation.row_length={cfg.row_length} is less than the longest kept"
            f" example, {longest} tokens; raise it, or lower data.max_length"
        )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _segments(shard: np.ndarray, row: np.ndarray, start: np.ndarray) -> np.ndarray:
    """int32 [B']: 1, 2, … for the examples of a row, by position."""
    order = np.lexsort((start, row, shard))
    shard, row = shard[order], row[order]
    first = np.ones(len(order), bool)
    first[1:] = (np.diff(shard) != 0) | (np.diff(row) != 0)
    position = np.arange(len(order))
    begin = np.maximum.accumulate(np.where(first, position, 0))
    segment = np.empty(len(order), np.int32)
    segment[order] = position - begin + 1
    return segment

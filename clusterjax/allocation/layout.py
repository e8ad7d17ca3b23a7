"""`Layout`: the arrays of all batches on R shards and A micro-steps (METHOD §5).

Nothing here changes a result: it decides shapes, and so speed and memory.
"""

from __future__ import annotations

import collections
from typing import Protocol

import numpy as np

from clusterjax import config, errors, steps
from clusterjax import plan as plans
from clusterjax.allocation import placement, rows

_BLOCK = 64  # steps that are placed together
_BLOCKS_CACHED = 8
_SAMPLED = 16_384  # examples on which the row length is chosen
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


class Layout:
    """One shape for all batches of a run, and the place of every example in it.

    Attributes:
      num_shards: R.
      num_micro_steps: A.
      row_length: T. The config's; else, packed, the length from that of the longest
        example to twice it that makes the batches smallest.
      rows_used: int64 [steps of the run], rows in use on the fullest shard.
      num_rows: L, rows per shard and micro-step that every step fits in.
      num_labels: most label tokens on one shard in one micro-step.
    """

    def __init__(self, schedule: Membership, num_shards: int, num_micro_steps: int):
        self.num_shards, self.num_micro_steps = num_shards, num_micro_steps
        self._schedule = schedule
        self._is_herded = schedule.config.order == "herded"
        self._blocks: collections.OrderedDict = collections.OrderedDict()
        self.row_length = self._choose_row_length()
        self.rows_used, labels = self._sizes()
        self.num_rows = -(-int(self.rows_used.max()) // num_micro_steps)
        self.num_labels = int(labels.max())

    @property
    def shape(self) -> tuple[int, int, int]:
        """(A, R·L, T)."""
        rows = self.num_shards * self.num_rows
        return self.num_micro_steps, rows, self.row_length

    def place(self, step: int, num_rows: int | None = None) -> steps.Placement:
        """Where each example of a step lies.

        Args:
          step: optimiser step.
          num_rows: rows per shard and micro-step, instead of `self.num_rows`.

        Raises:
          errors.PlanError: the step does not fit in `num_rows`.
        """
        num_rows = num_rows or self.num_rows
        members = self._schedule.step(step)
        index = step % self._schedule.steps_per_epoch
        block = self._place_block(members.epoch, index // _BLOCK)
        used = slice(0, len(members.entry))
        shard, row, start = (part[index % _BLOCK, used] for part in block)
        if int(row.max(initial=-1)) >= num_rows * self.num_micro_steps:
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
        )

    def epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(shard, row inside the shard, start) of `members(epoch)`, int32 [S, B]."""
        members_SB = self._schedule.members(epoch)
        shard_SB, length_SB = self._shards(members_SB)
        return shard_SB, *self._rows(shard_SB, length_SB, self.row_length)

    def _place_block(
        self, epoch: int, block: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        key = (0 if self._is_herded else epoch, block)
        if key not in self._blocks:
            part = slice(block * _BLOCK, (block + 1) * _BLOCK)
            shard_SB, length_SB = self._shards(self._schedule.members(epoch)[part])
            placed = self._rows(shard_SB, length_SB, self.row_length)
            self._blocks[key] = shard_SB, *placed
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
        schedule = self._schedule
        wanted = max(_SAMPLED // schedule.config.batch_size, _BLOCK)
        epochs = -(-min(wanted, schedule.num_steps) // schedule.steps_per_epoch)
        parts = [schedule.members(epoch) for epoch in range(epochs)]
        members_SB = np.concatenate(parts)[: schedule.num_steps]
        return members_SB[:wanted], schedule.num_steps <= wanted

    def _sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows, labels) of the fullest shard of each step; places the whole run."""
        schedule = self._schedule
        num_epochs = 1 if self._is_herded else schedule.num_epochs
        # Small epochs are placed together.
        together = max(_SAMPLED // schedule.plan.num_kept, 1)
        parts = []
        for first in range(0, num_epochs, together):
            epochs = range(first, min(first + together, num_epochs))
            members = [schedule.members(epoch) for epoch in epochs]
            parts.append(self._most_of(np.concatenate(members)))
        repeats = schedule.num_epochs if self._is_herded else 1
        rows_S, labels_S = (np.concatenate(part * repeats) for part in zip(*parts))
        return rows_S[: schedule.num_steps], labels_S[: schedule.num_steps]

    def _most_of(self, members_SB: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [S] rows in use, and label tokens in a micro-step, at most."""
        shard_SB, length_SB = self._shards(members_SB)
        row_SB, _ = self._rows(shard_SB, length_SB, self.row_length)
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
        return row_SB.max(1).astype(np.int64) + 1, most.astype(np.int64)


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

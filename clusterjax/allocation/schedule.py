"""`Schedule`: every step of a run, as a look-up (METHOD §4–5)."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

import numpy as np

from clusterjax import config, datatypes, errors, files, rational, steps
from clusterjax import plan as plans
from clusterjax.allocation import herded, membership, placement, rows, weights

_BLOCK = 64  # steps that are placed together
_EPOCHS_CACHED = 2
_BLOCKS_CACHED = 8


class Schedule:
    """Which examples each step holds, where they lie, and what they weigh.

    A function of (plan, seed, epoch, step, B): nothing is stored but the plan, so that
    resuming is a look-up, and a run may go on with another number of devices.

    Attributes:
      plan: the selection plan.
      config: allocation settings.
      length: int64 [M], tokens of each kept entry.
      num_labels: int64 [M], label tokens of each kept entry.
      row_length: T.
      steps_per_epoch: S.
      num_steps: steps of the whole run.
    """

    def __init__(
        self,
        plan: plans.SelectionPlan,
        length_M: np.ndarray,
        num_labels_M: np.ndarray,
        cfg: config.AllocationConfig,
    ):
        self.plan = plan
        self.config = cfg
        self.length = np.asarray(length_M, np.int64)
        self.num_labels = np.asarray(num_labels_M, np.int64)
        self.row_length = _row_length(self.length, cfg)
        self.steps_per_epoch = membership.num_steps(
            plan.num_kept, cfg.batch_size, cfg.last_step
        )
        self.num_steps = _total_steps(self.steps_per_epoch, cfg)
        self._ids = plan.example_id * 1024 + plan.copy_number
        self._user_weight = plan.user_weight[plan.entry]
        self._epochs: collections.OrderedDict = collections.OrderedDict()
        self._blocks: collections.OrderedDict = collections.OrderedDict()
        self._sizes: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[steps.Step]:
        return (self.step(step) for step in range(self.num_steps))

    @property
    def num_epochs(self) -> int:
        """Epochs that are begun."""
        return -(-self.num_steps // self.steps_per_epoch)

    @property
    def fingerprint(self) -> str:
        """Hash of what decides membership and weights (placement does not)."""
        cfg = self.config
        text = f"{cfg.batch_size}/{cfg.order}/{cfg.herding_pool}/{cfg.last_step}"
        return files.hash_arrays(
            self.plan.fingerprint, f"{text}/{cfg.seed}", self.num_labels
        )

    def members(self, epoch: int) -> np.ndarray:
        """int32 [S, B] kept entries of an epoch's steps, −1 = none."""
        return self._epoch(epoch)[0]

    def epoch_weights(self, epoch: int) -> np.ndarray:
        """float64 [S, B], u_i of `members(epoch)`."""
        return self._epoch(epoch)[1]

    def epoch(self, step: int) -> int:
        """The epoch of a step, from 0."""
        return self._locate(step)[0]

    def step(self, step: int) -> steps.Step:
        """The examples and weights of one step, in O(B) once the epoch is known."""
        epoch, row = self._locate(step)
        members_SB, weight_SB = self._epoch(epoch)
        entry = members_SB[row]
        used = int((entry >= 0).sum())
        entry = entry[:used]
        return steps.Step(
            step=step,
            epoch=epoch,
            entry=entry,
            example_id=self.plan.example_id[entry],
            cluster_id=self.plan.cluster_id[entry],
            weight=weight_SB[row, :used],
        )

    def place(
        self,
        step: int,
        num_shards: int,
        num_micro_steps: int | None = None,
        num_rows: int | None = None,
    ) -> steps.Placement:
        """Where each example of a step lies.

        Args:
          step: optimiser step.
          num_shards: R, data shards.
          num_micro_steps: A; the config's by default.
          num_rows: L; by default the least that all steps of the run fit in, so that
            all batches have one shape.

        Raises:
          errors.PlanError: the step does not fit in `num_rows`.
        """
        micro_steps = num_micro_steps or self.config.accumulation_steps
        num_rows = num_rows or self.rows_needed(num_shards, micro_steps)
        members = self.step(step)
        epoch, index = self._locate(step)
        block = self._place_block(epoch, index // _BLOCK, num_shards)
        used = slice(0, len(members.entry))
        shard, row, start = (part[index % _BLOCK, used] for part in block)
        if len(row) and int(row.max()) >= num_rows * micro_steps:
            raise errors.PlanError(
                f"step {step} needs {int(row.max()) + 1} rows on a shard;"
                f" {num_rows} rows × {micro_steps} micro-steps are too few"
            )
        return steps.Placement(
            step=members,
            length=self.length[members.entry],
            shard=shard,
            micro_step=row % micro_steps,
            row=row // micro_steps,
            start=start,
            segment=_segments(shard, row, start),
            num_shards=num_shards,
            num_micro_steps=micro_steps,
            num_rows=num_rows,
            row_length=self.row_length,
        )

    def rows_needed(self, num_shards: int, num_micro_steps: int | None = None) -> int:
        """L: rows per shard and micro-step that every step of the run fits in."""
        micro_steps = num_micro_steps or self.config.accumulation_steps
        return -(-int(self.rows_used(num_shards, micro_steps).max()) // micro_steps)

    def labels_needed(self, num_shards: int, num_micro_steps: int | None = None) -> int:
        """Most label tokens on one shard in one micro-step, over the run."""
        return int(self._all_sizes(num_shards, num_micro_steps)[1].max())

    def rows_used(
        self, num_shards: int, num_micro_steps: int | None = None
    ) -> np.ndarray:
        """int64 [steps of the run], rows in use on the fullest shard of each step."""
        return self._all_sizes(num_shards, num_micro_steps)[0]

    def _all_sizes(
        self, num_shards: int, num_micro_steps: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(rows, labels) of the fullest shard of each step; places the whole run."""
        key = num_shards, num_micro_steps or self.config.accumulation_steps
        if key not in self._sizes:
            same = self.config.order == "herded"
            epochs = range(1 if same else self.num_epochs)
            parts = [self._epoch_sizes(epoch, *key) for epoch in epochs]
            repeats = self.num_epochs if same else 1
            sizes = [np.concatenate(part * repeats) for part in zip(*parts)]
            self._sizes[key] = sizes[0][: self.num_steps], sizes[1][: self.num_steps]
        return self._sizes[key]

    def placed(
        self, epoch: int, num_shards: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(shard, row inside the shard, start) of `members(epoch)`, int32 [S, B]."""
        return self._place(self.members(epoch), num_shards)

    def where(self, example_id: int) -> list[tuple[int, int]]:
        """(epoch, step) pairs in which an example of the corpus takes part."""
        entries = np.flatnonzero(self.plan.example_id == example_id)
        found = []
        for epoch in range(self.num_epochs):
            index, _ = np.nonzero(np.isin(self.members(epoch), entries))
            found.extend((epoch, epoch * self.steps_per_epoch + i) for i in index)
        return [(epoch, int(step)) for epoch, step in found if step < self.num_steps]

    def _locate(self, step: int) -> tuple[int, int]:
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} is outside a schedule of {self.num_steps}")
        return divmod(step, self.steps_per_epoch)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        key = 0 if self.config.order == "herded" else epoch
        if key not in self._epochs:
            members_SB = self._make_members(key)
            weight_SB = weights.epoch_weights(
                members_SB,
                self.plan.cluster_id,
                self.num_labels,
                self._user_weight,
                self.plan.cluster_share,
                self.plan.weighting,
                self.plan.normalise,
            )
            self._epochs[key] = members_SB, weight_SB
            while len(self._epochs) > _EPOCHS_CACHED:
                self._epochs.popitem(last=False)
        self._epochs.move_to_end(key)
        return self._epochs[key]

    def _make_members(self, epoch: int) -> np.ndarray:
        members_SB = membership.epoch_members(
            self.plan.cluster_id,
            self.plan.quota,
            self._ids,
            self.config.batch_size,
            self.config.seed,
            epoch,
        )
        if self.config.order == "herded":
            members_SB = herded.rearrange(members_SB, self.plan)
        return members_SB[: self.steps_per_epoch]

    def _place_block(
        self, epoch: int, block: int, num_shards: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        key = (0 if self.config.order == "herded" else epoch, block, num_shards)
        if key not in self._blocks:
            members = self.members(epoch)[block * _BLOCK : (block + 1) * _BLOCK]
            self._blocks[key] = self._place(members, num_shards)
            while len(self._blocks) > _BLOCKS_CACHED:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(key)
        return self._blocks[key]

    def _place(
        self, members_SB: np.ndarray, num_shards: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(shard, row inside the shard, start), all int32 [S, B]."""
        used = members_SB >= 0
        cluster_SB = np.where(used, self.plan.cluster_id[members_SB], -1)
        length_SB = np.where(used, self.length[members_SB], 0)
        if self.config.placement == "dedicated":
            shard_SB = placement.dedicated(cluster_SB, self.plan.quota, num_shards)
        else:
            shard_SB = placement.spread(cluster_SB, length_SB, num_shards)
        if self.config.packing:
            placed = rows.best_fit(shard_SB, length_SB, num_shards, self.row_length)
        else:
            placed = rows.one_per_row(shard_SB)
        return shard_SB, *placed

    def _epoch_sizes(
        self, epoch: int, num_shards: int, num_micro_steps: int
    ) -> tuple[np.ndarray, np.ndarray]:
        members_SB = self.members(epoch)
        shard_SB, row_SB, _ = self.placed(epoch, num_shards)
        step, slot = np.nonzero(members_SB >= 0)
        micro_step = row_SB[step, slot] % num_micro_steps
        cell = step * num_shards + shard_SB[step, slot]
        cells_per_step = num_shards * num_micro_steps
        labels = np.bincount(
            cell * num_micro_steps + micro_step,
            self.num_labels[members_SB[step, slot]],
            minlength=len(members_SB) * cells_per_step,
        )
        most = labels.reshape(len(members_SB), cells_per_step).max(1)
        return row_SB.max(1) + 1, most.astype(np.int64)


def allocate(
    plan: plans.SelectionPlan,
    lengths: np.ndarray,
    num_labels: np.ndarray,
    cfg: config.AllocationConfig,
    feats: datatypes.GradientFeatures | None = None,
    herd: Callable[..., np.ndarray] | None = None,
) -> Schedule:
    """Makes the schedule of a run.

    Args:
      plan: the selection plan.
      lengths: int [N], tokens of each example of the corpus.
      num_labels: int [N], label tokens of each example of the corpus.
      cfg: allocation settings.
      feats: gradient features, for `order = herded` unless the plan holds that order.
      herd: orders the herding vectors on accelerators (`subset.herded_order`); a
        NumPy form otherwise.

    Returns:
      The schedule. With `order = herded` its `plan` holds the order: save that one.

    Raises:
      errors.PlanError: the plan does not fit the corpus or the settings.
    """
    _check(plan, num_labels, cfg)
    if cfg.order == "herded":
        plan = herded.with_order(plan, cfg, feats, herd)
    return Schedule(plan, lengths[plan.example_id], num_labels[plan.example_id], cfg)


def _check(
    plan: plans.SelectionPlan, num_labels: np.ndarray, cfg: config.AllocationConfig
) -> None:
    for name in ("batch_size", "accumulation_steps"):
        if getattr(cfg, name) < 1:
            raise errors.ConfigError(
                f"allocation.{name}={getattr(cfg, name)} is below 1"
            )
    if plan.num_kept == 0:
        raise errors.PlanError("the plan keeps no example; raise selection.ratio")
    if len(num_labels) != plan.num_corpus:
        raise errors.PlanError(
            f"the plan was made for a corpus of {plan.num_corpus:,} examples and this"
            f" one has {len(num_labels):,}; make the plan again"
        )
    expected = plan.num_labels[plan.entry]
    found = num_labels[plan.example_id]
    if (expected != found).any():
        row = int(np.argmax(expected != found))
        raise errors.PlanError(
            f"the plan belongs to other data: example {str(plan.uid[row])!r} has"
            f" {int(found[row])} label tokens and had {int(expected[row])} when the"
            " plan was made; make the plan again"
        )
    if cfg.last_step == "drop" and plan.num_kept < cfg.batch_size:
        raise errors.PlanError(
            f"allocation.batch_size={cfg.batch_size} is more than the {plan.num_kept}"
            " kept examples, and last_step='drop' would drop them all; lower it, or use"
            " last_step='pad'"
        )


def _row_length(length_M: np.ndarray, cfg: config.AllocationConfig) -> int:
    """T: the config's, or the longest example rounded up to a multiple of 8."""
    longest = int(length_M.max())
    if cfg.row_length is None:
        return -(-longest // 8) * 8
    if cfg.row_length < longest:
        raise errors.ConfigError(
            f"allocation.row_length={cfg.row_length} is less than the longest kept"
            f" example, {longest} tokens; raise it, or lower data.max_length"
        )
    return cfg.row_length


def _total_steps(steps_per_epoch: int, cfg: config.AllocationConfig) -> int:
    epochs = rational.from_decimal(cfg.num_epochs)
    if epochs <= 0:
        raise errors.ConfigError(
            f"allocation.num_epochs={cfg.num_epochs} is not above 0"
        )
    total = -int(-epochs * steps_per_epoch // 1)
    return total if cfg.max_steps is None else min(total, cfg.max_steps)


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

"""`Schedule`: every step of a run, as a look-up (METHOD §4–5)."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator

import numpy as np

from clusterjax import config, datatypes, errors, files, rational, steps
from clusterjax import plan as plans
from clusterjax.allocation import herded, layout, membership, weights

_EPOCHS_CACHED = 2


class Schedule:
    """Which examples each step holds, where they lie, and what they weigh.

    A function of (plan, seed, epoch, step, B): nothing is stored but the plan, so that
    resuming is a look-up, and a run may go on with another number of devices.

    Attributes:
      plan: the selection plan.
      config: allocation settings.
      length: int64 [M], tokens of each kept entry.
      num_labels: int64 [M], label tokens of each kept entry.
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
        layout.check_row_length(self.length, cfg)
        self.steps_per_epoch = membership.num_steps(
            plan.num_kept, cfg.batch_size, cfg.last_step
        )
        self.num_steps = _total_steps(self.steps_per_epoch, cfg)
        self._ids = plan.example_id * 1024 + plan.copy_number
        self._user_weight = plan.user_weight[plan.entry]
        self._epochs: collections.OrderedDict = collections.OrderedDict()
        self._layouts: dict[tuple[int, int], layout.Layout] = {}

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
        text += f"/{cfg.even_steps}"
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
          num_rows: L; by default the usual one of the run (see `layout.Layout`), or
            more where this part of the run needs more.

        Raises:
          errors.PlanError: the step does not fit in `num_rows`.
        """
        return self.layout(num_shards, num_micro_steps).place(step, num_rows)

    def layout(
        self, num_shards: int, num_micro_steps: int | None = None
    ) -> layout.Layout:
        """Rows, row length and label slots of all batches on `num_shards` shards."""
        key = num_shards, num_micro_steps or self.config.accumulation_steps
        if key not in self._layouts:
            self._layouts[key] = layout.Layout(self, *key)
        return self._layouts[key]

    def rows_needed(self, num_shards: int, num_micro_steps: int | None = None) -> int:
        """L: rows per shard and micro-step of the usual batch."""
        return self.layout(num_shards, num_micro_steps).num_rows

    def labels_needed(self, num_shards: int, num_micro_steps: int | None = None) -> int:
        """Most label tokens on one shard in one micro-step of the usual batch."""
        return self.layout(num_shards, num_micro_steps).num_labels

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
            self.num_labels if self.config.even_steps else None,
        )
        if self.config.order == "herded":
            members_SB = herded.rearrange(members_SB, self.plan)
        return members_SB[: self.steps_per_epoch]


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


def _total_steps(steps_per_epoch: int, cfg: config.AllocationConfig) -> int:
    epochs = rational.from_decimal(cfg.num_epochs)
    if epochs <= 0:
        raise errors.ConfigError(
            f"allocation.num_epochs={cfg.num_epochs} is not above 0"
        )
    total = -int(-epochs * steps_per_epoch // 1)
    return total if cfg.max_steps is None else min(total, cfg.max_steps)

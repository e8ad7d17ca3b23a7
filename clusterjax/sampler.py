"""The schedule for other trainers: ids and token weights, step by step.

No framework is imported. A `StepSampler` is a sequence of steps (what grain calls a
random access source) and, iterated over, a batch sampler (what torch's `DataLoader`
takes); `WeightedExamples` hands the weights on. See docs/plan.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from clusterjax import allocation, config
from clusterjax import plan as plans


class WeightedId(NamedTuple):
    """An example of a step, and what its token losses are multiplied with.

    Attributes:
      example_id: row of the corpus (of the exported data set).
      token_weight: u_i of METHOD §4; the products are summed over the whole step, all
        ranks and micro-steps, never averaged.
    """

    example_id: int
    token_weight: float


class StepSampler(Sequence):
    """Steps as lists of `WeightedId`: all of a step, or one rank's share of it.

    Guarantees:
      - Over all ranks, step s holds exactly the examples and weights that clusterjax's
        own trainer uses in step s, whatever the number of ranks.
      - A rank may have one example less than another, or none, in a step: pad it with
        examples of weight 0, never skip the step.
      - It is a look-up: `start_step` resumes.
    """

    def __init__(
        self,
        schedule: allocation.Schedule,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        start_step: int = 0,
    ):
        self._schedule = schedule
        self._rank, self._num_ranks = rank, num_ranks
        self._start = start_step

    @classmethod
    def load(
        cls,
        plan_directory: epath.PathLike,
        cfg: config.AllocationConfig,
        **options: Any,
    ) -> StepSampler:
        """The sampler of a saved plan; needs no corpus and no model.

        Membership and weights are those of clusterjax's own trainer under the same
        `cfg`. Ranks are balanced by label tokens, since the lengths are not known.

        Args:
          plan_directory: written by `SelectionPlan.save`.
          cfg: batch size, epochs, order, seed.
          **options: rank, num_ranks, start_step.
        """
        plan = plans.SelectionPlan.load(plan_directory)
        num_labels = np.ones(plan.num_corpus, np.int32)
        num_labels[plan.candidate_id] = plan.num_labels
        schedule = allocation.allocate(plan, num_labels, num_labels, cfg)
        return cls(schedule, **options)

    def __len__(self) -> int:
        """Steps from `start_step` to the end of the run."""
        return max(self._schedule.num_steps - self._start, 0)

    def __getitem__(self, index: int) -> list[WeightedId]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """This rank's examples of step `start_step + index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"step {index} of {len(self)}")
        placed = self._schedule.place(
            self._start + index, self._num_ranks, 1, num_rows=1 << 30
        )
        mine = np.flatnonzero(placed.shard == self._rank)
        return [
            WeightedId(int(i), float(u))
            for i, u in zip(placed.step.example_id[mine], placed.step.weight[mine])
        ]

    def __iter__(self) -> Iterator[list[WeightedId]]:
        return (self[index] for index in range(len(self)))


class WeightedExamples:
    """A map-style data set indexed by `WeightedId`; adds the column `token_weight`."""

    def __init__(self, examples: Any):
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, key: WeightedId) -> dict[str, Any]:
        example_id, token_weight = key
        return {**self._examples[example_id], "token_weight": token_weight}

"""How much a method takes to reach the held-out loss that full training ends at.

The target is the last loss of the `full` run with the same seed, and a margin on top.
Between two evaluations the loss is taken to fall along a line. Time counts the
selection, then the share of the training time that the steps so far are of all steps:
what a run of exactly this kind has used when it passes the target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import comparison, intervals

MARGIN = 0.01
REUSES = 3
HEADS = (
    "method",
    "seeds that reach it",
    "last loss / full",
    "steps",
    "steps / full",
    "total time / full",
    f"plan used {REUSES} times",
)


@dataclasses.dataclass(frozen=True)
class Reached:
    """When one run is as good as `full` with a margin, as shares of the full run.

    Attributes:
      step: first step at or below the target, a fraction between evaluations.
      steps: `step` over all steps of the full run.
      time: total time until then, selection included, over that of the full run.
      reused: the same when the selection is paid for by `REUSES` runs together.
    """

    step: float
    steps: float
    time: float
    reused: float


def crossing(heldout: Sequence[Mapping[str, Any]], target: float) -> float | None:
    """The first step whose loss is at most `target`; None where there is none."""
    before = None
    for point in heldout:
        if point["loss"] <= target:
            if before is None:
                return float(point["step"])
            fall = before["loss"] - point["loss"]
            share = (before["loss"] - target) / fall
            return before["step"] + share * (point["step"] - before["step"])
        before = point
    return None


def reached(row: comparison.Row, full: comparison.Row) -> Reached | None:
    """When `row` passes the target that `full` sets; None if it never does."""
    step = crossing(row.heldout, (1 + MARGIN) * full.loss)
    if step is None:
        return None
    training, selection = _seconds(row)
    training *= step / row.steps
    whole = sum(_seconds(full))
    return Reached(
        step,
        step / full.steps,
        (training + selection) / whole,
        (training + selection / REUSES) / whole,
    )


def table(result: comparison.Comparison) -> list[tuple[str, ...]]:
    """A row for each method; intervals over the seeds that reach the target."""
    rows = []
    for group in result.groups:
        full = result.reference(result.full, group.budget)
        ends = {row.seed: row for row in full.rows} if full else {}
        pairs = [(row, ends[row.seed]) for row in group.rows if row.seed in ends]
        if not pairs:
            continue
        found = [moment for pair in pairs if (moment := reached(*pair))]
        ratio = [row.loss / end.loss for row, end in pairs]
        columns = [
            intervals.interval([getattr(moment, name) for moment in found]).text(digits)
            for name, digits in (("step", 0), ("steps", 2), ("time", 2), ("reused", 2))
        ]
        rows.append(
            (
                group.title,
                f"{len(found)} of {len(pairs)}",
                intervals.interval(ratio).text(3),
                *columns,
            )
        )
    return rows


def _seconds(row: comparison.Row) -> tuple[float, float]:
    """(training, selection): processor seconds where they were counted."""
    stages = row.processor_stages or row.stages
    training = stages.get("train", 0.0)
    chosen = [stages.get(name, 0.0) for name in ("features", "cluster", "select")]
    return training, float(np.sum(chosen))

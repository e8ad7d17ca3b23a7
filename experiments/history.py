"""The lines of `metrics.jsonl` as curves over time, selection included."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_NOT_BEFORE = ("train", "answers", "report")


@dataclasses.dataclass(frozen=True)
class Point:
    """One training or held-out figure.

    Attributes:
      step: optimiser steps done.
      seconds: since the run started, the stages before training counted.
      label_tokens: label tokens trained on so far.
      loss: nats per label token (training: ℒ, the weighted loss that is minimised).
      sources: loss of each source.
      groups: held-out: loss of each ground-truth group.
      clusters: training: loss of each cluster in this step.
      exact_match: held-out: share of generated answers that are right, or None.
    """

    step: int
    seconds: float
    label_tokens: int
    loss: float
    sources: dict[str, float] = dataclasses.field(default_factory=dict)
    groups: dict[str, float] = dataclasses.field(default_factory=dict)
    clusters: dict[str, float] = dataclasses.field(default_factory=dict)
    exact_match: float | None = None

    @property
    def mean_over_sources(self) -> float:
        """Every source counts the same, whatever its size."""
        values = list(self.sources.values())
        return float(np.mean(values)) if values else self.loss


@dataclasses.dataclass(frozen=True)
class History:
    """Training and held-out loss of one run, in order of steps."""

    training: tuple[Point, ...] = ()
    heldout: tuple[Point, ...] = ()


def build(
    metrics: Sequence[Mapping[str, Any]], ledger: Sequence[Mapping[str, Any]]
) -> History:
    """Puts the trainer's lines on the clock of the whole run.

    Args:
      metrics: lines of `metrics.jsonl`, whose `time` counts from the start of training.
      ledger: `{"stage", "seconds"}`; what is done for training is added, also where it
        is done after a first epoch.
    """
    before = sum(float(e["seconds"]) for e in ledger if e["stage"] not in _NOT_BEFORE)
    lines = {kind: _by_step(metrics, kind) for kind in ("train", "eval")}
    labels = {line["step"]: int(line["labels"]) for line in lines["train"]}
    training = tuple(
        Point(
            line["step"],
            before + line["time"],
            int(line["labels"]),
            line["loss"],
            _losses(line.get("sources", {})),
            clusters=_losses(line.get("clusters", {})),
        )
        for line in lines["train"]
        if line["loss"] is not None
    )
    heldout = tuple(
        Point(
            line["step"],
            before + line["time"],
            _interpolated(labels, line["step"]),
            line["loss"],
            _losses(line.get("sources", {})),
            _losses(line.get("groups", {})),
            exact_match=line.get("exact_match"),
        )
        for line in lines["eval"]
    )
    return History(training, heldout)


def _by_step(metrics: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping]:
    lines = {int(line["step"]): line for line in metrics if line["kind"] == kind}
    return [lines[step] for step in sorted(lines)]


def _interpolated(labels: dict[int, int], step: int) -> int:
    """Label tokens at a step between two logged ones."""
    steps = [0, *sorted(labels)]
    return int(np.interp(step, steps, [0, *(labels[s] for s in steps[1:])]))


def _losses(parts: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(part["loss"]) for name, part in parts.items()}

"""Results of a comparison: rows, and one table over seeds as Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import intervals
from experiments.report import style


@dataclasses.dataclass(frozen=True)
class Row:
    """One finished run.

    Attributes:
      method, seed, budget: which trial it is.
      command: what made it.
      folder: its run folder.
      kept: examples kept (M).
      examples: examples of the corpus (N).
      kept_labels: label tokens of the kept examples.
      steps: optimiser steps.
      stages: seconds of each stage, reused ones at their first cost.
      processor_stages: the same in processor seconds of all threads.
      fingerprints: stage → hash of the settings that its result depends on.
      heldout: `history.Point`s of the evaluations, as dicts.
      exact_match: share of answers that were exactly right, or None.
      coverage: share of ground-truth groups in the kept set, or None.
      purity: of the clusters by ground-truth group, or None.
      mechanism: `mechanism.figures`, step → figures, or {}.
    """

    method: str
    seed: int
    budget: float | None
    command: str
    folder: str
    kept: int
    examples: int
    kept_labels: int
    steps: int
    stages: Mapping[str, float]
    fingerprints: Mapping[str, str]
    heldout: Sequence[Mapping[str, Any]]
    exact_match: float | None = None
    coverage: float | None = None
    purity: float | None = None
    mechanism: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    processor_stages: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Held-out loss at the end, nats per label token."""
        return float(self.heldout[-1]["loss"])

    @property
    def mean_over_sources(self) -> float:
        """Held-out loss at the end, every source counted once."""
        values = list(self.heldout[-1]["sources"].values())
        return float(np.mean(values)) if values else self.loss

    @property
    def seconds(self) -> float:
        """Total time, selection included, the report not."""
        return _without_report(self.stages)

    @property
    def processor_seconds(self) -> float | None:
        """Total processor seconds, None where a run did not count them."""
        return _without_report(self.processor_stages) or None

    @property
    def selection_seconds(self) -> float:
        """Seconds that a run without selection does not need."""
        return sum(self.stages.get(s, 0.0) for s in ("features", "cluster", "select"))

    @property
    def label_tokens(self) -> int:
        """Label tokens trained on."""
        return int(self.heldout[-1]["label_tokens"])


def _without_report(stages: Mapping[str, float]) -> float:
    return sum(seconds for stage, seconds in stages.items() if stage != "report")


@dataclasses.dataclass(frozen=True)
class Group:
    """The runs of one method at one budget, over seeds."""

    method: str
    budget: float | None
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        if self.budget is None:
            return self.method
        return f"{self.method}, {style.percent(self.budget, 0)}"

    def by_seed(self, value: Callable[[Row], float]) -> dict[int, float]:
        return {row.seed: value(row) for row in self.rows}

    def interval(self, value: Callable[[Row], float | None]) -> intervals.Interval:
        found = [value(row) for row in self.rows]
        return intervals.interval([v for v in found if v is not None])


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All rows, and the methods that paired differences are taken to."""

    rows: Sequence[Row]
    full: str = "full"
    random: str = "random"

    @property
    def groups(self) -> list[Group]:
        """In order of first appearance."""
        keys = dict.fromkeys((row.method, row.budget) for row in self.rows)
        return [
            Group(
                *key,
                tuple(r for r in self.rows if (r.method, r.budget) == key),
            )
            for key in keys
        ]

    def reference(self, method: str, budget: float | None) -> Group | None:
        """Runs of a reference method at a budget; runs without one fit every budget."""
        for group in self.groups:
            if group.method == method and group.budget in (budget, None):
                return group
        return None


HEADS = (
    "method",
    "kept",
    "label tokens kept",
    "steps",
    "held-out loss (nats)",
    "− full",
    "− random",
    "total (s)",
    "selection (s)",
    "total (processor s)",
    "mean over sources",
    "coverage",
    "purity",
    "exact match",
)
# The first columns answer "how good, for how much"; the page gives the rest apart.
MAIN_COLUMNS = 10


def table(result: Comparison) -> list[tuple[str, ...]]:
    """One row of texts for each method and budget; empty columns hold a dash."""
    return [_table_row(result, group) for group in result.groups]


def _table_row(result: Comparison, group: Group) -> tuple[str, ...]:
    first = group.rows[0]
    kept = float(np.mean([row.kept for row in group.rows]))
    loss = group.by_seed(lambda row: row.loss)
    differences = []
    for method in (result.full, result.random):
        other = result.reference(method, group.budget)
        if other is None or other is group or other.method == group.method:
            differences.append("–")
            continue
        paired = intervals.paired(loss, other.by_seed(lambda row: row.loss))
        differences.append(paired.text(sign=True))
    return (
        group.title,
        f"{kept:,.0f} ({style.percent(kept / first.examples)})",
        f"{np.mean([row.kept_labels for row in group.rows]):,.0f}",
        f"{np.mean([row.steps for row in group.rows]):,.0f}",
        intervals.interval(list(loss.values())).text(),
        *differences,
        group.interval(lambda row: row.seconds).text(0),
        group.interval(lambda row: row.selection_seconds).text(1),
        group.interval(lambda row: row.processor_seconds).text(0),
        group.interval(lambda row: row.mean_over_sources).text(),
        group.interval(lambda row: row.coverage).text(3),
        group.interval(lambda row: row.purity).text(3),
        group.interval(lambda row: row.exact_match).text(3),
    )


def caption(result: Comparison) -> str:
    """What the figures are, how many seeds, and when runs stopped."""
    seeds = sorted({row.seed for row in result.rows})
    what = (
        f"Mean ± half the 95 % t-interval over {len(seeds)} seeds; differences are"
        " paired by seed."
        if len(seeds) > 1
        else "One seed, so there is no interval."
    )
    return (
        f"{what} Held-out loss is unweighted; negative differences are better. Total"
        " time includes the selection. Every run ends after the number of passes over"
        " what it kept that its config sets; none is stopped early or chosen by its"
        " held-out loss."
    )


def markdown(result: Comparison) -> str:
    """The table as Markdown; columns without a figure are left out."""
    rows = table(result)
    used = used_columns(rows)
    lines = [
        "| " + " | ".join(HEADS[i] for i in used) + " |",
        "|" + "|".join("---" if i == 0 else "---:" for i in used) + "|",
    ]
    lines += ["| " + " | ".join(row[i] for i in used) + " |" for row in rows]
    text = "\n".join([*lines, "", caption(result)])
    return text + "\n" + _mechanism_markdown(result)


def used_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    return [i for i in range(len(HEADS)) if any(row[i] != "–" for row in rows)]


MECHANISM_HEADS = (
    "method",
    "step",
    "step noise / random steps",
    "/ random order, same set",
    "error of the mean gradient",
    "of random subsets",
    "cosine with the start",
    "noise of a plan renewed here",
    "/ random order, its set",
)
_MECHANISM: tuple[Callable[[Mapping[str, Any]], float | None], ...] = (
    lambda found: found["noise"],
    lambda found: found["order_noise"],
    lambda found: found["mean_error"],
    lambda found: found["mean_error_random"],
    lambda found: found.get("cosine"),
    lambda found: found.get("renewed", {}).get("noise"),
    lambda found: found.get("renewed", {}).get("order_noise"),
)


def mechanism_table(result: Comparison) -> list[tuple[str, ...]]:
    """Rows for the moments at which every method was measured, in order."""
    rows = []
    for group in result.groups:
        moments = {moment for row in group.rows for moment in row.mechanism}
        for moment in sorted(moments, key=int):
            found = [r.mechanism[moment] for r in group.rows if moment in r.mechanism]
            texts = []
            for value in _MECHANISM:
                values = [v for figures in found if (v := value(figures)) is not None]
                texts.append(intervals.interval(values).text(3))
            rows.append((group.title, moment, *texts))
    return rows


def _mechanism_markdown(result: Comparison) -> str:
    rows = mechanism_table(result)
    if not rows:
        return ""
    lines = [
        "",
        "| " + " | ".join(MECHANISM_HEADS) + " |",
        "|---|" + "---:|" * (len(MECHANISM_HEADS) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        "Measured on a whole-model sketch of the model at that step, whose projections"
        " are not those that chose.",
    ]
    return "\n".join(lines) + "\n"

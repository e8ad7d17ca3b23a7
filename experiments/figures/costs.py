"""What training costs, as it stands on a horizontal axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from experiments import comparison

_SELECTION = ("features", "cluster", "select")


@dataclasses.dataclass(frozen=True)
class Clock:
    """Seconds of a run, by the wall or by its processors.

    Attributes:
      unit: how the seconds are called.
      stages: run → seconds by stage.
    """

    unit: str
    stages: Callable[[comparison.Row], Mapping[str, float]]

    def total(self, row: comparison.Row) -> float:
        """Selection included, the report not."""
        return sum(s for name, s in self.stages(row).items() if name != "report")

    def selection(self, row: comparison.Row) -> float:
        """Seconds that a run without selection does not need."""
        return sum(self.stages(row).get(name, 0.0) for name in _SELECTION)

    def at(self, row: comparison.Row, point: Mapping[str, Any]) -> float:
        """Seconds until an evaluation: all that came before training, and its share.

        Training is spread evenly over its steps: an evaluation's own time on the wall
        clock also holds the moments when other work had the machine.
        """
        train = self.stages(row).get("train", 0.0)
        share = point["step"] / max(row.heldout[-1]["step"], 1)
        return self.total(row) - train * (1 - share)


WALL = Clock("seconds", lambda row: row.stages)
PROCESSOR = Clock("processor seconds", lambda row: row.processor_stages)


def clock(
    rows: list[comparison.Row], name: Literal["auto", "wall", "processor"]
) -> Clock:
    """`auto`: processor seconds where every run counted them.

    Runs may have shared the machine with other work, which costs them time on the wall
    but no processor seconds.
    """
    if name == "auto":
        counted = all(row.processor_stages for row in rows)
        return PROCESSOR if counted else WALL
    return {"wall": WALL, "processor": PROCESSOR}[name]


@dataclasses.dataclass(frozen=True)
class Cost:
    """A horizontal axis.

    Attributes:
      title, label: of the figure and of the axis.
      of: (run, evaluation) → cost until then.
    """

    title: str
    label: str
    of: Callable[[comparison.Row, Mapping[str, Any]], float]


def time(clock: Clock) -> Cost:
    """Total time by a clock."""
    label = f"Total time, selection included ({clock.unit})"
    return Cost("Quality over total time", label, clock.at)


LABEL_TOKENS = Cost(
    "Quality over label tokens",
    "Label tokens trained on",
    lambda row, point: float(point["label_tokens"]),
)

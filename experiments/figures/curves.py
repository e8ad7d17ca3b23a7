"""Held-out loss over what training costs, mean over seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib import figure, lines

from experiments import comparison, intervals
from experiments.figures import costs, style


def over(
    result: comparison.Comparison, look: style.Look, cost: costs.Cost
) -> figure.Figure | None:
    """One line for each method, with the interval of its end."""
    groups = sorted(result.groups, key=lambda g: g.interval(lambda r: r.loss).mean)
    groups = [g for g in groups if all(len(row.heldout) > 1 for row in g.rows)]
    if not groups:
        return None
    drawn = figure.Figure(figsize=(8.2, 4.4), layout="constrained")
    axis = drawn.add_subplot()
    early: list[float] = []
    reached: list[float] = []  # ends of the intervals of the last losses
    latest = 0.0
    # Grey lines first, so that coloured ones lie above.
    for group in sorted(groups, key=lambda g: g.title in look.lines):
        x, y = mean_curve(group, cost)
        colored = group.title in look.lines
        axis.plot(
            x,
            y,
            color=look.color(group),
            linewidth=1.6 if colored else 1.0,
            zorder=3 if colored else 2,
        )
        early.append(float(np.interp(x[0] + 0.35 * (x[-1] - x[0]), x, y)))
        loss = _end(axis, group, look, cost, colored)
        half = style.half_width(loss.half_width)
        reached += [loss.mean - half, loss.mean + half]
        latest = max(latest, float(x[-1]))
    low, high = min(reached), max(*early, *reached)
    axis.set_ylim(low - 0.04 * (high - low), high + 0.04 * (high - low))
    # An uncertain time must not squeeze the curves.
    axis.set_xlim(0, 1.12 * latest)
    axis.set_title(cost.title)
    axis.set_xlabel(cost.label)
    axis.set_ylabel("Held-out loss (nats per label token)")
    style.thousands(axis)
    _legend(drawn, groups, look)
    return drawn


def mean_curve(
    group: comparison.Group, cost: costs.Cost
) -> tuple[np.ndarray, np.ndarray]:
    """Mean cost and mean loss at equal shares of the way through training.

    Runs of one method may differ in their number of steps, so evaluations at the same
    step need not exist.
    """
    shares, costs, losses = [], [], []
    for row in group.rows:
        steps = np.array([point["step"] for point in row.heldout], float)
        shares.append(steps / steps[-1])
        costs.append([cost.of(row, point) for point in row.heldout])
        losses.append([point["loss"] for point in row.heldout])
    grid = np.unique(np.round(np.concatenate(shares), 6))
    x = np.mean([np.interp(grid, s, c) for s, c in zip(shares, costs)], axis=0)
    y = np.mean([np.interp(grid, s, v) for s, v in zip(shares, losses)], axis=0)
    return x, y


def _end(
    axis: Any,
    group: comparison.Group,
    look: style.Look,
    cost: costs.Cost,
    colored: bool,
) -> intervals.Interval:
    loss = group.interval(lambda row: row.loss)
    spent = intervals.interval([cost.of(row, row.heldout[-1]) for row in group.rows])
    axis.errorbar(
        spent.mean,
        loss.mean,
        xerr=style.half_width(spent.half_width),
        yerr=style.half_width(loss.half_width),
        color=look.color(group),
        marker=look.marker(group),
        markersize=6.5 if colored else 4,
        markeredgecolor="white",
        markeredgewidth=0.8,
        elinewidth=1.2,
        capsize=0,
        zorder=5 if colored else 2,
    )
    return loss


def _legend(drawn: figure.Figure, groups: list, look: style.Look) -> None:
    """Best method on top; what is grey has one entry."""

    def entry(color: str, marker: str, label: str) -> lines.Line2D:
        return lines.Line2D(
            [], [], color=color, marker=marker, markeredgecolor="white",
            markersize=7, label=label,
        )  # fmt: skip

    shown = [
        entry(
            look.color(g), look.marker(g), f"{g.interval(lambda r: r.loss)}  {g.title}"
        )
        for g in groups
        if g.title in look.lines
    ]
    rest = len(groups) - len(shown)
    if rest:
        shown.append(entry(style.OTHERS, "o", f"{rest} other methods"))
    drawn.legend(
        handles=shown,
        loc="outside right upper",
        title="Loss at the end",
        alignment="left",
    )

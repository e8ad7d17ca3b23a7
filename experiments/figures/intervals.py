"""A dot and its interval for every method: what it reached, and for how much."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib import axes, figure

from experiments import comparison
from experiments import intervals as intervals_lib
from experiments.figures import costs, style
from experiments.report import style as report_style


def methods(result: comparison.Comparison, clock: costs.Clock) -> figure.Figure:
    """Held-out loss, paired difference to random, and total time of every method."""
    groups = sorted(result.groups, key=lambda g: -g.interval(lambda r: r.loss).mean)
    random = [g for g in groups if g.method == result.random]
    height = 1.1 + style.ROW * len(groups)
    drawn = figure.Figure(figsize=(9.6, height), layout="constrained")
    count = 3 if random else 2
    panels = drawn.subplots(1, count, sharey=True, squeeze=False)[0]
    _losses(panels[0], groups)
    if random:
        _differences(panels[1], result, groups)
    _times(panels[-1], groups, clock)
    panels[0].set_yticks(range(len(groups)), [_label(group) for group in groups])
    for panel in panels:
        style.dress_rows(panel, len(groups))
    return drawn


def _label(group: comparison.Group) -> str:
    kept = np.mean([row.kept / row.examples for row in group.rows])
    return f"{group.title} ({report_style.percent(float(kept), 0)})"


def _losses(panel: axes.Axes, groups: Sequence[comparison.Group]) -> None:
    for place, group in enumerate(groups):
        values = list(group.by_seed(lambda row: row.loss).values())
        panel.plot(
            values,
            [place] * len(values),
            "|",
            color=style.MUTED,
            markersize=7,
            alpha=0.6,
            zorder=2,
        )
        style.dot(panel, place, intervals_lib.interval(values), style.INK)
    panel.set_title("Held-out loss")
    panel.set_xlabel("nats per label token")


def _differences(
    panel: axes.Axes,
    result: comparison.Comparison,
    groups: Sequence[comparison.Group],
) -> None:
    panel.axvline(0, color=style.MUTED, linewidth=0.9, zorder=1)
    for place, group in enumerate(groups):
        found = paired(result, group, lambda row: row.loss)
        # All data would need a scale on which methods of equal budget look the same.
        if found is not None and group.method != result.full:
            style.dot(panel, place, found, verdict(found))
    panel.set_title("− random, paired by seed")
    panel.set_xlabel("nats per label token (left is better)")
    style.signed(panel)


def _times(
    panel: axes.Axes, groups: Sequence[comparison.Group], clock: costs.Clock
) -> None:
    for place, group in enumerate(groups):
        total = float(np.mean([clock.total(row) for row in group.rows]))
        selection = float(np.mean([clock.selection(row) for row in group.rows]))
        panel.barh(place, total - selection, height=0.5, color=style.BAR, zorder=2)
        panel.barh(
            place,
            selection,
            left=total - selection,
            height=0.5,
            color=style.BETTER,
            zorder=2,
        )
    panel.set_xlim(left=0)
    panel.set_title("Total time")
    panel.set_xlabel(f"{clock.unit} (blue: selection)")
    style.thousands(panel)


def paired(
    result: comparison.Comparison,
    group: comparison.Group,
    value: Callable[[comparison.Row], float],
) -> intervals_lib.Interval | None:
    """Interval of the difference to random over seeds; None for random itself."""
    other = result.reference(result.random, group.budget)
    if other is None or other.method == group.method:
        return None
    found = intervals_lib.paired(group.by_seed(value), other.by_seed(value))
    return found if found.count else None


def verdict(found: intervals_lib.Interval) -> str:
    """Colour of a difference: better, worse, or not told apart from nothing."""
    if np.isnan(found.half_width) or abs(found.mean) <= found.half_width:
        return style.MUTED
    return style.BETTER if found.mean < 0 else style.WORSE

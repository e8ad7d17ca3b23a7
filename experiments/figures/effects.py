"""What a method changes source by source: one small panel for each method."""

from __future__ import annotations

import numpy as np
from matplotlib import figure

from experiments import comparison
from experiments.figures import intervals, style

_COLUMNS = 5


def sources(result: comparison.Comparison) -> figure.Figure | None:
    """Paired difference to random at the end, for every source and method."""
    names = sorted({name for row in result.rows for name in row.heldout[-1]["sources"]})
    groups = [
        group
        for group in result.groups
        if group.method != result.full
        and intervals.paired(result, group, lambda row: row.loss) is not None
    ]
    if len(names) < 2 or not groups:
        return None
    # The hardest source on top, by the mean over all runs.
    names.sort(
        key=lambda name: np.mean([_loss(row, name) for row in result.rows]),
    )
    columns = min(_COLUMNS, len(groups))
    rows = -(-len(groups) // columns)
    drawn = figure.Figure(
        figsize=(1.3 + 1.75 * columns, 0.6 + rows * (0.55 + 0.165 * len(names))),
        layout="constrained",
    )
    panels = drawn.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for panel in panels.flat[len(groups) :]:
        panel.set_visible(False)
    for panel, group in zip(panels.flat, groups):
        panel.axvline(0, color=style.MUTED, linewidth=0.9, zorder=1)
        for place, name in enumerate(names):
            found = intervals.paired(result, group, lambda row, n=name: _loss(row, n))
            assert found is not None
            panel.errorbar(
                found.mean,
                place,
                xerr=style.half_width(found.half_width),
                fmt="o",
                markersize=3.5,
                color=intervals.verdict(found),
                elinewidth=1.2,
            )
        panel.set_title(group.title, fontsize=9)
        panel.tick_params(axis="y", length=0)
        panel.spines["left"].set_visible(False)
        style.signed(panel)
    panels[0, 0].set_yticks(range(len(names)), names)
    panels[0, 0].set_ylim(-0.7, len(names) - 0.3)
    drawn.supxlabel(
        "Held-out loss − random, paired by seed (nats per label token; left is better)",
        fontsize=9,
    )
    return drawn


def _loss(row: comparison.Row, name: str) -> float:
    return float(row.heldout[-1]["sources"].get(name, np.nan))

"""Is a planned step quieter than a random one, and for how long?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib import axes, figure

from experiments import comparison, intervals
from experiments.figures import style

_Figure = Callable[[Mapping[str, Any]], float | None]
_MEASURES: Sequence[tuple[str, str, _Figure]] = (
    (
        "Noise of the planned steps",
        "ratio to random steps from all data (left is quieter)",
        lambda found: found["noise"],
    ),
    (
        "Error of the kept mean gradient",
        "ratio to random subsets as large (left is nearer)",
        lambda found: found["mean_error"] / found["mean_error_random"],
    ),
)


def start(result: comparison.Comparison) -> figure.Figure | None:
    """Both measures at the start of training, one dot for each method."""
    groups = [g for g in result.groups[::-1] if _at(g, 0, lambda found: 0.0).count]
    if not groups:
        return None
    height = 1.1 + style.ROW * len(groups)
    drawn = figure.Figure(figsize=(8.6, height), layout="constrained")
    panels = drawn.subplots(1, len(_MEASURES), sharey=True)
    for panel, (title, label, value) in zip(panels, _MEASURES):
        panel.axvline(1, color=style.MUTED, linewidth=0.9, zorder=1)
        for place, group in enumerate(groups):
            style.dot(panel, place, _at(group, 0, value), style.INK)
        panel.set_title(title)
        panel.set_xlabel(label)
        style.dress_rows(panel, len(groups))
    panels[0].set_yticks(range(len(groups)), [group.title for group in groups])
    return drawn


def during(result: comparison.Comparison, look: style.Look) -> figure.Figure | None:
    """Noise, and how far gradients have turned, at the checkpoints that were measured.

    Dashed: the noise of a plan made anew from that moment's features.
    """
    groups = [g for g in result.groups if len(_steps(g)) > 1]
    if not groups:
        return None
    drawn = figure.Figure(figsize=(9.4, 3.7), layout="constrained")
    noise, cosine = drawn.subplots(1, 2)
    noise.axhline(1, color=style.MUTED, linewidth=0.9, zorder=1)
    others = "other methods"
    for group in sorted(groups, key=lambda g: g.title in look.lines):
        colored = group.title in look.lines
        label, others = (group.title, others) if colored else (others, "")
        _line(noise, group, look, lambda found: found["noise"], label=label)
        _line(noise, group, look, _renewed, linestyle="--", markerfacecolor="white")
        _line(cosine, group, look, lambda found: found.get("cosine"))
    noise.set_title("Noise of the planned steps")
    noise.set_ylabel("ratio to random steps from all data")
    cosine.set_title("Gradients now and at the start")
    cosine.set_ylabel("mean cosine of an example's gradients")
    for panel in (noise, cosine):
        panel.set_xlabel("steps of training")
        style.thousands(panel)
    handles, labels = noise.get_legend_handles_labels()
    if any(_at(g, step, _renewed).count for g in groups for step in _steps(g)):
        dashed = style.line_sample("--", "plan made anew")
        handles, labels = [*handles, dashed], [*labels, "plan made anew"]
    drawn.legend(handles, labels, loc="outside right upper")
    return drawn


def _line(
    panel: axes.Axes,
    group: comparison.Group,
    look: style.Look,
    value: _Figure,
    **keys: Any,
) -> None:
    steps = [step for step in _steps(group) if _at(group, step, value).count]
    if not steps:
        return
    found = [_at(group, step, value) for step in steps]
    panel.errorbar(
        steps,
        [each.mean for each in found],
        yerr=[style.half_width(each.half_width) for each in found],
        color=look.color(group),
        marker=look.marker(group),
        **{"markersize": 5, "linewidth": 1.5, "elinewidth": 1.1, **keys},
    )


def _renewed(found: Mapping[str, Any]) -> float | None:
    return found.get("renewed", {}).get("noise")


def _steps(group: comparison.Group) -> list[int]:
    """Steps at which some run of the method was measured."""
    return sorted({int(step) for row in group.rows for step in row.mechanism})


def _at(group: comparison.Group, step: int, value: _Figure) -> intervals.Interval:
    measured = [r.mechanism[str(step)] for r in group.rows if str(step) in r.mechanism]
    return intervals.interval(
        [v for found in measured if (v := value(found)) is not None]
    )

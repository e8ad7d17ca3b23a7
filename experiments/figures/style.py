"""How all figures look, and how they are saved."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib import axes, figure, lines, ticker

from clusterjax import errors, files
from experiments import comparison, intervals
from experiments.report import style

INK, MUTED, RULE = style.INK, style.MUTED, style.RULE
# References are neutral, so that colours are left for what is compared with them.
_FULL, _RANDOM = "#1d2329", "#7d8790"
OTHERS = "#c9ced3"
BAR = "#b9c4cd"
ROW = 0.29  # inches
BETTER, WORSE = "#0072B2", "#D55E00"
_COLORS = tuple(color for color in style.PALETTE if color != "#4D4D4D")
_MARKERS = ("o", "^", "D", "v", "<", ">", "p", "h")
# Ink that a person with any kind of colour vision can tell from its neighbours is used
# up quickly; with more methods than this the rest of the lines is grey.
_MOST_LINES = 8
_SETTINGS: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.dpi": 100,
    "savefig.facecolor": "white",
    # Text as outlines: the same on machines with other fonts.
    "svg.fonttype": "path",
    "svg.hashsalt": "clusterjax",
}


@contextlib.contextmanager
def context() -> Iterator[None]:
    """Our settings, without a display, and back to the former ones."""
    with mpl.rc_context({"backend": "agg", **_SETTINGS}):
        yield


class Look:
    """Colour and marker of every method, the same in all figures of a comparison.

    Attributes:
      lines: titles of the groups that lines are drawn of in colour.
    """

    def __init__(self, result: comparison.Comparison, names: Sequence[str] = ()):
        groups = result.groups
        known = dict.fromkeys(group.method for group in groups)
        for name in names:
            if name not in known:
                raise errors.UserError(
                    f"no method {name!r} for a line; there are {', '.join(known)}"
                )
        self._references = {result.full: _FULL, result.random: _RANDOM}
        self.lines = self._default(result)
        if names:
            self.lines = {g.title for g in groups if g.method in names}
        drawn = [
            group.title
            for group in groups
            if group.title in self.lines and group.method not in self._references
        ]
        self._place = {title: place for place, title in enumerate(drawn)}

    def _default(self, result: comparison.Comparison) -> set[str]:
        groups = result.groups
        first = [g for g in groups if g.method in self._references][:_MOST_LINES]
        others = [g for g in groups if g not in first]
        best = sorted(others[1:], key=lambda g: g.interval(lambda r: r.loss).mean)
        return {g.title for g in [*first, *others[:1], *best][:_MOST_LINES]}

    def color(self, group: comparison.Group) -> str:
        if group.method in self._references:
            return self._references[group.method]
        place = self._place.get(group.title)
        return OTHERS if place is None else _COLORS[place % len(_COLORS)]

    def marker(self, group: comparison.Group) -> str:
        if group.method in self._references:
            return "s"
        place = self._place.get(group.title)
        return "o" if place is None else _MARKERS[place % len(_MARKERS)]


def dot(
    panel: axes.Axes,
    place: float,
    found: intervals.Interval,
    color: str,
    **keys: Any,
) -> None:
    """A mean with its interval, in row `place`."""
    usual = {"fmt": "o", "markersize": 4.5, "elinewidth": 1.6, "zorder": 3}
    panel.errorbar(
        found.mean,
        place,
        xerr=half_width(found.half_width),
        color=color,
        **{**usual, **keys},
    )


def dress_rows(panel: axes.Axes, rows: int) -> None:
    """A panel with one row for each method: no lines but the vertical ones."""
    panel.set_ylim(-0.7, rows - 0.3)
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)
    panel.grid(axis="y", visible=False)


def line_sample(dashes: Literal["-", "--"], label: str) -> lines.Line2D:
    """An entry of a legend."""
    return lines.Line2D([], [], color=MUTED, linestyle=dashes, label=label)


def half_width(value: float) -> float:
    """What an error bar can draw: 0 where there is no interval."""
    return 0.0 if np.isnan(value) else value


def thousands(axis: axes.Axes) -> None:
    """`12,000` on the horizontal axis."""
    axis.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))


def signed(axis: axes.Axes) -> None:
    """`+0.02` and `−0.02`, with a true minus."""

    def text(value: float, _: int) -> str:
        return "0" if value == 0 else f"{value:+.3g}".replace("-", "−")

    axis.xaxis.set_major_formatter(ticker.FuncFormatter(text))


def save(
    drawn: figure.Figure, path: pathlib.Path, mark: str, png: bool
) -> list[pathlib.Path]:
    """Writes PATH.svg, which names what it was drawn from, and PATH.png if wanted."""
    written = []
    for ending in ("svg", "png") if png else ("svg",):
        # No date: the same results give the same bytes.
        data = {"Date": None, "Description": mark} if ending == "svg" else None
        whole = path.with_suffix(f".{ending}")
        with tempfile.TemporaryDirectory() as folder:
            made = os.path.join(folder, whole.name)
            drawn.savefig(made, dpi=160, metadata=data, bbox_inches="tight")
            files.write_bytes(whole, pathlib.Path(made).read_bytes())
        written.append(whole)
    return written

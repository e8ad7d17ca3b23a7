"""Colours, numbers and small HTML pieces that all panels share."""

from __future__ import annotations

import html
import pathlib
from collections.abc import Iterable, Sequence

# Okabe and Ito (2008), Color Universal Design: told apart with every kind of colour
# vision. Their yellow is too pale on white; olive (Tol, 2021) stands in.
PALETTE = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#8A8A2B",
    "#4D4D4D",
)
# With more categories than colours the marker tells them apart.
MARKERS = ("circle", "triangle", "square", "diamond", "inverted_triangle", "star")
SYMBOLS = dict(zip(map(str, MARKERS), "●▲■◆▼★"))

KEPT, PRUNED = "#0072B2", "#B8B8B8"
INK, MUTED, RULE, ACCENT = "#1d2329", "#5b6670", "#dfe3e7", "#0072B2"
# Cividis at nine points (Nuñez, Anderton, Renslow, 2018): even for all colour vision.
SEQUENTIAL = (
    "#00224e",
    "#123570",
    "#3b496c",
    "#575d6d",
    "#707173",
    "#8a8678",
    "#a59c74",
    "#c3b369",
    "#e1cc55",
)
CSS = (pathlib.Path(__file__).parent / "page.css").read_text(encoding="utf-8")


def color(index: int) -> str:
    """Colour of category `index`."""
    return PALETTE[index % len(PALETTE)]


def marker(index: int) -> str:
    """Marker of category `index`: a new one each time the colours are used up."""
    return MARKERS[index // len(PALETTE) % len(MARKERS)]


def escape(text: object) -> str:
    """Text that may stand in HTML, in quotes or between tags."""
    return html.escape(str(text), quote=True)


def percent(value: float, digits: int = 1) -> str:
    """`0.314` → `31.4 %`."""
    return f"{100 * value:.{digits}f} %"


def change(value: float, digits: int = 1) -> str:
    """`-0.034` → `−3.4 %`, with a sign always."""
    return f"{100 * value:+.{digits}f} %".replace("-", "−")


def plural(count: int, noun: str) -> str:
    """`1 worker`, `4 workers`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def seconds(value: float) -> str:
    """`75.2` → `1 min 15 s`, `3.21` → `3.2 s`."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters, with an ellipsis where something was cut."""
    return text if len(text) <= limit else text[: max(limit - 1, 0)] + "…"


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numeric: Sequence[int] = (),
    raw: Sequence[int] = (),
) -> str:
    """An HTML table; `numeric` columns are right-aligned, `raw` ones are HTML."""

    def cell(tag: str, index: int, value: object) -> str:
        kind = ' class="number"' if index in numeric else ""
        text = str(value) if index in raw and tag == "td" else escape(value)
        return f"<{tag}{kind}>{text}</{tag}>"

    def line(tag: str, row: Sequence[object]) -> str:
        return "<tr>" + "".join(cell(tag, i, v) for i, v in enumerate(row)) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return (
        f'<div class="scroll"><table><thead>{line("th", heads)}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def folded_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[object]],
    most: int,
    *,
    numeric: Sequence[int] = (),
    raw: Sequence[int] = (),
) -> str:
    """The first `most` rows as a table, the others folded below."""
    text = table(heads, rows[:most], numeric=numeric, raw=raw)
    if len(rows) > most:
        rest = table(heads, rows[most:], numeric=numeric, raw=raw)
        text += f"<details><summary>{len(rows) - most} more</summary>{rest}</details>"
    return text


def stacked_bar(parts: Sequence[tuple[str, float, str]], height: int = 14) -> str:
    """A bar of coloured parts `(name, amount, colour)`, with the amounts as titles."""
    total = sum(amount for _, amount, _ in parts) or 1.0
    pieces = "".join(
        f'<span style="width:{100 * amount / total:.3f}%;background:{shade}" '
        f'title="{escape(name)}: {amount:,.6g} ({percent(amount / total)})"></span>'
        for name, amount, shade in parts
        if amount > 0
    )
    return f'<div class="stack" style="height:{height}px">{pieces}</div>'


def swatches(names: Sequence[str], shades: Sequence[str]) -> str:
    """A legend: one coloured square and name each."""
    items = "".join(
        f'<span class="key"><i style="background:{shade}"></i>{escape(name)}</span>'
        for name, shade in zip(names, shades)
    )
    return f'<p class="legend">{items}</p>'


def section(identifier: str, title: str, intro: str, body: str) -> str:
    """A titled part of the page; `intro` is one or two plain sentences."""
    lead = f'<p class="intro">{intro}</p>' if intro else ""
    return (
        f'<section id="{identifier}"><h2>{escape(title)}</h2>{lead}{body}</section>\n'
    )


def note(text: str) -> str:
    """A muted remark."""
    return f'<p class="note">{escape(text)}</p>'

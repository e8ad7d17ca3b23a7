"""Seconds by stage, selection counted."""

from __future__ import annotations

from experiments.report import record as record_lib
from experiments.report import style

# What a plain training run would not have to do.
SELECTION_STAGES = ("features", "cluster", "select")
_SHADES = {
    "data": "#8A8A2B",
    "features": "#E69F00",
    "cluster": "#CC79A7",
    "select": "#D55E00",
    "schedule": "#56B4E9",
    "train": "#0072B2",
    "report": "#4D4D4D",
}


def shade(stage: str) -> str:
    """Colour of a stage, the same in all panels."""
    return _SHADES.get(stage, "#9aa3ab")


def total_seconds(record: record_lib.RunRecord) -> float:
    """Seconds of all stages."""
    return sum(float(line["seconds"]) for line in record.ledger)


def selection_seconds(record: record_lib.RunRecord) -> float:
    """Seconds of the stages that a run without selection does not have."""
    return sum(
        float(line["seconds"])
        for line in record.ledger
        if line["stage"] in SELECTION_STAGES
    )


def panel(record: record_lib.RunRecord) -> str:
    """A bar and a table."""
    total = total_seconds(record)
    parts = [
        (line["stage"], float(line["seconds"]), shade(line["stage"]))
        for line in record.ledger
    ]
    rows = [
        (
            f'<i style="background:{shade(line["stage"])};display:inline-block;'
            'width:11px;height:11px;border-radius:2px;margin-right:7px"></i>'
            + style.escape(line["stage"]),
            f"{float(line['seconds']):,.1f}",
            style.percent(float(line["seconds"]) / (total or 1.0)),
            line.get("detail", ""),
        )
        for line in record.ledger
    ]
    rows.append(("<b>total</b>", f"{total:,.1f}", "", ""))
    text = style.stacked_bar(parts, height=26) + style.table(
        ("stage", "seconds", "of total", "what it did"), rows, numeric=(1, 2), raw=(0,)
    )
    return text + _training_parts(record)


def _training_parts(record: record_lib.RunRecord) -> str:
    """What the seconds of training went into."""
    seconds = record.summary.get("train_seconds_by_part", {})
    if not seconds:
        return ""
    total = sum(seconds.values()) or 1.0
    parts = ", ".join(
        f"{name} {value:,.1f} s ({style.percent(value / total, 0)})"
        for name, value in sorted(seconds.items(), key=lambda item: -item[1])
    )
    return style.note(f"Training by part: {parts}.")

"""What a benchmark leaves: tables of numbers, and how they were measured, as JSON.

A benchmark calls `write` at its end; documentation shows the tables through
`experiments.doc_tables`, so a number in a page is the number in the file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from clusterjax import errors, files
from experiments import machine, rounding

KIND = "benchmark"
PACKAGES = ("jax", "jaxlib", "flax", "numpy")


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of numbers and texts.

    Attributes:
      name: by which documentation asks for it.
      heads: of the columns.
      rows: one value for each column; a number, a text, or None (shown as a dash).
      digits: after the decimal point, column by column; () = three significant ones.
    """

    name: str
    heads: Sequence[str]
    rows: Sequence[Sequence[float | int | str | None]]
    digits: Sequence[int | None] = ()

    def texts(self) -> list[tuple[str, ...]]:
        """The cells as they are shown."""
        digits = [*self.digits, *[None] * (len(self.heads) - len(self.digits))]
        return [tuple(map(_text, row, digits)) for row in self.rows]


def median(values: Sequence[float]) -> float:
    """What a repeated timing is told by; `spread` tells how far it went."""
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """`0.98–1.04`: the smallest and the largest value, three significant digits."""
    return f"{_text(min(values), None)}–{_text(max(values), None)}"


def figures_table(
    name: str, found: Mapping[str, Any], labels: Mapping[str, str]
) -> Table:
    """Two columns, what and how much, for the figures that `labels` gives a name."""
    rows = [(label, found[key]) for key, label in labels.items()]
    return Table(name, ("measure", "value"), rows)


def write(
    path: str | os.PathLike[str],
    subject: str,
    tables: Sequence[Table],
    *,
    details: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
) -> None:
    """Writes the record of a benchmark.

    Args:
      path: JSON file.
      subject: name of the benchmark, as in `python -m experiments.bench SUBJECT`.
      tables: what documentation shows.
      details: every measurement, for those who want to look closer.
      versions: of the peers, which may run under another Python.
    """
    value = {
        "kind": KIND,
        "subject": subject,
        "command": command(subject, sys.argv[1:]),
        "machine": machine.describe(),
        "versions": machine.versions(PACKAGES) | dict(versions or {}),
        # Other work that shared the machine shows here.
        "load": round(os.getloadavg()[2], 1),
        "tables": [dataclasses.asdict(table) for table in tables],
        "details": details or {},
    }
    files.write_text(path, text_of(value))


def text_of(value: Mapping[str, Any]) -> str:
    """JSON, one line for each row of a table and for each measurement."""
    tables = ",\n".join("  " + _table_text(table) for table in value["tables"])
    parts = [
        f" {json.dumps(key)}: {json.dumps(rounding.rounded(item), ensure_ascii=False)}"
        for key, item in value.items()
        if key not in ("tables", "details")
    ]
    details = ",\n".join(
        f"  {json.dumps(key)}: {json.dumps(rounding.rounded(item), ensure_ascii=False)}"
        for key, item in value["details"].items()
    )
    parts.append(f' "tables": [\n{tables}\n ]')
    parts.append(f' "details": {{\n{details}\n }}' if details else ' "details": {}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _table_text(table: Mapping[str, Any]) -> str:
    head = {key: item for key, item in table.items() if key != "rows"}
    rows = ",\n    ".join(
        json.dumps(rounding.rounded(row), ensure_ascii=False) for row in table["rows"]
    )
    start = json.dumps(rounding.rounded(head), ensure_ascii=False)[:-1]
    return f'{start}, "rows": [\n    {rows}\n  ]}}'


def command(subject: str, arguments: Sequence[str]) -> str:
    """The command without folders of this machine: only the last part of a path."""
    words = [f"python -m experiments.bench {subject}"]
    for argument in arguments:
        name, equals, text = argument.rpartition("=")
        short = pathlib.PurePath(text).name if text.startswith("/") else text
        # Where a Python lies says nothing; that it is the peers' own does.
        words.append(f"{name}{equals}{short or text}")
    return " ".join(words)


def table(value: Mapping[str, Any], name: str) -> Table:
    """A table of a saved record.

    Raises:
      errors.UserError: the record has no such table.
    """
    for fields in value["tables"]:
        if fields["name"] == name:
            return Table(**fields)
    names = ", ".join(fields["name"] for fields in value["tables"])
    raise errors.UserError(f"no table {name!r}; there are {names}, made")


def _text(value: Any, digits: int | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if digits is not None:
        text = f"{value:,.{digits}f}"
    elif isinstance(value, int) or abs(value) >= 100:
        text = f"{value:,.0f}"
    else:
        # Three significant digits without an exponent for usual sizes.
        text = f"{value:#.3g}".rstrip(".")
    return text.replace("-", "−") if value < 0 else text

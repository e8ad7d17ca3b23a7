"""What every source yields: rows of columns, or the cause why there are none."""

from __future__ import annotations

from typing import Any, NamedTuple


class Row(NamedTuple):
    """One row of a source.

    Attributes:
      index: row in the source, from 0 (in text files: the line minus one).
      columns: name → value, or None when the row can't be read.
      cause: why not, one sentence; '' otherwise.
      reason: short machine-readable kind of the cause.
    """

    index: int
    columns: dict[str, Any] | None
    cause: str = ""
    reason: str = ""


class RowError(Exception):
    """A row that can't become an example: short `reason`, `detail` for people."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason, self.detail = reason, detail

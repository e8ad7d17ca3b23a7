"""What every source yields: rows of columns, or the cause why there are none."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


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


def plain(value: Any) -> Any:
    """Columnar value → JSON-like value: bytes to text, arrays to lists.

    TFDS gives a sequence of records as a dict of lists: it becomes a list of dicts.

    Raises:
      UnicodeDecodeError: bytes that are not UTF-8.
    """
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, np.ndarray):
        return plain(value.item()) if value.ndim == 0 else [plain(v) for v in value]
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        columns = {name: plain(item) for name, item in value.items()}
        lists = [v for v in columns.values() if isinstance(v, list)]
        if columns and len(lists) == len(columns) and len({len(v) for v in lists}) == 1:
            return [dict(zip(columns, items)) for items in zip(*columns.values())]
        return columns
    return value

"""JSON lines with a weight column."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from etils import epath

from clusterjax import files


def write(records: Iterable[dict[str, Any]], path: epath.PathLike) -> int:
    """Writes one line for each record; returns their number."""
    count = 0

    def write_lines(temporary: epath.Path) -> None:
        nonlocal count
        with temporary.open("w") as file:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                count += 1

    files.write_with(path, write_lines)
    return count

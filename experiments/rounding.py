"""Numbers of result files, short enough to read and to compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SIGNIFICANT = 6


def rounded(value: Any) -> Any:
    """A JSON value whose floats have six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{_SIGNIFICANT}g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value

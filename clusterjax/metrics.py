"""`metrics.jsonl`: one JSON object a line, consistent over restarts.

Every line has `step` (optimiser steps done) and `kind` (`train` or `eval`). A run that
resumes at step s first drops the lines of later steps, so that each step stands there
once, however often the run was killed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from etils import epath

from clusterjax import files


class Log:
    """Appends lines to `metrics.jsonl`, from the first process only.

    Attributes:
      history: all lines so far, those of earlier starts included.
    """

    def __init__(self, path: epath.PathLike, last_step: int, tensorboard: str = ""):
        """Opens the file and drops lines after `last_step` (−1: all of them).

        Args:
          path: of `metrics.jsonl`; a line cut short by a crash is dropped as well.
          last_step: step of the checkpoint that the run goes on from.
          tensorboard: directory of TensorBoard events, '' for none.
        """
        self._path = epath.Path(path)
        self._writes = jax.process_index() == 0
        before = _read(self._path)
        self.history = [line for line in before if line["step"] <= last_step]
        if self._writes:
            text = "".join(_to_line(line) for line in self.history)
            files.write_text(self._path, text)
        self._events = _open_events(tensorboard, last_step) if self._writes else None

    def write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Appends one line and flushes it."""
        line = {"step": step, "kind": kind, **values}
        self.history.append(json.loads(_to_line(line)))
        if not self._writes:
            return
        with self._path.open("a") as file:
            file.write(_to_line(line))
        if self._events is not None:
            for name, value in _scalars(values):
                self._events.add_scalar(f"{kind}/{name}", value, step)
            self._events.flush()

    def sync(self) -> None:
        """Forces the lines to disk, so that they outlive what is saved next."""
        if self._writes and os.path.exists(self._path):
            with open(self._path, "rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        """Closes the TensorBoard events."""
        if self._events is not None:
            self._events.close()


def _open_events(directory: str, last_step: int) -> Any:
    if not directory:
        return None
    import tensorboardX

    # TensorBoard hides what an earlier start wrote after the step we go on from.
    return tensorboardX.SummaryWriter(directory, purge_step=last_step + 1)


def _read(path: epath.Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    result = []
    for text in path.read_text().splitlines():
        try:
            result.append(json.loads(text))
        except ValueError:
            break  # cut short by a crash; all whole lines come before it
    return result


def _to_line(line: dict[str, Any]) -> str:
    return json.dumps(_plain(line)) + "\n"


def _plain(value: Any) -> Any:
    """Plain JSON: numbers that JSON does not know become null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _scalars(
    values: dict[str, Any], prefix: str = ""
) -> Iterable[tuple[str, float | int]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + name, value

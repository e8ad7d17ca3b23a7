"""`metrics.jsonl`: one JSON object a line, consistent over restarts.

Every line has `step` (optimiser steps done) and `kind` (`train` or `eval`). A run that
resumes at step s first drops the lines of later steps, so that each step stands there
once, however often the run was killed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from etils import epath

from clusterjax import errors, files


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


@dataclasses.dataclass
class Totals:
    """Sums on the host, saved with every checkpoint, so that no window is lost.

    Attributes:
      tokens, labels: trained so far.
      skipped: steps whose update was left out.
      window_*: sums since the last line.
    """

    tokens: int = 0
    labels: int = 0
    skipped: int = 0
    window_steps: int = 0
    window_loss: float = 0.0
    window_nll: float = 0.0
    window_labels: int = 0

    def add(self, tokens: int, labels: int, loss: float, nll_sum: float) -> None:
        """Adds one step: its tokens, label tokens, ℒ and Σ ℓ."""
        self.tokens += tokens
        self.labels += labels
        self.window_steps += 1
        self.window_loss += loss
        self.window_nll += nll_sum
        self.window_labels += labels

    def window(self) -> dict[str, float]:
        """Means since the last line; starts a new window."""
        result = {
            "loss": self.window_loss / self.window_steps,
            "token_loss": self.window_nll / max(self.window_labels, 1),
        }
        self.window_steps, self.window_labels = 0, 0
        self.window_loss, self.window_nll = 0.0, 0.0
        return result

    def so_far(self) -> dict[str, int]:
        """Sums since step 0."""
        return {"tokens": self.tokens, "labels": self.labels, "skipped": self.skipped}


class Profile:
    """A trace of some steps, for TensorBoard or Perfetto, under `profile/`."""

    def __init__(self, steps: str, folder: epath.Path):
        """Args:
        steps: `first:last`, counted from 1, both included; '' for none.
        folder: the run folder.

        Raises:
          errors.ConfigError: `steps` has another form.
        """
        self._first = self._last = 0
        self._folder = folder / "profile"
        self._running = False
        if steps:
            first, colon, last = steps.partition(":")
            if not (colon and first.isdigit() and last.isdigit()):
                raise errors.ConfigError(
                    f"report.profile_steps={steps!r}; expected FIRST:LAST, as in 10:15"
                )
            self._first, self._last = int(first), int(last)

    def before(self, step: int) -> None:
        """Starts the trace when its first step comes."""
        if self._first and self._first <= step <= self._last and not self._running:
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def after(self, step: int, state: Any) -> None:
        """Ends it when the last step is done."""
        if self._running and step >= self._last:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """Ends a trace that is still open."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False


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

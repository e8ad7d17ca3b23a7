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
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from etils import epath

from clusterjax import errors, files


class Log:
    """Appends lines to `metrics.jsonl`, from the first process only.

    Nothing is kept in memory. Object storage can't append: there the file grows on
    local disk and is uploaded whole with every `sync`.
    """

    def __init__(self, path: epath.PathLike, last_step: int, tensorboard: str = ""):
        """Opens the file and drops lines after `last_step` (−1: all of them).

        Args:
          path: of `metrics.jsonl`; a line cut short by a crash is dropped as well.
          last_step: step of the checkpoint that the run goes on from.
          tensorboard: directory of TensorBoard events, '' for none.
        """
        self._target = epath.Path(path)
        self._writes = jax.process_index() == 0
        self._local, self._spool = self._target, None
        self._events = None
        if not self._writes:
            return
        if not files.is_local(path):
            self._spool = tempfile.TemporaryDirectory(prefix="clusterjax-metrics-")
            self._local = epath.Path(self._spool.name) / "metrics.jsonl"
        files.write_with(
            self._local, lambda new: _copy_lines(self._target, new, last_step)
        )
        self._events = _open_events(tensorboard, last_step)

    def write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Appends one line and flushes it."""
        if not self._writes:
            return
        with self._local.open("a") as file:
            file.write(_to_line({"step": step, "kind": kind, **values}))
        if self._events is not None:
            for name, value in _scalars(values):
                self._events.add_scalar(f"{kind}/{name}", value, step)
            self._events.flush()

    def sync(self) -> None:
        """Forces the lines to disk, so that they outlive what is saved next."""
        if not self._writes:
            return
        if self._spool is not None:
            files.write_bytes(self._target, self._local.read_bytes())
            return
        with open(self._local, "rb") as file:
            os.fsync(file.fileno())

    def close(self) -> None:
        """Uploads what is left; closes the TensorBoard events."""
        if self._spool is not None:
            self.sync()
            self._spool.cleanup()
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


def read(path: epath.PathLike) -> list[dict[str, Any]]:
    """All whole lines of `metrics.jsonl`, [] without the file."""
    return list(_lines(epath.Path(path)))


def _lines(path: epath.Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("r") as file:
        for text in file:
            try:
                yield json.loads(text)
            except ValueError:
                return  # cut short by a crash; all whole lines come before it


def _copy_lines(old: epath.Path, new: epath.Path, last_step: int) -> None:
    with new.open("w") as file:
        for line in _lines(old):
            if line["step"] <= last_step:
                file.write(_to_line(line))


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

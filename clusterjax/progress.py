"""Progress for people: a bar with rate and remaining time, plain lines without a tty.

with progress.track("features", total=3000, unit="examples") as advance:
    for batch in batches:
        ...
        advance(len(batch))
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import jax
import rich.console
import rich.progress

_console = rich.console.Console(stderr=False, highlight=False, soft_wrap=True)

PLAIN_EVERY_SECONDS = 10.0


def say(text: str) -> None:
    """Prints one line, from the first process only."""
    if jax.process_index() == 0:
        _console.print(text, markup=False)
        sys.stdout.flush()


@contextlib.contextmanager
def track(name: str, total: int, unit: str = "") -> Iterator[Callable[[int], None]]:
    """Shows progress of `total` units of work; yields `advance(count)`."""
    if jax.process_index() != 0:
        yield lambda count: None
    elif _console.is_terminal:
        with _bar(name, total, unit) as advance:
            yield advance
    else:
        yield _PlainLines(name, total, unit).advance


@contextlib.contextmanager
def _bar(name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    columns = (
        rich.progress.TextColumn("  {task.description}"),
        rich.progress.BarColumn(bar_width=30),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn(unit + " {task.fields[rate]}"),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=_console, transient=True) as bar:
        task = bar.add_task(name, total=total, rate="")
        begin, done = time.monotonic(), 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            rate = done / max(time.monotonic() - begin, 1e-9)
            bar.update(task, advance=count, rate=f"{rate:,.1f}/s")

        yield advance


class _PlainLines:
    """A line now and then, for logs and pipes."""

    def __init__(self, name: str, total: int, unit: str):
        self._name, self._total, self._unit = name, total, unit
        self._done = 0
        self._begin = self._last = time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._last < PLAIN_EVERY_SECONDS:
            return
        self._last = now
        rate = self._done / (now - self._begin)
        left = (self._total - self._done) / max(rate, 1e-9)
        say(
            f"  {self._name}: {self._done:,}/{self._total:,} {self._unit}"
            f" ({rate:,.1f}/s, {left:,.0f} s left)"
        )

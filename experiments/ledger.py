"""Wall and processor seconds by stage, selection included, kept over restarts."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import jax
from etils import epath

from clusterjax import files, progress


@dataclasses.dataclass
class Entry:
    """One stage, all starts together.

    Attributes:
      stage: its name.
      seconds: by the clock on the wall.
      detail: for people.
      processor_seconds: of all threads of the first process; what a shared machine's
        other work does not change.
    """

    stage: str
    seconds: float
    detail: str = ""
    processor_seconds: float = 0.0


class Ledger:
    """The seconds of a run, read from and written to `ledger.json`."""

    def __init__(self, folder: epath.PathLike):
        self._path = epath.Path(folder) / "ledger.json"
        self.entries: list[Entry] = []
        # Of the stages that are open: what stages inside them took.
        self._inside: list[tuple[float, float]] = []
        if self._path.exists():
            self.entries = [Entry(**item) for item in files.read_json(self._path)]

    @property
    def total(self) -> float:
        """Seconds of all stages so far."""
        return sum(entry.seconds for entry in self.entries)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Entry]:
        """Times a stage, prints its line and adds it to what it took before.

        A stage inside another one (features that are renewed while training) counts as
        itself only.
        """
        entry = Entry(name, 0.0)
        begin, busy = time.monotonic(), time.process_time()
        self._inside.append((0.0, 0.0))
        try:
            yield entry
        finally:  # the seconds of a stage that failed were spent all the same
            seconds, spent = time.monotonic() - begin, time.process_time() - busy
            others, others_spent = self._inside.pop()
            if self._inside:
                before, before_spent = self._inside[-1]
                self._inside[-1] = before + seconds, before_spent + spent
            self.add(name, seconds - others, entry.detail, spent - others_spent)

    def add(
        self, name: str, seconds: float, detail: str = "", processor_seconds: float = 0
    ) -> None:
        """Adds seconds to a stage; a later detail replaces an earlier one."""
        found = next((e for e in self.entries if e.stage == name), None)
        if found is None:
            found = Entry(name, 0.0)
            self.entries.append(found)
        found.seconds += seconds
        found.processor_seconds += processor_seconds
        found.detail = detail or found.detail
        if jax.process_index() == 0:
            files.write_json(self._path, [dataclasses.asdict(e) for e in self.entries])
        progress.say(f"{name:<10} {seconds:7.1f} s  {detail}")

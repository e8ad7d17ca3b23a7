"""One run per folder on object storage, which has no locks that die with a process.

The owner rewrites `.lease` with its name and a counter every few seconds. Who finds a
lease watches it: if it moves, the folder is in use; if not, its owner is gone. No
clocks are compared, so hosts may disagree about the time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator

from etils import epath

from clusterjax import errors, files, progress

RENEW_SECONDS = 10.0
# A renewal may be late by slow storage: two in a row must be missing.
WATCH_SECONDS = 2.5 * RENEW_SECONDS


@contextlib.contextmanager
def held(folder: epath.Path) -> Iterator[None]:
    """Holds the lease of a run folder until the block ends.

    Raises:
      errors.WorkdirError: another run holds it.
    """
    path = folder / ".lease"
    _wait_for_old(path)
    name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
    _write(path, name, 0)
    # Of two that start at once the later writer stays, and the earlier one sees it.
    time.sleep(RENEW_SECONDS / 10)
    if (found := _read(path)) and found[0] != name:
        raise _in_use(path, found[0])
    stop = threading.Event()
    thread = threading.Thread(
        target=_renew, args=(path, name, stop), name="lease", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        path.unlink(missing_ok=True)


def _wait_for_old(path: epath.Path) -> None:
    before = _read(path)
    if before is None:
        return
    progress.say(f"  {path} was left by {before[0]}: watching whether it still runs")
    deadline = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline:
        time.sleep(RENEW_SECONDS / 10)
        now = _read(path)
        if now is None:
            return
        if now != before:
            raise _in_use(path, now[0])


def _renew(path: epath.Path, name: str, stop: threading.Event) -> None:
    count = 0
    while not stop.wait(RENEW_SECONDS):
        count += 1
        # Storage that fails for a moment must not end a run that needs it only later.
        with contextlib.suppress(OSError):
            _write(path, name, count)


def _write(path: epath.Path, name: str, count: int) -> None:
    path.write_text(f"{name}\n{count}\n")


def _read(path: epath.Path) -> tuple[str, ...] | None:
    try:
        return tuple(path.read_text().splitlines()) or None
    except FileNotFoundError:
        return None


def _in_use(path: epath.Path, owner: str) -> errors.WorkdirError:
    return errors.WorkdirError(
        f"--workdir {files.absolute(path.parent)} is in use by another run ({owner});"
        " wait for it, stop it, or choose another folder"
    )

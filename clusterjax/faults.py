"""Faults on purpose, for tests of survival: named points, one of which may strike.

    CLUSTERJAX_FAULT=train.step:7           kill -9 at the 7th step
    CLUSTERJAX_FAULT=checkpoint.writing:2@30  30 ms after the 2nd save has begun
    CLUSTERJAX_FAULT=train.step:7:TERM      another signal

Without the variable a point costs one dictionary look-up.
"""

from __future__ import annotations

import collections
import os
import re
import signal
import threading

VARIABLE = "CLUSTERJAX_FAULT"

_counts: collections.Counter[str] = collections.Counter()


def point(name: str) -> None:
    """A place where the process may be made to fail."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    found = re.fullmatch(r"([\w.]+):(\d+)(?:@(\d+))?(?::(\w+))?", wanted)
    if not found:
        raise ValueError(f"{VARIABLE}={wanted!r}: expected name:count[@ms][:SIGNAL]")
    where, count, delay_ms, kind = found.groups()
    _counts[name] += 1
    if name != where or _counts[name] != int(count):
        return
    number = signal.Signals[f"SIG{kind or 'KILL'}"]
    if delay_ms is None:
        os.kill(os.getpid(), number)
    else:
        timer = threading.Timer(int(delay_ms) / 1e3, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()

"""Which machine and which versions a figure was measured with; no names of hosts."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import re
from collections.abc import Sequence
from typing import Any


def describe() -> dict[str, Any]:
    """Processor model, cores that this process may use, memory (GiB), system."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory),
        "system": platform.system(),
    }


def versions(names: Sequence[str]) -> dict[str, str]:
    """Python's version and those of the packages in `names` that are installed."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def sentence(machine: dict[str, Any], packages: dict[str, str]) -> str:
    """`2 cores of Intel Xeon, 23 GiB, Linux; python 3.11.7, jax 0.10.2`."""
    cores = machine["cores"]
    text = (
        f"{cores} core{'' if cores == 1 else 's'} of {machine['processor']},"
        f" {machine['memory_gib']} GiB, {machine['system']}"
    )
    if packages:
        text += "; " + ", ".join(f"{name} {v}" for name, v in packages.items())
    return text


def _processor() -> str:
    path = pathlib.Path("/proc/cpuinfo")
    if path.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()

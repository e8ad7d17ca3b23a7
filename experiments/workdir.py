"""The run folder: one config, one process at a time, readable by people.

config.json  environment.json  ledger.json  metrics.jsonl  summary.json  report.html
data/  features/  plan/  checkpoints/  model/
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath

from clusterjax import config as config_lib
from clusterjax import errors, files, progress
from experiments import hosts, lease

RESULT_FREE_GROUPS = ("perf", "report", "stages", "mesh")
_PACKAGES = (
    "clusterjax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "tokenizers",
)


@contextlib.contextmanager
def opened(
    path: epath.PathLike, config: config_lib.Config, *, overwrite: bool = False
) -> Iterator[epath.Path]:
    """A run folder that is ours until the block ends.

    Args:
      path: the folder; made when missing.
      config: the run's config, written to `config.json`.
      overwrite: move a folder of another config to `<path>.old-<time>` first.

    Raises:
      errors.WorkdirError: the folder can't be written, another process works in it, or
        it holds a run with another config (the keys that differ are named).
    """
    folder = files.absolute(path)
    if overwrite and jax.process_index() == 0 and _differences(folder, config):
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        old = folder.parent / f"{folder.name}.old-{stamp}"
        folder.rename(old)
        progress.say(f"moved the earlier run to {old}")
    hosts.require_same_config(config)  # all processes meet here, after the move
    _check_writable(folder)
    with _locked(folder):
        _check_config(folder, config)
        if jax.process_index() == 0:
            files.write_json(folder / "config.json", dataclasses.asdict(config))
            _write_environment(folder)
        yield folder


def _check_writable(folder: epath.Path) -> None:
    probe = folder / f".writable-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise errors.WorkdirError(
            f"--workdir {folder} can't be written ({error.strerror or error}); choose a"
            " folder that you may write to"
        ) from error


@contextlib.contextmanager
def _locked(folder: epath.Path) -> Iterator[None]:
    if jax.process_index() != 0:
        yield
        return
    if not files.is_local(folder):
        with lease.held(folder):
            yield
        return
    # The kernel drops this lock when the process ends, however it ends.
    with open(folder / ".lock", "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise errors.WorkdirError(
                f"--workdir {folder} is in use by another run (process {owner}); wait"
                " for it, stop it, or choose another folder"
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _plain(config: config_lib.Config) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict) and tree:
        parts = [_flat(v, f"{prefix}{k}.") for k, v in tree.items()]
        return {k: v for part in parts for k, v in part.items()}
    return {prefix.rstrip("."): tree}


def _differences(folder: epath.Path, config: config_lib.Config) -> list[str]:
    """Lines `key: there → here` of the result-changing keys that differ."""
    path = folder / "config.json"
    if not path.exists():
        return []
    # What an earlier version had no key for, it did as the key's default does.
    there = _flat(_plain(config_lib.Config())) | _flat(files.read_json(path))
    here = _flat(_plain(config))
    return [
        f"{name}: {there.get(name)!r} there, {here.get(name)!r} now"
        for name in sorted(there | here)
        if there.get(name) != here.get(name)
        and name.split(".")[0] not in RESULT_FREE_GROUPS
    ]


def _check_config(folder: epath.Path, config: config_lib.Config) -> None:
    different = _differences(folder, config)
    if different:
        shown = "; ".join(different[:5])
        more = f" (and {len(different) - 5} more)" if len(different) > 5 else ""
        raise errors.WorkdirError(
            f"--workdir {folder} holds a run with another config: {shown}{more}. Choose"
            " another folder, or move that run away with --overwrite"
        )


def _write_environment(folder: epath.Path) -> None:
    files.write_json(
        folder / "environment.json",
        {
            "command": sys.argv,
            "time": datetime.datetime.now().astimezone().isoformat(),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpu_count": os.cpu_count(),
            "versions": {name: _version(name) for name in _PACKAGES},
            "git": _git_revision(),
            "devices": [str(device) for device in jax.devices()],
            "processes": jax.process_count(),
        },
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    here = os.path.dirname(os.path.abspath(__file__))
    command = ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None

"""Whole files or none: written under a temporary name, then renamed.

Paths go through `etils.epath`, so a workdir may lie on local disk or object storage.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from etils import epath

from clusterjax import faults


def write_bytes(path: epath.PathLike, content: bytes) -> None:
    """Writes `content` to `path`; a reader sees the old file or the whole new one."""
    write_with(path, lambda temporary: temporary.write_bytes(content))


def write_text(path: epath.PathLike, text: str) -> None:
    """Writes UTF-8 text atomically."""
    write_bytes(path, text.encode())


def write_json(path: epath.PathLike, value: Any) -> None:
    """Writes indented JSON atomically; NumPy numbers and arrays become plain ones."""
    write_text(path, json.dumps(value, indent=2, default=_plain) + "\n")


def write_with(path: epath.PathLike, write: Callable[[epath.Path], Any]) -> None:
    """Calls `write(temporary path)`, flushes to disk, and renames to `path`."""
    path = epath.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        write(temporary)
        # A rename may reach the disk before the data does: force the data first.
        if os.path.exists(temporary):
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
        faults.point("files.write")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def absolute(path: epath.PathLike) -> epath.Path:
    """The path from the root (Orbax takes no other); remote paths stay as they are."""
    name = os.fspath(path)
    return epath.Path(os.path.abspath(name) if is_local(name) else name)


def is_local(path: epath.PathLike) -> bool:
    """Whether a path lies in the file system, not on object storage (`gs://…`)."""
    return "://" not in os.fspath(path)


@contextlib.contextmanager
def local_folder(path: epath.PathLike) -> Iterator[epath.Path]:
    """A local folder to fill; on object storage it is uploaded when the block ends."""
    if is_local(path):
        yield epath.Path(path)
        return
    target = epath.Path(path)
    with tempfile.TemporaryDirectory(prefix="clusterjax-upload-") as name:
        yield epath.Path(name)
        for root, _, names in os.walk(name):
            for item in names:
                source = os.path.join(root, item)
                goal = target / os.path.relpath(source, name)
                goal.parent.mkdir(parents=True, exist_ok=True)
                epath.Path(source).copy(goal, overwrite=True)


def read_json(path: epath.PathLike) -> Any:
    """Reads a JSON file."""
    return json.loads(epath.Path(path).read_text())


def hash_arrays(*values: np.ndarray | str | bytes) -> str:
    """24 hex digits of a blake2b hash over arrays (shape, dtype, bytes) and texts."""
    digest = hashlib.blake2b(digest_size=12)
    for value in values:
        if isinstance(value, np.ndarray):
            digest.update(f"{value.shape}{value.dtype.str}".encode())
            digest.update(np.ascontiguousarray(value).view(np.uint8).data)
        else:
            content = value.encode() if isinstance(value, str) else value
            digest.update(f"{len(content)}:".encode() + content)
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")

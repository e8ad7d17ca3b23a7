"""A stand-in for object storage: `gs://…` paths that lie in a folder.

It knows what `etils.epath` asks of a backend and refuses what object storage refuses
(appending). Orbax takes its own way for `gs://` (no renames, commit files); only its
TensorStore driver, which would call Google, is replaced by that for files.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

from etils.epath import backend as backends
from etils.epath import gpath
from orbax.checkpoint._src.path import gcs_utils

_LOCAL = backends.os_backend


class Backend(backends.Backend):
    """`gs://bucket/a` is `<root>/bucket/a`.

    Attributes:
      root: the folder.
      opened: (path, mode) of every file opened.
    """

    def __init__(self, root: pathlib.Path):
        self.root = root
        self.opened: list[tuple[str, str]] = []

    def local(self, path: Any) -> str:
        """Where a path really lies."""
        name = os.fspath(path)
        if not name.startswith("gs://"):
            return name
        return os.path.join(self.root, name.removeprefix("gs://"))

    def _remote(self, name: Any) -> str:
        return "gs://" + os.path.relpath(os.fspath(name), self.root)

    def open(self, path, mode):
        self.opened.append((os.fspath(path), mode))
        if "a" in mode:
            raise NotImplementedError(f"{path}: objects can't be appended to")
        if "w" in mode:  # folders come and go with their objects
            os.makedirs(os.path.dirname(self.local(path)), exist_ok=True)
        return _LOCAL.open(self.local(path), mode)

    def exists(self, path):
        return _LOCAL.exists(self.local(path))

    def isdir(self, path):
        return _LOCAL.isdir(self.local(path))

    def listdir(self, path):
        return _LOCAL.listdir(self.local(path))

    def glob(self, path):
        return [self._remote(name) for name in _LOCAL.glob(self.local(path))]

    def walk(self, top, *, top_down=True, on_error=None):
        for folder, folders, names in os.walk(self.local(top), topdown=top_down):
            yield self._remote(folder), folders, names

    def makedirs(self, path, *, exist_ok=False, mode=None):
        _LOCAL.makedirs(self.local(path), exist_ok=exist_ok)

    def mkdir(self, path, *, exist_ok=False, mode=None):
        _LOCAL.mkdir(self.local(path), exist_ok=exist_ok)

    def rmtree(self, path):
        _LOCAL.rmtree(self.local(path))

    def remove(self, path):
        _LOCAL.remove(self.local(path))

    def rename(self, path, dst):
        _LOCAL.rename(self.local(path), self.local(dst))

    def replace(self, path, dst):
        _LOCAL.replace(self.local(path), self.local(dst))

    def copy(self, path, dst, overwrite):
        os.makedirs(os.path.dirname(self.local(dst)), exist_ok=True)
        _LOCAL.copy(self.local(path), self.local(dst), overwrite=overwrite)

    def stat(self, path):
        return _LOCAL.stat(self.local(path))


def install(monkeypatch: Any, root: pathlib.Path) -> Backend:
    """Lets `gs://` paths lie in `root` until the test ends."""
    backend = Backend(root)
    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", backend)
    monkeypatch.setattr(gpath, "_GCS_BACKENDS", frozenset({backend}))
    monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)
    monkeypatch.setattr(
        gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False
    )
    monkeypatch.setattr(
        gcs_utils,
        "get_kvstore_for_gcs",
        lambda path: {"driver": "file", "path": backend.local(path)},
    )
    return backend

"""A corpus on disk: one .npy file per array, written as a stream, read by mapping."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from clusterjax import datatypes, files

META = "meta.json"
REJECTS = "rejects.jsonl"
_UID_BLOCK = 65536

# Array of the corpus → type on disk.
_STREAMS = {
    "tokens": np.int32,
    "label_mask": np.bool_,
    "num_labels": np.int32,
    "user_weight": np.float32,
    "source_id": np.int32,
    "group": np.int32,
    "row": np.int64,
}


class NpyStream:
    """A .npy file that grows; its header is completed by `finish`."""

    def __init__(self, path: pathlib.Path, dtype: Any, columns: int | None = None):
        """`columns`: width of a two-dimensional array, None for one dimension."""
        self._dtype = np.dtype(dtype)
        self._columns = () if columns is None else (columns,)
        self._file = open(path, "wb")  # noqa: SIM115 (closed by `close`)
        self._count = 0
        self._header()

    def append(self, values: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(values, self._dtype).data)
        self._count += len(values)

    def finish(self) -> None:
        self._file.seek(0)
        self._header()
        self.close()

    def close(self) -> None:
        self._file.close()

    def _header(self) -> None:
        # NumPy leaves room for a longer first axis, so the length does not change.
        np.lib.format.write_array_header_1_0(
            self._file,
            {
                "descr": np.lib.format.dtype_to_descr(self._dtype),
                "fortran_order": False,
                "shape": (self._count, *self._columns),
            },
        )


@dataclasses.dataclass
class Block:
    """Arrays of some consecutive examples, under the names of `datatypes.Corpus`.

    Attributes:
      lengths: int64 [n].
      arrays: name → array, as listed in `_STREAMS`.
      content_hash: uint64 [n, 2].
      text_hash: uint32 [n], of the text before tokenising; ends the uid.
      origin: int32 [n], index of the configured source; begins the uid.
    """

    lengths: np.ndarray
    arrays: dict[str, np.ndarray]
    content_hash: np.ndarray
    text_hash: np.ndarray
    origin: np.ndarray


class Writer:
    """Writes the arrays of a corpus into a folder, block by block.

    A context manager: files that `finish` did not complete are closed at its end.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._streams = {
            name: NpyStream(folder / f"{name}.npy", dtype)
            for name, dtype in _STREAMS.items()
        }
        self._streams["offsets"] = NpyStream(folder / "offsets.npy", np.int64)
        self._streams["offsets"].append(np.zeros(1, np.int64))
        hashes = NpyStream(folder / "content_hash.npy", np.uint64, columns=2)
        self._streams["content_hash"] = hashes
        self._end = 0
        self._uid_parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        for stream in self._streams.values():
            stream.close()

    def append(self, block: Block) -> None:
        for name, values in block.arrays.items():
            self._streams[name].append(values)
        ends = self._end + np.cumsum(block.lengths)
        self._streams["offsets"].append(ends)
        self._end = int(ends[-1])
        self._streams["content_hash"].append(block.content_hash)
        self._uid_parts.append((block.origin, block.arrays["row"], block.text_hash))

    def finish(self, origins: list[str]) -> None:
        """Completes all files.

        Args:
          origins: names of the configured sources, with which uids begin.
        """
        for stream in self._streams.values():
            stream.finish()
        parts = [np.concatenate(part) for part in zip(*self._uid_parts)]
        _write_uids(self._folder / "uid.npy", origins, *parts)


def _write_uids(
    path: pathlib.Path,
    origins: list[str],
    origin: np.ndarray,
    row: np.ndarray,
    text_hash: np.ndarray,
) -> None:
    """Writes `source:row:hash` of every example as one array of texts."""
    digits = len(str(int(row.max(initial=0))))
    width = max(map(len, origins)) + digits + len("::") + 8
    stream = NpyStream(path, f"U{width}")
    for begin in range(0, len(row), _UID_BLOCK):
        part = slice(begin, begin + _UID_BLOCK)
        texts = [
            f"{origins[o]}:{r}:{h:08x}"
            for o, r, h in zip(
                origin[part].tolist(), row[part].tolist(), text_hash[part].tolist()
            )
        ]
        stream.append(np.array(texts, f"U{width}"))
    stream.finish()


def finish(
    folder: pathlib.Path, meta: dict[str, Any], rejects: list[datatypes.Reject]
) -> None:
    """Writes the facts and the rejects; the folder is whole after this."""
    lines = (json.dumps(dataclasses.asdict(reject)) + "\n" for reject in rejects)
    with open(folder / REJECTS, "w", encoding="utf8") as file:
        file.writelines(lines)
    text = json.dumps(meta)
    (folder / META).write_text(text, encoding="utf8")


def is_whole(folder: pathlib.Path) -> bool:
    """Whether `folder` holds a corpus whose files have the sizes that they should."""
    try:
        meta = files.read_json(folder / META)
        sizes = meta["sizes"]
        return all((folder / name).stat().st_size == sizes[name] for name in sizes)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def sizes(folder: pathlib.Path) -> dict[str, int]:
    """Name of every array file → bytes."""
    return {path.name: path.stat().st_size for path in sorted(folder.glob("*.npy"))}


def open_corpus(folder: pathlib.Path) -> tuple[datatypes.Corpus, dict[str, Any]]:
    """(the corpus of a folder with its arrays mapped, its facts)."""
    meta = files.read_json(folder / META)
    with open(folder / REJECTS, encoding="utf8") as file:
        rejects = tuple(datatypes.Reject(**json.loads(line)) for line in file)
    names = (*_STREAMS, "offsets", "content_hash", "uid")
    arrays = {name: _map(folder / f"{name}.npy") for name in names}
    # Read whole by every stage, and small.
    for name in ("offsets", "num_labels", "user_weight", "source_id", "row"):
        arrays[name] = np.array(arrays[name])
    group = np.array(arrays.pop("group"))
    corpus = datatypes.Corpus(
        **arrays,
        source_names=tuple(meta["source_names"]),
        group=group if meta["group_names"] else None,
        group_names=tuple(meta["group_names"]),
        fingerprint=meta["fingerprint"],
        rejects=rejects,
        num_read=meta["num_read"],
    )
    return corpus, meta


def _map(path: pathlib.Path) -> np.ndarray:
    # A plain array over the mapping: subclasses of ndarray surprise.
    return np.asarray(np.load(path, mmap_mode="r"))


def make_once(
    root: pathlib.Path, key: str, make: Callable[[pathlib.Path], None]
) -> pathlib.Path:
    """`root/key`, made by `make(folder)` when it is not there whole.

    Guarantees: the folder appears by one rename; of several processes one makes it
    while the others wait; a damaged folder is made again.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = root / key
    with _locked(root / f".{key}.lock"):
        if is_whole(final):
            return final
        for left in (final, *root.glob(f".{key}.*.unfinished")):
            shutil.rmtree(left, ignore_errors=True)
        unfinished = root / f".{key}.{uuid.uuid4().hex[:8]}.unfinished"
        unfinished.mkdir()
        try:
            make(unfinished)
            _flush(unfinished)
            os.replace(unfinished, final)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return final


def _flush(folder: pathlib.Path) -> None:
    """Forces the files to disk: a rename may get there before what it renames."""
    if folder.is_relative_to(tempfile.gettempdir()):
        return  # does not outlive the machine
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

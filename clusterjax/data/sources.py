"""Where examples come from: files, built-in sets, TFDS, the hub; one row at a time."""

from __future__ import annotations

import abc
import dataclasses
import glob
import gzip
import hashlib
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import IO, Any

from etils import epath

from clusterjax import config as config_lib
from clusterjax import errors
from clusterjax.data import json_files, rows

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
SUFFIXES = (*JSON_SUFFIXES, ".parquet")


class Source(abc.ABC):
    """Rows of one entry of `data.sources`.

    Attributes:
      config: the entry.
      name: its name in ids and reports.
      problems: (file, cause) of files without a row, known once `read` has ended.
      num_blank_lines: blank lines met by `read`; they are no rows.
      has_more: whether rows beyond `config.max_examples` were left unread.
    """

    def __init__(self, config: config_lib.SourceConfig, name: str):
        self.config, self.name = config, name
        self.problems: list[tuple[str, str]] = []
        self.num_blank_lines = 0
        self.has_more = False

    @abc.abstractmethod
    def read(self) -> Iterator[rows.Row]:
        """All rows in order; `index` counts over all files of the source."""

    @abc.abstractmethod
    def digests(self) -> dict[str, str]:
        """Name of each file → hash of its bytes."""

    @abc.abstractmethod
    def place(self, index: int) -> str:
        """Where row `index` lies, for people: file and line. Needs a `read` so far."""

    def describe_parts(self) -> list[dict[str, Any]]:
        """Files and the rows at which they begin, for the report."""
        return []


@dataclasses.dataclass
class FilePart:
    """One file of a source, and the rows that it holds.

    Attributes:
      path: the file.
      first_row: row in the source at which it begins; set while reading.
    """

    path: epath.Path
    first_row: int = 0


class Files(Source):
    """JSON lines, JSON arrays or Parquet files, in the order of their names."""

    def __init__(
        self,
        config: config_lib.SourceConfig,
        name: str,
        paths: list[epath.Path],
        max_line_bytes: int,
    ):
        super().__init__(config, name)
        self.parts = [FilePart(path) for path in paths]
        self._max_line_bytes = max_line_bytes

    def read(self) -> Iterator[rows.Row]:
        first = 0
        self.problems.clear()
        self.num_blank_lines = 0
        for part in self.parts:
            part.first_row, index, blank = first, -1, self.num_blank_lines
            for row in self._read_file(part.path):
                index = row.index
                yield row._replace(index=first + index)
            if index < 0:
                cause = "is empty" if not _size(part.path) else "holds no rows"
                self.problems.append((os.fspath(part.path), cause))
            first += index + 1 + self.num_blank_lines - blank

    def _read_file(self, path: epath.Path) -> Iterator[rows.Row]:
        try:
            with path.open("rb") as file:
                if path.suffix == ".parquet":
                    from clusterjax.data import parquet_files

                    yield from parquet_files.read(file, os.fspath(path))
                else:
                    stream: Any = file
                    if path.suffix == ".gz":
                        stream = gzip.GzipFile(fileobj=file)
                    yield from json_files.read(
                        stream, os.fspath(path), self._max_line_bytes, self._blank
                    )
        except (OSError, EOFError, zlib.error) as error:
            raise errors.DataError(f"{path} can't be read: {error}") from error

    def _blank(self) -> None:
        self.num_blank_lines += 1

    def digests(self) -> dict[str, str]:
        return {os.fspath(p.path): file_digest(p.path) for p in self.parts}

    def describe_parts(self) -> list[dict[str, Any]]:
        return [
            {"path": os.fspath(part.path), "first_row": part.first_row}
            for part in self.parts
        ]

    def place(self, index: int) -> str:
        part = next(p for p in reversed(self.parts) if p.first_row <= index)
        if part.path.suffix == ".parquet":
            return f"{part.path} row {index - part.first_row}"
        return f"{part.path} line {index - part.first_row + 1}"


def open_all(
    sources: tuple[config_lib.SourceConfig, ...],
    config: config_lib.DataConfig,
    key: str,
) -> list[Source]:
    """Opens every source; nothing but names and sizes is read yet.

    Args:
      sources: `config.sources` or `config.eval_sources`.
      config: line limit and the folder of built-in sets.
      key: name of the config key, for errors.

    Raises:
      errors.ConfigError: two sources of one name, or an empty path.
      errors.DataError: a path that leads nowhere or to something unknown.
    """
    opened = [_open(source, config, f"{key}[{i}]") for i, source in enumerate(sources)]
    names = [source.name for source in opened]
    for name in names:
        if names.count(name) > 1:
            first, second = [i for i, n in enumerate(names) if n == name][:2]
            raise errors.ConfigError(
                f"{key}[{first}] and {key}[{second}] are both named {name!r}; set"
                f" {key}[{second}].name, since example ids begin with it"
            )
    return opened


def _open(
    source: config_lib.SourceConfig, config: config_lib.DataConfig, key: str
) -> Source:
    if not source.path:
        raise errors.ConfigError(f"{key}.path is empty; give a file, glob or set name")
    kind, _, rest = source.path.partition(":")
    if kind in ("builtin", "tfds"):
        from clusterjax.data import tfds_sets

        if kind == "builtin":
            return tfds_sets.open_builtin(source, rest, config.builtin_dir, key)
        return tfds_sets.open_registered(source, rest, key)
    if kind == "hub":
        from clusterjax.data import hub

        return hub.open_named(source, rest, key)
    path = epath.Path(os.path.expanduser(source.path))
    if path.is_dir():
        return _open_directory(source, path, key)
    paths = _matches(path, key)
    return Files(source, source.name or _stem(path), paths, config.max_line_bytes)


def _open_directory(
    source: config_lib.SourceConfig, path: epath.Path, key: str
) -> Source:
    if (path / "dataset_info.json").exists() and (path / "features.json").exists():
        from clusterjax.data import tfds_sets

        return tfds_sets.open_directory(source, path, key)
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        from clusterjax.data import hub

        return hub.open_directory(source, path, key)
    inside = sorted(p.name for p in path.iterdir())
    found = sorted({_suffix(epath.Path(name)) for name in inside} & set(SUFFIXES))
    hint = f"; to read its files say {source.path}/*{found[0]}" if found else ""
    raise errors.DataError(
        f"{key}.path={source.path} is a directory, but neither a TFDS builder"
        " (dataset_info.json and features.json) nor a saved Hugging Face data set"
        f" (state.json or dataset_dict.json){hint}"
    )


def _matches(path: epath.Path, key: str) -> list[epath.Path]:
    pattern = os.fspath(path)
    if path.exists():
        found = [path]
    elif glob.has_magic(pattern):
        parts = pattern.split("/")
        magic = next(i for i, part in enumerate(parts) if glob.has_magic(part))
        root = epath.Path("/".join(parts[:magic]) or ("/" if magic else "."))
        found = sorted(p for p in root.glob("/".join(parts[magic:])) if p.is_file())
    else:
        found = []
    if not found:
        kind = "matches no file" if glob.has_magic(pattern) else "does not exist"
        raise errors.DataError(f"{key}.path={pattern} {kind}")
    for file in found:
        if _suffix(file) not in SUFFIXES:
            raise errors.DataError(
                f"{key}.path: {file} has the suffix {_suffix(file) or 'none'!r};"
                f" expected {', '.join(SUFFIXES)} (JSON also as .gz)"
            )
    return found


def _suffix(path: epath.Path) -> str:
    suffixes = path.suffixes
    if suffixes[-1:] == [".gz"] and suffixes[-2:-1] and suffixes[-2] in JSON_SUFFIXES:
        return suffixes[-2]
    return path.suffix


def _stem(path: epath.Path) -> str:
    """The file's name without suffix; of a glob the nearest part without a wildcard."""
    name = path.name.removesuffix(".gz")
    stem = os.path.splitext(name)[0]
    if not glob.has_magic(stem):
        return stem
    fixed = [part for part in path.parts[:-1] if not glob.has_magic(part)]
    return fixed[-1] if fixed and fixed[-1] != "/" else "files"


def _size(path: epath.Path) -> int:
    return path.stat().length


def user_cache() -> pathlib.Path:
    """The folder of this user and machine for what can be made again."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(root) / "clusterjax"


def file_digest(path: epath.Path) -> str:
    """24 hex digits of the SHA-256 of a file's bytes."""
    try:
        with path.open("rb") as file:
            return digest_of(file)
    except OSError as error:
        raise errors.DataError(f"{path} can't be read: {error}") from error


def digest_of(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()[:24]

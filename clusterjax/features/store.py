"""Where features are kept: blocks of examples, found again by content.

A store is a directory for one (model, settings); each block is one immutable file
with the features of some examples, written whole or not at all. An example is found
by the hash of its content, so a corpus that grew by 1,000 rows costs 1,000 features,
and a pass that was killed goes on behind the last whole block.

    magic (8 bytes) · header length (8) · header JSON · keys, norm, loss, unit rows
    (each aligned to 64 bytes) · BLAKE2b digest of everything before (32 bytes)

Blocks are read through memory maps where the path is local.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
from collections.abc import Iterable, Iterator
from typing import IO

import numpy as np
from etils import epath

from clusterjax import errors, files, progress

_MAGIC = b"CJXFEAT1"
_DIGEST_BYTES = 32
_ALIGNMENT = 64
_SUFFIX = ".features"


@dataclasses.dataclass(frozen=True)
class Block:
    """Features of some examples.

    Attributes:
      key: uint64 [n, 2], content hashes.
      norm: float32 [n], raw length; NaN where the feature is not finite.
      loss: float32 [n].
      unit_ND: float32 or float16 [n, D], unit rows; may be memory-mapped.
      name: of the file, '' in memory.
    """

    key: np.ndarray
    norm: np.ndarray
    loss: np.ndarray
    unit_ND: np.ndarray
    name: str = ""


class MemoryStore:
    """Blocks in memory: nothing is kept when the process ends."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._places: dict[tuple[int, int], tuple[int, int]] = {}

    def write(self, block: Block) -> None:
        """Adds a block."""
        self._add(block)

    def find(self, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(block [N], row [N]) of every key uint64 [N, 2]; −1 where it is missing."""
        missing = (-1, -1)
        places = [self._places.get(k, missing) for k in _tuples(key)]
        found = np.array(places, np.int64).reshape(-1, 2)
        return found[:, 0], found[:, 1]

    def scalars(self, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(norm [N], loss [N]) of every key, NaN where it is missing."""
        block, row = self.find(key)
        norm = np.full(len(key), np.nan, np.float32)
        loss = np.full(len(key), np.nan, np.float32)
        for i, chosen in _groups(block):
            norm[chosen] = self.blocks[i].norm[row[chosen]]
            loss[chosen] = self.blocks[i].loss[row[chosen]]
        return norm, loss

    def parts(self, key: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (places in `key`, unit rows float32) block by block.

        Raises:
          KeyError: a key is missing.
        """
        block, row = self.find(key)
        if np.any(block < 0):
            raise KeyError(f"{int(np.sum(block < 0)):,} examples are not in the store")
        for i, chosen in _groups(block):
            unit_ND = self._unit_rows(self.blocks[i])[row[chosen]]
            yield chosen, np.asarray(unit_ND, np.float32)

    def _unit_rows(self, block: Block) -> np.ndarray:
        return block.unit_ND

    def _add(self, block: Block) -> None:
        number = len(self.blocks)
        self.blocks.append(block)
        for row, key in enumerate(_tuples(block.key)):
            self._places[key] = (number, row)


class Store(MemoryStore):
    """Blocks in files of one directory.

    Opening reads every block and checks its digest. A block that is damaged is set
    aside under another name, with a line that says so; its examples count as missing.
    """

    def __init__(
        self, directory: epath.PathLike, width: int, dtype: str = "float32"
    ) -> None:
        """Opens or makes a store.

        Args:
          directory: local or remote folder, for one (model, settings).
          width: D.
          dtype: float32 or float16, of the unit rows on disk.
        """
        super().__init__()
        self.directory = epath.Path(directory)
        self.width = width
        self.dtype = np.dtype(dtype)
        self.damaged: list[str] = []
        self.directory.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        self.refresh()

    def refresh(self) -> None:
        """Looks for blocks that other processes have written since."""
        known = {block.name for block in self.blocks}
        for path in sorted(self.directory.iterdir()):
            if path.name in known or not path.name.endswith(_SUFFIX):
                continue
            try:
                block = read_block(path)
            except errors.DataError as error:
                self.damaged.append(path.name)
                path.rename(path.parent / (path.name + ".damaged"))
                progress.say(f"  {error}; set aside, its examples are computed again")
                continue
            if block.unit_ND.shape[1] != self.width:
                raise errors.DataError(
                    f"{path} holds features of width {block.unit_ND.shape[1]};"
                    f" expected {self.width}. Choose another features.store_dir."
                )
            self._add(block)

    def write(self, block: Block) -> None:
        """Writes a block; its name is the hash of its keys."""
        name = files.hash_arrays(block.key) + _SUFFIX
        path = self.directory / name
        unit_ND = np.ascontiguousarray(block.unit_ND, self.dtype)
        temporary = self.directory / f".{name}.{socket.gethostname()}.{os.getpid()}.tmp"
        with open_new(temporary) as file:
            digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
            for part in _serialised(block, unit_ND):
                digest.update(part)
                file.write(part)
            file.write(digest.digest())
            file.flush()
            if files.is_local(temporary):
                os.fsync(file.fileno())
        temporary.replace(path)
        self._add(read_block(path, check=False))

    def _unit_rows(self, block: Block) -> np.ndarray:
        # A mapping of its own for every use, so that its pages are let go afterwards.
        return read_block(self.directory / block.name, check=False).unit_ND

    def _remove_leftovers(self) -> None:
        """Deletes what processes of this machine left when they were killed."""
        host = socket.gethostname()
        for path in self.directory.iterdir():
            if not path.name.endswith(".tmp"):
                continue
            owner, _, pid = path.name.removesuffix(".tmp").rpartition(".")
            if owner.endswith("." + host) and pid.isdigit() and not _alive(int(pid)):
                path.unlink(missing_ok=True)


def read_block(path: epath.PathLike, check: bool = True) -> Block:
    """Reads a block file; its unit rows stay on disk where the path is local.

    Args:
      path: the file.
      check: compare the digest (reads the whole file once).

    Raises:
      errors.DataError: the file is not a whole, undamaged block.
    """
    path = epath.Path(path)
    if check and not _is_whole(_content(path)):
        raise errors.DataError(f"{path} is damaged: its digest does not match")
    # Mapped anew: the pages that the check has read need not stay resident.
    content = _content(path)
    start = 16 + int(content[8:16].view("<u8")[0])
    header = json.loads(bytes(content[16:start]))
    offset, arrays = start, {}
    for name, dtype, shape in header["arrays"]:
        offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
        length = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays[name] = content[offset : offset + length].view(dtype).reshape(shape)
        offset += length
    return Block(
        key=np.array(arrays["key"]),
        norm=np.array(arrays["norm"]),
        loss=np.array(arrays["loss"]),
        unit_ND=arrays["unit"],
        name=path.name,
    )


def assemble(
    store: MemoryStore, key: np.ndarray, width: int, path: epath.PathLike | None
) -> np.ndarray:
    """Unit rows of `key` in order, float32 [n, D].

    Args:
      store: holds every key.
      key: uint64 [n, 2].
      width: D.
      path: a local .npy file to put the rows in, and to map; None: memory.
    """
    if path is None:
        values_ND = np.empty((len(key), width), np.float32)
        for chosen, unit_ND in store.parts(key):
            values_ND[chosen] = unit_ND
        return values_ND

    def write(temporary: epath.Path) -> None:
        shape = (len(key), width)
        create_rows(temporary, shape)
        for chosen, unit_ND in store.parts(key):
            # Mapped anew for every block: pages of the last need not stay resident.
            rows_ND = np.lib.format.open_memmap(temporary, mode="r+")
            rows_ND[chosen] = unit_ND
            del rows_ND

    files.write_with(path, write)
    return np.load(path, mmap_mode="r")


def create_rows(path: epath.PathLike, shape: tuple[int, int]) -> None:
    """Makes an empty float32 .npy file of this shape."""
    np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape).flush()


def open_new(path: epath.Path) -> IO[bytes]:
    """Opens a file to write."""
    return path.open("wb")


def _serialised(block: Block, unit_ND: np.ndarray) -> Iterator[bytes | memoryview]:
    arrays = {
        "key": np.ascontiguousarray(block.key, np.uint64),
        "norm": np.ascontiguousarray(block.norm, np.float32),
        "loss": np.ascontiguousarray(block.loss, np.float32),
        "unit": unit_ND,
    }
    header = json.dumps(
        {"arrays": [[n, a.dtype.str, list(a.shape)] for n, a in arrays.items()]}
    ).encode()
    yield _MAGIC + len(header).to_bytes(8, "little") + header
    offset = 16 + len(header)
    for array in arrays.values():
        yield bytes(-offset % _ALIGNMENT)
        offset += -offset % _ALIGNMENT
        yield memoryview(array.reshape(-1).view(np.uint8))
        offset += array.nbytes


def _content(path: epath.Path) -> np.ndarray:
    """The bytes of a file, memory-mapped where it is local."""
    if not files.is_local(path):
        return np.frombuffer(path.read_bytes(), np.uint8)
    if not os.path.getsize(path):
        return np.zeros(0, np.uint8)
    return np.memmap(path, np.uint8, "r")


def _is_whole(content: np.ndarray) -> bool:
    if len(content) < 16 + _DIGEST_BYTES or bytes(content[:8]) != _MAGIC:
        return False
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    end = len(content) - _DIGEST_BYTES
    for begin in range(0, end, 1 << 24):
        digest.update(content[begin : min(begin + (1 << 24), end)].data)
    return digest.digest() == bytes(content[end:])


def _tuples(key: np.ndarray) -> Iterable[tuple[int, int]]:
    return map(tuple, np.asarray(key, np.uint64).tolist())


def _groups(block: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (number, places that have it) for every number from 0, ascending."""
    order = np.argsort(block, kind="stable")
    cuts = np.flatnonzero(np.diff(block[order])) + 1
    for places in np.split(order, cuts):
        if len(places) and block[places[0]] >= 0:
            yield int(block[places[0]]), places


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True

"""The feature store: whole blocks, found by content, damage detected."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from clusterjax import errors
from clusterjax.features import store


def block(rng, count=20, width=6, first=0):
    unit = rng.normal(size=(count, width)).astype(np.float32)
    key = np.stack([np.arange(first, first + count), np.full(count, 7)], axis=1)
    return store.Block(
        key.astype(np.uint64),
        rng.uniform(size=count).astype(np.float32),
        rng.uniform(size=count).astype(np.float32),
        unit / np.linalg.norm(unit, axis=1, keepdims=True),
    )


def test_round_trip_in_any_order(tmp_path, rng):
    first, second = block(rng), block(rng, 5, first=100)
    found = store.Store(tmp_path, 6)
    found.write(first)
    found.write(second)
    again = store.Store(tmp_path, 6)
    key = np.array([[102, 7], [3, 7], [3, 7], [0, 7]], np.uint64)
    expected = np.stack(
        [second.unit_ND[2], first.unit_ND[3], first.unit_ND[3], first.unit_ND[0]]
    )
    np.testing.assert_array_equal(store.assemble(again, key, 6, None), expected)
    mapped = store.assemble(again, key, 6, tmp_path / "values.npy")
    assert isinstance(mapped, np.memmap)
    np.testing.assert_array_equal(mapped, expected)
    norm, _ = again.scalars(np.array([[1, 7], [1, 8]], np.uint64))
    assert norm[0] == first.norm[1]
    assert np.isnan(norm[1])
    assert again.find(np.array([[1, 8]], np.uint64))[0].tolist() == [-1]
    with pytest.raises(KeyError, match="1 examples"):
        store.assemble(again, np.array([[1, 8]], np.uint64), 6, None)


def test_half_precision_on_disk(tmp_path, rng):
    original = block(rng, 50, 64)
    found = store.Store(tmp_path, 64, "float16")
    found.write(original)
    assert store.read_block(tmp_path / found.blocks[0].name).unit_ND.itemsize == 2
    values = store.assemble(found, original.key, 64, None)
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, original.unit_ND, atol=3e-4)


def test_every_flipped_byte_is_detected(tmp_path, rng):
    found = store.Store(tmp_path, 2)
    found.write(block(rng, 2, 2))
    path = tmp_path / found.blocks[0].name
    content = path.read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        with pytest.raises(errors.DataError, match="damaged"):
            store.read_block(path)
    for length in (0, 5, 20, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(errors.DataError, match="damaged"):
            store.read_block(path)


def test_damaged_block_is_named_and_set_aside(tmp_path, rng, capsys):
    found = store.Store(tmp_path, 6)
    found.write(block(rng))
    found.write(block(rng, first=50))
    name = found.blocks[0].name
    content = bytearray((tmp_path / name).read_bytes())
    content[300] ^= 1
    (tmp_path / name).write_bytes(content)
    again = store.Store(tmp_path, 6)
    assert again.damaged == [name]
    assert name in capsys.readouterr().out
    assert len(again.blocks) == 1
    assert (tmp_path / (name + ".damaged")).exists()


@pytest.fixture
def bucket(monkeypatch):
    """Object storage in memory, behind the library that remote paths go through."""
    pytest.importorskip("fsspec")
    from etils.epath import backend
    from fsspec.implementations import memory

    class Objects(memory.MemoryFileSystem):
        protocol = ("gs", "gcs")
        cachable = False
        store, pseudo_dirs = {}, [""]

        @classmethod
        def _strip_protocol(cls, path):
            return "/" + str(path).removeprefix("gs://").strip("/")

    objects = Objects()
    monkeypatch.setattr(
        type(backend.fsspec_backend), "_get_filesystem", lambda self, name: objects
    )
    return objects


def test_remote_store_is_the_same_store(tmp_path, rng, bucket, capsys):
    blocks = [block(rng), block(rng, 5, first=100)]
    local, remote = store.Store(tmp_path, 6), store.Store("gs://bucket/features", 6)
    for each in blocks:
        local.write(each)
        remote.write(each)
    # The same bytes under the same names, and nothing left over.
    found = {path.rsplit("/", 1)[1]: bucket.cat(path) for path in bucket.store}
    assert found == contents(tmp_path)
    again = store.Store("gs://bucket/features", 6)
    key = np.array([[102, 7], [3, 7]], np.uint64)
    values = store.assemble(again, key, 6, None)
    expected = np.stack([blocks[1].unit_ND[2], blocks[0].unit_ND[3]])
    np.testing.assert_array_equal(values, expected)
    # A flipped byte is found there as well, and the block is set aside.
    name = again.blocks[0].name
    path = f"/bucket/features/{name}"
    content = bytearray(bucket.cat(path))
    content[-40] ^= 1
    bucket.pipe(path, bytes(content))
    damaged = store.Store("gs://bucket/features", 6)
    assert damaged.damaged == [name]
    assert len(damaged.blocks) == 1
    assert bucket.exists(path + ".damaged") and not bucket.exists(path)
    assert name in capsys.readouterr().out


def test_other_width_is_refused(tmp_path, rng):
    store.Store(tmp_path, 6).write(block(rng))
    with pytest.raises(errors.DataError, match="width 6"):
        store.Store(tmp_path, 7)


WRITER = """
import sys
import numpy as np
from clusterjax.features import store
stop_inside = int(sys.argv[2])
kept = store.Store(sys.argv[1], 64)
writes = 0
class Slow:
    '''A file that stops, in the middle of a write, when told to.'''
    def __init__(self, file): self.file = file
    def __getattr__(self, name): return getattr(self.file, name)
    def write(self, part):
        if stop_inside == number and len(part) > 1000:
            self.file.write(part[: len(part) // 2]); self.file.flush()
            print("inside", flush=True)
            import time; time.sleep(60)
        return self.file.write(part)
    def __enter__(self): return self
    def __exit__(self, *_): self.file.close()
original = store.open_new
store.open_new = lambda path: Slow(original(path))
for number in range(12):
    rng = np.random.default_rng(number)
    unit = rng.normal(size=(200, 64)).astype(np.float32)
    key = np.stack([np.arange(200), np.full(200, number)], 1).astype(np.uint64)
    if kept.find(key)[0].min() >= 0:
        continue
    kept.write(store.Block(key, unit[:, 0], unit[:, 1], unit))
    print(number, flush=True)
"""


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_killed_writes_leave_the_store_as_if_undisturbed(tmp_path):
    def start(folder, stop_inside=-1):
        return subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(stop_inside)],
            stdout=subprocess.PIPE,
            env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
            text=True,
        )

    assert start(tmp_path / "calm").wait() == 0
    rng = np.random.default_rng(5)
    for round_ in range(10):
        process = start(
            tmp_path / "wild", stop_inside=[2, 5, 9][round_] if round_ < 3 else -1
        )
        if round_ < 3:
            while "inside" not in process.stdout.readline():
                pass
        else:
            process.stdout.readline()
            time.sleep(rng.uniform(0, 0.01))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start(tmp_path / "wild").wait() == 0
    assert contents(tmp_path / "wild") == contents(tmp_path / "calm")


MILLION = """
import resource, sys
import numpy as np
from clusterjax.features import store
folder, count, width, size = sys.argv[1], 1_000_000, 512, 20_000
kept = store.Store(folder, width)
rng = np.random.default_rng(0)
base = rng.normal(size=(size, width)).astype(np.float32)
for first in range(0, count, size):
    key = np.stack([np.arange(first, first + size), np.zeros(size)], 1)
    key = key.astype(np.uint64)
    kept.write(store.Block(key, np.full(size, first, np.float32), base[:, 0], base))
key = np.stack([np.arange(count), np.zeros(count)], 1).astype(np.uint64)
values = store.assemble(kept, key, width, folder + "/values.npy")
assert values.shape == (count, width)
assert np.array_equal(values[123 + 7 * size], base[123])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_a_million_examples_stay_below_two_gigabytes(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", MILLION, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
    )
    assert int(result.stdout) < 2 * 10**9

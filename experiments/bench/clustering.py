"""Clustering against scikit-learn and faiss-cpu; a million rows; k-center.

    python -m experiments.bench clustering [--parts kmeans,equal,million,k_center]
        [--output FILE.json]

kmeans: N = 75,000 × D = 576, K = 4, 8, 64, 10 restarts each, over 5 seeds: skewed blobs
and, with --features FILE.npy (rows of gradient features), these tiled with small noise.
All take turns, seed by seed; compilation is stated apart. equal: one start, the same
start and number of iterations for both. million: k-means on 1,000,000 × 256 with
K = 64, its peak memory, and the capacity assignment. k_center: 10,000 of
20,000 × 1,024 against the plain NumPy loop.

Peers run in processes of their own, by --peer_python, without OPENBLAS_* variables that
slow them down. Where other work shares the machine, run under `taskset -c 0` and
compare processor seconds: the peers' threads wait for one another in vain otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from clusterjax import clustering, subset
from experiments.bench import record

_PEERS = pathlib.Path(__file__).with_name("clustering_peers.py")
_HEADS = (
    "data",
    "K",
    "method",
    "wall (s)",
    "processor (s)",
    "inertia / ours",
    "wall / ours",
    "processor / ours",
)
_DIGITS = (None, None, None, 2, 2, 5, 2, 2)
Times = dict[str, float]
Row = tuple[Any, ...]


def timed(call: Callable[[], Any]) -> tuple[Any, Times]:
    """The result, and wall and processor seconds."""
    wall, processor = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(call())
    return result, {
        "wall": time.perf_counter() - wall,
        "processor": time.process_time() - processor,
    }


def blobs(rows: int, dim: int, rng: np.random.Generator) -> np.ndarray:
    """Twelve overlapping blobs of very different sizes, as unit rows."""
    centers = rng.standard_normal((12, dim), np.float32)
    share = rng.dirichlet(np.full(12, 0.7))
    values = centers[rng.choice(12, rows, p=share)]
    values += 2 * rng.standard_normal((rows, dim), np.float32)
    return values / np.linalg.norm(values, axis=1, keepdims=True)


def tiled(features: np.ndarray, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of `features` again and again, each with noise of a tenth of its length."""
    values = features[rng.integers(0, len(features), rows)].astype(np.float32)
    noise = rng.standard_normal(values.shape, np.float32)
    length = np.linalg.norm(values, axis=1, keepdims=True)
    values += 0.1 * length * noise / np.sqrt(values.shape[1])
    return values / np.linalg.norm(values, axis=1, keepdims=True)


def datasets(options: argparse.Namespace) -> Iterator[tuple[str, np.ndarray]]:
    """The blobs, and the tiled features where there are any; the same for all parts."""
    rng = np.random.default_rng(options.draw)
    yield "blobs", blobs(options.rows, options.dim, rng)
    if options.features:
        yield "features", tiled(np.load(options.features), options.rows, rng)


def peer(python: str, name: str, *arguments: Any) -> dict[str, Any]:
    """Runs one peer; see `clustering_peers`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    line = [python, str(_PEERS), name, *map(str, arguments)]
    done = subprocess.run(line, env=kept, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} failed (is it installed for {python}?):\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compare_kmeans(
    name: str,
    values: np.ndarray,
    options: argparse.Namespace,
    folder: pathlib.Path,
    details: dict[str, Any],
) -> list[Row]:
    """10 restarts of every method, in turns, over the seeds."""
    path = folder / "values.npy"
    np.save(path, values)
    rows = []
    for k in options.clusters:
        _, first = timed(
            lambda k=k: clustering.kmeans(values, k, key=jax.random.key(99))
        )
        runs: dict[str, list[Times]] = {"clusterjax": [], "sklearn": [], "faiss": []}
        for seed in range(options.seeds):
            found, times = timed(
                lambda k=k, seed=seed: clustering.kmeans(
                    values, k, key=jax.random.key(seed)
                )
            )
            runs["clusterjax"].append({**times, "inertia": found.inertia})
            for other in ("sklearn", "faiss"):
                runs[other].append(peer(options.peer_python, other, path, k, seed))
        print(f"{name}, {values.shape[0]:,} × {values.shape[1]}, K = {k}:")
        rows += report(name, k, runs, details)
        print(f"  first call, with compilation: {first['wall']:.2f} s", flush=True)
    return rows


def report(
    data: str, k: int, runs: dict[str, list[Times]], details: dict[str, Any]
) -> list[Row]:
    """Prints and returns a row for each method; all its turns go into `details`.

    Medians of the times, and of the ratios to ours within a turn; inertia as a mean
    over the seeds, because a method is used with one seed.
    """
    rows, ours = [], runs["clusterjax"]
    for name, part in runs.items():
        details[f"{data}, K = {k}, {name}"] = part
        wall, processor = (
            record.median([run[clock] for run in part])
            for clock in ("wall", "processor")
        )
        ratio = {
            clock: record.median([a[clock] / b[clock] for a, b in zip(part, ours)])
            for clock in ("wall", "processor")
        }
        inertia = np.mean([run["inertia"] for run in part])
        worse = float(inertia / np.mean([run["inertia"] for run in ours]))
        times = ratio["wall"], ratio["processor"]
        rows.append((data, k, name, wall, processor, worse, *times))
        print(
            f"  {name:10s} {wall:8.2f} s wall {processor:8.2f} s processor"
            f"  inertia {inertia:.6g}  | {times[0]:.2f} × our wall,"
            f" {times[1]:.2f} × our processor, {worse:.5f} × our inertia",
            flush=True,
        )
    return rows


def compare_equal(
    name: str,
    values: np.ndarray,
    options: argparse.Namespace,
    folder: pathlib.Path,
    details: dict[str, Any],
) -> list[Row]:
    """One run from the same start with the same number of iterations."""
    np.save(folder / "values.npy", values)
    rng = np.random.default_rng(5)
    rows = []
    for k in options.clusters:
        starts = values[rng.choice(len(values), k, replace=False)]
        np.save(folder / "starts.npy", starts)

        def run(k: int = k, starts: np.ndarray = starts) -> Any:
            return clustering.kmeans(
                values,
                k,
                key=jax.random.key(0),
                init=starts,
                max_iterations=options.iterations,
                tol=0,
            )

        run()
        runs: dict[str, list[Times]] = {"clusterjax": [], "sklearn": []}
        for _ in range(options.seeds):
            found, times = timed(run)
            runs["clusterjax"].append({**times, "inertia": found.inertia})
            runs["sklearn"].append(
                peer(
                    options.peer_python,
                    "sklearn",
                    *(folder / "values.npy", k, 0),
                    *(folder / "starts.npy", options.iterations),
                )
            )
        print(f"{name}, equal starts, {options.iterations} iterations, K = {k}:")
        rows += report(f"{name}, {options.iterations} iterations", k, runs, details)
    return rows


def million(rows: int, folder: pathlib.Path) -> list[Row]:
    """K-means and capacity at a million rows, from a memory map."""
    made: list[Row] = []
    path = folder / "million.npy"
    stored = np.lib.format.open_memmap(path, "w+", np.float32, (rows, 256))
    for start in range(0, rows, 50_000):
        size = min(50_000, rows - start)
        stored[start : start + size] = blobs(size, 256, np.random.default_rng(start))
    stored.flush()
    values = np.load(path, mmap_mode="r")
    found, times = timed(lambda: clustering.kmeans(values, 64, key=jax.random.key(0)))
    print(
        f"{rows:,} × 256, K = 64, with compilation: {times['wall']:.1f} s wall", end=""
    )
    print(f", {times['processor']:.1f} s processor, inertia {found.inertia:.6g}")
    title = f"k-means of {rows:,} × 256, K = 64, with compilation"
    made.append((title, times["wall"], times["processor"]))
    room = -(-3 * rows // 128)
    for attempt in ("with compilation", "again"):
        label, times = timed(
            lambda: clustering.assign_with_capacity(values, found.centroids, room)
        )
        title = f"assignment with capacity {room:,}, {attempt}"
        made.append((title, times["wall"], times["processor"]))
        print(f"{title}: {times['wall']:.1f} s wall", end="")
        print(f", {times['processor']:.1f} s processor, largest", end=" ")
        print(f"{found.sizes.max():,} → {np.bincount(label).max():,}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory of the process: {peak:.1f} GiB")
    return [*made, (f"peak memory of the process: {peak:.1f} GiB", None, None)]


def k_center(rows: int, rng: np.random.Generator) -> list[Row]:
    """Half of `rows` × 1,024 by k-center, against the plain loop on its first picks."""
    values = blobs(rows, 1024, rng)
    count, shown = rows // 2, min(50, rows // 2)
    subset.k_center(values, count, 0)
    chosen, times = timed(lambda: subset.k_center(values, count, 0))

    def loop() -> list[int]:
        picks = [0]
        near = ((values - values[0]) ** 2).sum(1)
        for _ in range(shown - 1):
            picks.append(int(near.argmax()))
            near = np.minimum(near, ((values - values[picks[-1]]) ** 2).sum(1))
        return picks

    picks, plain = timed(loop)
    equal = "equal" if list(chosen[:shown]) == picks else "DIFFERENT"
    print(f"k-center {count:,} of {rows:,} × 1,024: {times['wall']:.1f} s wall", end="")
    print(f", {times['processor']:.1f} s processor; NumPy loop, from its first", end="")
    print(f" {shown} picks ({equal}):", end=" ")
    ratio = count / shown
    print(f"{plain['wall'] * ratio:.0f} s wall", end="")
    print(f", {plain['wall'] * ratio / times['wall']:.0f} × as long", flush=True)
    ours = f"k-center, {count:,} of {rows:,} × 1,024"
    loop_title = f"NumPy loop, from its first {shown} picks ({equal})"
    return [
        (ours, times["wall"], times["processor"]),
        (loop_title, plain["wall"] * ratio, plain["processor"] * ratio),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="kmeans,equal,million,k_center")
    parser.add_argument("--clusters", default="4,8,64")
    parser.add_argument("--rows", type=int, default=75_000)
    parser.add_argument("--dim", type=int, default=576)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--draw", type=int, default=0, help="seed of the rows")
    parser.add_argument("--million", type=int, default=1_000_000)
    parser.add_argument("--k_center", type=int, default=20_000)
    parser.add_argument("--features", default="", help=".npy of feature rows")
    parser.add_argument("--peer_python", default=sys.executable)
    parser.add_argument("--output", default="", help="JSON file for the figures")
    options = parser.parse_args(argv)
    options.clusters = [int(k) for k in options.clusters.split(",")]
    details: dict[str, Any] = {}
    tables = measure(options, options.parts.split(","), details)
    if options.output:
        versions = peer(options.peer_python, "versions")
        record.write(
            options.output, "clustering", tables, details=details, versions=versions
        )


def measure(
    options: argparse.Namespace, parts: list[str], details: dict[str, Any]
) -> list[record.Table]:
    """Runs the parts; returns a table for each kind of them."""
    found: dict[str, list[Row]] = {"large": [], "kmeans": [], "equal": []}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        # First, so that the peak memory is its own.
        if "million" in parts:
            found["large"] += million(options.million, folder)
        if "k_center" in parts:
            rng = np.random.default_rng(0)
            found["large"] += k_center(options.k_center, rng)
        for part, compare in (("kmeans", compare_kmeans), ("equal", compare_equal)):
            for data, values in datasets(options) if part in parts else ():
                found[part] += compare(data, values, options, folder, details)
    heads = {"large": ("what", "wall (s)", "processor (s)")}
    digits = {"large": (None, 1, 1)}
    return [
        record.Table(name, heads.get(name, _HEADS), rows, digits.get(name, _DIGITS))
        for name, rows in found.items()
        if rows
    ]


if __name__ == "__main__":
    main()

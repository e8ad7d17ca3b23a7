"""Planning at a million examples: select, schedule, look-ups, layouts, saving.

    python -m experiments.bench planning [--examples 1000000] [--epochs 3]
        [--output FILE.json]

Prints one line for each part with wall and processor seconds (apart when other work
shares the machine), then the figures of the schedule. NumPy only, one thread. Examples
have the token counts of the quickstart, drawn with replacement, in 8 unequal clusters.
With --herded N also the herded order of N examples of width 1,024 in pools, and its
noise at 2,000 examples beside the exact greedy order's.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import resource
import tempfile
import time
from collections.abc import Iterator

import numpy as np

from clusterjax import allocation, config, datatypes, selection
from clusterjax import plan as plan_lib
from experiments.bench import record

_CLUSTERS = 8
_SHARDS = 8
_LOOKUPS = 1000


class Times:
    """Wall and processor seconds of named blocks, and other figures.

    Attributes:
      rows: (name, wall, processor) in order.
      figures: (name, value) in order.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, float]] = []
        self.figures: list[tuple[str, float | str]] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Notes and prints the seconds of the block."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(f"{name:54s} {wall:9.4f} s wall {cpu:9.4f} s processor", flush=True)
        self.rows.append((name.strip(), wall, cpu))

    def tables(self) -> list[record.Table]:
        """What documentation shows."""
        heads = ("what", "wall (ms)", "processor (ms)")
        rows = [(name, 1000 * wall, 1000 * cpu) for name, wall, cpu in self.rows]
        made = [record.Table("times", heads, rows)]
        if self.figures:
            made.append(record.Table("figures", ("what", "value"), self.figures))
        return made


def made_up(
    count: int, width: int, rng: np.random.Generator
) -> tuple[datatypes.GradientFeatures, datatypes.Clustering, np.ndarray]:
    """Features, clusters and token counts of `count` examples."""
    path = pathlib.Path(__file__).parent / "quickstart_lengths.npz"
    stored = np.load(path)
    row = rng.integers(0, len(stored["lengths"]), count)
    lengths = stored["lengths"][row].astype(np.int64)
    labels = stored["num_labels"][row].astype(np.int32)
    share = np.arange(1, _CLUSTERS + 1) / np.arange(1, _CLUSTERS + 1).sum()
    label = rng.choice(_CLUSTERS, count, p=share).astype(np.int32)
    values = rng.standard_normal((count, width), np.float32)
    values += 2 * rng.standard_normal((_CLUSTERS, width), np.float32)[label]
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    sizes = np.bincount(label)
    feats = datatypes.GradientFeatures(
        values=values,
        norm=rng.lognormal(size=count).astype(np.float32),
        loss=rng.random(count, np.float32),
        num_labels=labels,
        user_weight=np.ones(count, np.float32),
        example_id=np.arange(count),
        uid=np.array([f"made:{i}:0" for i in range(count)]),
        source_id=np.zeros(count, np.int32),
        kind="made up",
        fingerprint="",
        corpus_fingerprint="",
        model_fingerprint="",
        num_corpus=count,
        source_names=("made",),
    )
    clusters = datatypes.Clustering(
        cluster_id=label,
        centroids=np.zeros((_CLUSTERS, width), np.float32),
        distance=rng.random(count, np.float32),
        inertia=0.0,
        num_iterations=0,
        converged=True,
        kmeans_sizes=sizes,
        floor_sizes=sizes,
        capacity=None,
        fingerprint="",
    )
    return feats, clusters, lengths


def plan_and_schedule(timed: Times, count: int, epochs: float, batch_size: int) -> None:
    """Times of the whole path, and of look-ups at the end of it."""
    feats, clusters, lengths = made_up(count, 4, np.random.default_rng(0))
    labels = feats.num_labels
    cfg = config.SelectionConfig(keep="all")
    alloc = config.AllocationConfig(batch_size=batch_size, num_epochs=epochs)  # pyright: ignore[reportArgumentType]
    with timed(f"plan and schedule of {count:,}, {epochs:g} epochs, {_SHARDS} shards"):
        with timed("  select"):
            plan = selection.select(clusters, feats, cfg)
        with timed("  allocate"):
            schedule = allocation.allocate(plan, lengths, labels, alloc)
        with timed("  layout of all batches"):
            layout = schedule.layout(_SHARDS)
    last = schedule.num_steps - 1
    with timed(f"first look-up, step {last:,}"):
        schedule.step(last)
    with timed(f"{_LOOKUPS} look-ups"):
        for step in range(max(last - _LOOKUPS, 0), last):
            schedule.step(step)
    with timed("100 placements in a row"):
        for step in range(max(last - 100, 0), last):
            layout.place(step)
    _far_look_up(timed, labels, lengths, clusters, feats)
    with tempfile.TemporaryDirectory() as folder:
        with timed("save the plan"):
            plan.save(folder)
        with timed("load the plan"):
            plan_lib.SelectionPlan.load(folder)
    print("\n".join(allocation.measure(schedule, _SHARDS).lines()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak resident memory {peak:.2f} GiB")
    timed.figures.append(("peak resident memory (GiB)", peak))


def _far_look_up(
    timed: Times,
    labels: np.ndarray,
    lengths: np.ndarray,
    clusters: datatypes.Clustering,
    feats: datatypes.GradientFeatures,
) -> None:
    """A look-up at step one million of a long run, cold and warm."""
    plan = selection.select(clusters, feats, config.SelectionConfig())
    epochs = float(-(-1_100_000 * 32 // plan.num_kept))
    cfg = config.AllocationConfig(batch_size=32, num_epochs=epochs)  # pyright: ignore[reportArgumentType]
    schedule = allocation.allocate(plan, lengths, labels, cfg)
    with timed(f"resume at step 1,000,000 of {schedule.num_steps:,}"):
        schedule.step(1_000_000)
    with timed("look-up at step 1,000,001"):
        schedule.step(1_000_001)


def noise(plan: plan_lib.SelectionPlan, feats, labels, cfg: config.AllocationConfig):
    """Noise of a step as a ratio to random steps (`allocation.measure`)."""
    from clusterjax import subset

    schedule = allocation.allocate(
        plan, labels, labels, cfg, feats, subset.herded_order
    )
    return allocation.measure(schedule, 1, feats=feats).noise


def herded(timed: Times, count: int, pool: int) -> None:
    """Time of a herded order in pools; noise in pools and exact at 2,000 examples."""
    from clusterjax import subset

    feats, clusters, _ = made_up(count, 1024, np.random.default_rng(1))
    plan = selection.select(clusters, feats, config.SelectionConfig(keep="all"))
    labels = feats.num_labels
    cfg = config.AllocationConfig(batch_size=64, order="herded", herding_pool=pool)
    for attempt in ("with compilation", "again"):
        with timed(f"herded order of {count:,} × 1,024, pool {pool}, {attempt}"):
            allocation.allocate(plan, labels, labels, cfg, feats, subset.herded_order)
    feats, clusters, _ = made_up(2000, 1024, np.random.default_rng(2))
    plan = selection.select(clusters, feats, config.SelectionConfig(keep="all"))
    for name, order, size in [
        ("shuffled", "shuffled", 0),
        ("herded, exact greedy", "herded", 0),
        (f"herded, pool {pool}", "herded", pool),
    ]:
        cfg = config.AllocationConfig(batch_size=64, order=order, herding_pool=size)  # pyright: ignore[reportArgumentType]
        found = noise(plan, feats, feats.num_labels, cfg)
        assert found is not None  # features were given
        print(f"noise at 2,000 examples, {name}: {found:.3f} of random steps'")
        title = f"noise / random steps, 2,000 examples, {name}"
        timed.figures.append((title, found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--herded", type=int, default=0, help="examples to order")
    parser.add_argument("--pool", type=int, default=256)
    parser.add_argument("--output", default="", help="JSON file for the figures")
    arguments = parser.parse_args()
    timed = Times()
    plan_and_schedule(timed, arguments.examples, arguments.epochs, arguments.batch_size)
    if arguments.herded:
        herded(timed, arguments.herded, arguments.pool)
    if arguments.output:
        record.write(arguments.output, "planning", timed.tables())


if __name__ == "__main__":
    main()

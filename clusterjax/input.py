"""Batches on the devices ahead of time: each process prepares its own rows only.

A thread looks up a step in the schedule, assembles this process's rows in NumPy and
puts them on its devices, a few steps ahead of the loop. That is less machinery than
worker processes and enough: assembling a step is memory copies, in which NumPy lets
the interpreter go. A grain pipeline would add start-up time and state to save, while
here resuming is the step number.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from clusterjax import datatypes
from clusterjax import mesh as mesh_lib


@dataclasses.dataclass(frozen=True)
class StepInput:
    """One optimiser step's batch.

    Attributes:
      step: index of the step, from 0.
      batch: on the devices, [A, R·L, T].
      tokens: tokens of all examples of the step, over all processes (no padding).
      labels: label tokens of all examples of the step.
    """

    step: int
    batch: datatypes.Batch
    tokens: int
    labels: int


@dataclasses.dataclass(frozen=True)
class Rows:
    """What a source returns for one step.

    Attributes:
      batch: NumPy rows of the asked data shards, [A, len(shards)·L, T].
      tokens, labels: of the whole step, all shards.
    """

    batch: datatypes.Batch
    tokens: int
    labels: int


# (step, data shards) → the rows of those shards.
Source = Callable[[int, tuple[int, ...]], Rows]


def put(
    batch: datatypes.Batch, mesh: jax.sharding.Mesh, shards: tuple[int, ...]
) -> datatypes.Batch:
    """Makes the global batch from this process's rows.

    Args:
      batch: NumPy, [A, len(shards)·L, T], the rows of `shards` in order.
      mesh: the mesh.
      shards: data shards of this process, ascending.
    """
    sharding = NamedSharding(mesh, PartitionSpec(None, mesh_lib.BATCH_AXES))
    rows_per_shard = batch.inputs.shape[1] // len(shards)
    total = rows_per_shard * mesh_lib.num_shards(mesh)
    first = {shard: i * rows_per_shard for i, shard in enumerate(shards)}

    def place(array: np.ndarray) -> jax.Array:
        def piece(index: tuple[slice, ...]) -> np.ndarray:
            begin, end, _ = index[1].indices(total)
            local = first[begin // rows_per_shard]
            return array[:, local : local + end - begin]

        shape = (array.shape[0], total, array.shape[2])
        return jax.make_array_from_callback(shape, sharding, piece)

    return datatypes.Batch(*map(place, batch))


class Feed:
    """Iterates over the steps' inputs, prepared in a thread."""

    def __init__(
        self,
        source: Source,
        mesh: jax.sharding.Mesh,
        steps: range,
        num_ahead: int,
    ):
        self._source, self._mesh = source, mesh
        self._shards = mesh_lib.local_shards(mesh)
        self._queue: queue.Queue = queue.Queue(max(num_ahead, 1))
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._fill, args=(steps,), name="input", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[StepInput]:
        while True:
            item = self._queue.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """Stops the thread."""
        self._closed.set()
        while self._thread.is_alive():
            try:  # makes room, in case the thread waits for it
                self._queue.get(timeout=0.05)
            except queue.Empty:
                pass

    def _fill(self, steps: range) -> None:
        try:
            for step in steps:
                rows = self._source(step, self._shards)
                batch = put(rows.batch, self._mesh, self._shards)
                self._give(StepInput(step, batch, rows.tokens, rows.labels))
                if self._closed.is_set():
                    return
            self._give(None)
        except BaseException as error:  # goes to the loop, which raises it
            self._give(error)

    def _give(self, item: StepInput | BaseException | None) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                pass

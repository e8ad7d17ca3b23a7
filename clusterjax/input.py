"""Batches on the devices ahead of time: each process prepares its own rows only.

A thread looks up a step in the schedule, assembles this process's rows in NumPy and
puts them on its devices, a few steps ahead of the loop. That is less machinery than
worker processes and enough: assembling a step is memory copies, in which NumPy lets
the interpreter go. A grain pipeline would add start-up time and state to save, while
here resuming is the step number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from clusterjax import batching, datatypes, steps
from clusterjax import mesh as mesh_lib

_SLOT_STEP = 16


class Schedule(Protocol):
    """What training asks of a schedule (`allocation.Schedule` is one).

    Attributes:
      num_steps: steps of the whole run.
      num_labels: int64 [M], label tokens of each kept entry.
      fingerprint: hash of what decides membership and weights.
    """

    num_steps: int
    num_labels: np.ndarray

    @property
    def fingerprint(self) -> str: ...

    def place(self, step: int, num_shards: int) -> steps.Placement: ...

    def labels_needed(self, num_shards: int) -> int: ...


@dataclasses.dataclass(frozen=True)
class StepInput:
    """One optimiser step's batch.

    Attributes:
      step: index of the step, from 0.
      epoch: from 0.
      batch: [A, R·L, T] on the devices (NumPy and own rows only, before `put`).
      tokens: tokens of all examples of the step, over all processes (no padding).
      labels: label tokens of all examples of the step.
      label_slots: label tokens of a data shard in a micro-step that the loss must have
        room for. It and the batch's shape decide which compiled step serves.
    """

    step: int
    epoch: int
    batch: datatypes.Batch
    tokens: int
    labels: int
    label_slots: int


class Layout:
    """The rows of every step on one mesh, and the static size of its losses.

    Attributes:
      label_slots: label tokens of a data shard in a micro-step that the loss of the
        usual step has room for; one compiled step serves nearly the whole run.
    """

    def __init__(
        self,
        schedule: Schedule,
        corpus: datatypes.Corpus,
        mesh: jax.sharding.Mesh,
        first_step: int = 0,
    ):
        """Args:
        schedule: of the run, or of a part of it.
        corpus: the examples.
        mesh: the mesh.
        first_step: step of the run that is the schedule's step 0.
        """
        self._first_step = first_step
        self._schedule, self._corpus = schedule, corpus
        self._num_shards = mesh_lib.num_shards(mesh)
        self.label_slots = _rounded_up(schedule.labels_needed(self._num_shards))

    def rows(self, step: int, shards: tuple[int, ...]) -> StepInput:
        """Assembles the rows of `shards`, in NumPy."""
        placed = self._schedule.place(step - self._first_step, self._num_shards)
        return StepInput(
            step,
            placed.step.epoch,
            batching.fill(self._corpus, placed, shards),
            int(placed.length.sum()),
            int(self._schedule.num_labels[placed.step.entry].sum()),
            _rounded_up(placed.num_labels),
        )


def _rounded_up(num_labels: int) -> int:
    return -(-num_labels // _SLOT_STEP) * _SLOT_STEP


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
        def piece(index: Any) -> np.ndarray:
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
        layout: Layout,
        mesh: jax.sharding.Mesh,
        numbers: range,
        num_ahead: int,
    ):
        self._layout, self._mesh = layout, mesh
        self._shards = mesh_lib.local_shards(mesh)
        self._queue: queue.Queue = queue.Queue(max(num_ahead, 1))
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._fill, args=(numbers,), name="input", daemon=True
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
            # Makes room, in case the thread waits for it.
            with contextlib.suppress(queue.Empty):
                self._queue.get(timeout=0.05)

    def _fill(self, numbers: range) -> None:
        try:
            for step in numbers:
                item = self._layout.rows(step, self._shards)
                batch = put(item.batch, self._mesh, self._shards)
                self._give(dataclasses.replace(item, batch=batch))
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

"""What `features.during_first_epoch` costs: a training step with and without it.

    python -m experiments.bench.collecting --model DIR

In turns, in one run: the step as it is, and the step that collects the features of its
examples. Wall and processor seconds, and the arithmetic that the compiler counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from clusterjax import (
    allocation,
    collection,
    config,
    data,
    datatypes,
    files,
    models,
    optimizer,
    progress,
    selection,
)
from clusterjax import input as input_lib
from clusterjax import mesh as mesh_lib
from clusterjax import step as step_lib

_MODEL = flags.DEFINE_string("model", "builtin", "Hugging Face directory, or builtin.")
_BATCH = flags.DEFINE_integer("batch_size", 32, "Examples of the step.")
_LENGTH = flags.DEFINE_integer("max_length", 256, "Longest example, tokens.")
_ROUNDS = flags.DEFINE_integer("num_rounds", 7, "Times that each is measured.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file for the figures.")


class Step:
    """One compiled training step; its state goes on from call to call."""

    def __init__(self, model: Any, mesh: jax.sharding.Mesh, slots: int, collected: int):
        tmpl, params = step_lib.split(model, mesh=mesh)
        cfg = config.OptimizerConfig(learning_rate=1e-5, schedule="constant")
        self._tx = optimizer.build(cfg, 1000, tmpl.dimensions)
        params = jax.tree.map(jnp.copy, params)  # every step donates its state
        self._state = datatypes.TrainState(jnp.int32(0), params, self._tx.init(params))
        sizes = step_lib.Sizes(slots, config.PerfConfig().vocab_chunk, collected)
        step = step_lib.make_step(tmpl, self._tx, mesh, sizes)
        places = step_lib.shardings(tmpl, self._tx, params, {}, mesh)
        self._jitted = step_lib.jit(step, places, mesh, bool(collected))
        self._program: Any = None

    def __call__(self, batch: datatypes.Batch) -> None:
        if self._program is None:
            self._program = self._jitted.lower(self._state, {}, batch).compile()
        self._state, out = self._program(self._state, {}, batch)
        jax.block_until_ready((self._state, out))

    @property
    def flops(self) -> float:
        """Arithmetic of the program; a loop over the vocabulary counts once."""
        return float(self._program.cost_analysis()["flops"])


def measure(path: str, num_rounds: int) -> dict[str, Any]:
    """Median seconds of a step without and with."""
    tokenizer, model = models.load(path)
    corpus = _corpus(tokenizer)
    mesh = mesh_lib.build(config.MeshConfig(), jax.devices()[:1])
    schedule = _schedule(corpus)
    layout = input_lib.Layout(schedule, corpus, mesh)
    item = layout.rows(0, mesh_lib.local_shards(mesh))
    batch = input_lib.put(item.batch, mesh, mesh_lib.local_shards(mesh))
    slots = collection.slots_needed([schedule.place(0, 1)])
    plain = Step(model, mesh, item.label_slots, 0)
    collecting = Step(model, mesh, item.label_slots, slots)
    runs: dict[str, Callable[[], None]] = {
        "step": lambda: plain(batch),
        "step that collects": lambda: collecting(batch),
    }
    wall: dict[str, list[float]] = {name: [] for name in runs}
    processor: dict[str, list[float]] = {name: [] for name in runs}
    for current in range(num_rounds + 1):
        for name, run in runs.items():
            begin, worked = time.perf_counter(), time.process_time()
            run()
            if current:  # the first round compiles
                wall[name].append(time.perf_counter() - begin)
                processor[name].append(time.process_time() - worked)
        progress.say(f"  round {current} of {num_rounds}")
    return {
        "model": path,
        "examples": corpus.num_examples,
        "tokens": len(corpus.tokens),
        "wall_seconds": {n: statistics.median(s) for n, s in wall.items()},
        "processor_seconds": {n: statistics.median(s) for n, s in processor.items()},
        "flops_ratio": collecting.flops / plain.flops,
    }


def _corpus(tokenizer: Any) -> datatypes.Corpus:
    source = config.SourceConfig(
        path="builtin:stdlib_functions", max_examples=_BATCH.value
    )
    return data.load(
        config.DataConfig(sources=(source,), max_length=_LENGTH.value), tokenizer
    )


def _schedule(corpus: datatypes.Corpus) -> allocation.Schedule:
    everything = config.SelectionConfig(method="full")
    return allocation.allocate(
        selection.select(None, None, everything, corpus=corpus),
        corpus.lengths,
        corpus.num_labels,
        config.AllocationConfig(batch_size=corpus.num_examples, num_epochs=1),
    )


def main(argv: list[str]) -> None:
    del argv
    found = measure(_MODEL.value, _ROUNDS.value)
    base = {name: found[name]["step"] for name in ("wall_seconds", "processor_seconds")}
    print("                       wall s   of a step   processor s   of a step")
    for name in found["wall_seconds"]:
        wall, work = found["wall_seconds"][name], found["processor_seconds"][name]
        print(
            f"{name:<20} {wall:8.3f} {wall / base['wall_seconds']:11.3f}"
            f" {work:13.3f} {work / base['processor_seconds']:11.3f}"
        )
    print(f"arithmetic of the step that collects: {found['flops_ratio']:.4f} of a step")
    if _OUTPUT.value:
        files.write_json(_OUTPUT.value, found)


if __name__ == "__main__":
    app.run(main)

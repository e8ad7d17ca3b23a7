"""What `features.during_first_epoch` costs: a training step with and without it.

    python -m experiments.bench collecting [--model DIR] [--output FILE.json]

In turns, in one run: the step as it is, and the step that collects the features of its
examples. Wall and processor seconds, and the arithmetic that the compiler counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from clusterjax import (
    allocation,
    collection,
    config,
    data,
    datatypes,
    models,
    optimizer,
    progress,
    selection,
)
from clusterjax import input as input_lib
from clusterjax import mesh as mesh_lib
from clusterjax import step as step_lib
from experiments.bench import record

_HEADS = ("", "wall (s)", "processor (s)", "wall / step", "processor / step")
_DIGITS = (None, 3, 3, 3, 3)


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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step without and with, round by round, and the arithmetic."""
    tokenizer, model = models.load(options.model)
    corpus = _corpus(tokenizer, options)
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
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for current in range(options.num_rounds + 1):
        for name, run in runs.items():
            begin, worked = time.perf_counter(), time.process_time()
            run()
            seconds = {
                "wall": time.perf_counter() - begin,
                "processor": time.process_time() - worked,
            }
            if current:  # the first round compiles
                rounds[name].append(seconds)
        progress.say(f"  round {current} of {options.num_rounds}")
    return {
        "examples": corpus.num_examples,
        "tokens": len(corpus.tokens),
        "rounds": rounds,
        "flops_ratio": collecting.flops / plain.flops,
    }


def tables(found: dict[str, Any]) -> list[record.Table]:
    """Medians of the times, and of the ratios within a round; what was measured."""
    rounds, rows = found["rounds"], []
    for name, own in rounds.items():
        seconds = [
            record.median([each[clock] for each in own])
            for clock in ("wall", "processor")
        ]
        ratios = [
            record.median([a[clock] / b[clock] for a, b in zip(own, rounds["step"])])
            for clock in ("wall", "processor")
        ]
        rows.append((name, *seconds, *ratios))
    labels = {
        "examples": "examples of the step",
        "tokens": "tokens of the step",
        "flops_ratio": "arithmetic of the step that collects, of a step",
    }
    return [
        record.Table("steps", _HEADS, rows, _DIGITS),
        record.figures_table("setup", found, labels),
    ]


def _corpus(tokenizer: Any, options: argparse.Namespace) -> datatypes.Corpus:
    source = config.SourceConfig(
        path="builtin:stdlib_functions", max_examples=options.batch_size
    )
    return data.load(
        config.DataConfig(sources=(source,), max_length=options.max_length), tokenizer
    )


def _schedule(corpus: datatypes.Corpus) -> allocation.Schedule:
    everything = config.SelectionConfig(method="full")
    return allocation.allocate(
        selection.select(None, None, everything, corpus=corpus),
        corpus.lengths,
        corpus.num_labels,
        config.AllocationConfig(batch_size=corpus.num_examples, num_epochs=1),
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="builtin", help="Hugging Face directory, or builtin"
    )
    parser.add_argument("--batch_size", type=int, default=32, help="examples")
    parser.add_argument("--max_length", type=int, default=256, help="longest, tokens")
    parser.add_argument("--num_rounds", type=int, default=7, help="measured turns")
    parser.add_argument("--output", default="", help="JSON file for the figures")
    options = parser.parse_args(argv)
    found = measure(options)
    for table in tables(found):
        for row in (table.heads, *table.texts()):
            progress.say(" | ".join(row))
    if options.output:
        record.write(
            options.output, "collecting", tables(found), details=found["rounds"]
        )


if __name__ == "__main__":
    main()

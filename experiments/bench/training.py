"""Training speed against a transformers + PyTorch loop, and the price of the weights.

    python -m experiments.bench training --model DIR [--peer_python PYTHON]

Both sides train the same decoder (float32, AdamW) on the same examples, in turns, in
one run, so that whatever else the machine does meets both. Processor seconds (of all
threads) stand beside wall seconds: other work on the machine changes them little. Three
comparisons:

- the same padded batches: tokens per second, padding included;
- our packed rows against their padded batches: label tokens per second;
- our step with per-token weights against the same step with a plain mean: FLOPs of the
  compiled program and median seconds.

In the first two each side takes its step twice in a turn. The second is a step as
training goes on. The first comes after other programs, whose memory has been freed: the
system then has to give it anew, and the more a step needs the longer that takes.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clusterjax import (
    allocation,
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

# As data collators pad: to the longest of the batch, made up to a multiple of 8.
_PAD = 8
_RATE = 1e-5
_SIDES = ("peer", "ours", "packed")


class Seconds(NamedTuple):
    """Of one step, on the wall and of all threads."""

    wall: float
    processor: float


class Peer:
    """The PyTorch loop in a process of its own; it trains when told to."""

    def __init__(self, python: str, model: str, batches: Sequence[dict[str, Any]]):
        self._process = subprocess.Popen(
            [python, __file__.replace("training.py", "torch_loop.py"), model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._send({"batches": batches, "rate": _RATE})
        self.description = self._answer()

    def step(self, index: int) -> Seconds:
        """Trains on one batch."""
        self._send(index)
        return Seconds(*self._answer())

    def close(self) -> None:
        """Ends the process."""
        self._send(None)
        self._process.wait()

    def _send(self, value: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the PyTorch process ended with code {self._process.wait()}; see its"
                " message above"
            )
        return json.loads(line)


class Ours:
    """Our step, compiled for every batch shape; the state goes on from step to step."""

    def __init__(self, model: Any, mesh: jax.sharding.Mesh):
        cfg = config.OptimizerConfig(learning_rate=_RATE, schedule="constant")
        self._mesh = mesh
        self._template, params = step_lib.split(model, mesh=mesh)
        self._tx = optimizer.build(cfg, 1000, self._template.dimensions)
        self._state = datatypes.TrainState(jnp.int32(0), params, self._tx.init(params))
        self._programs: dict[Any, Any] = {}

    def step(
        self, batch: datatypes.Batch, label_slots: int, plain_mean: bool = False
    ) -> Seconds:
        """Trains on one batch."""
        program = self.program(batch, label_slots, plain_mean)
        begin, worked = time.perf_counter(), time.process_time()
        self._state, out = program(self._state, {}, batch)
        jax.block_until_ready((self._state, out))
        return Seconds(time.perf_counter() - begin, time.process_time() - worked)

    def program(
        self, batch: datatypes.Batch, label_slots: int, plain_mean: bool = False
    ) -> Any:
        """The compiled step of a batch shape."""
        key = (batch.inputs.shape, label_slots, plain_mean)
        if key not in self._programs:
            sizes = step_lib.Sizes(label_slots, config.PerfConfig().vocab_chunk)
            step = step_lib.make_step(self._template, self._tx, self._mesh, sizes)
            if plain_mean:
                step = _with_plain_mean(step)
            places = step_lib.shardings(
                self._template, self._tx, self._state.params, {}, self._mesh
            )
            jitted = step_lib.jit(step, places, self._mesh)
            self._programs[key] = jitted.lower(self._state, {}, batch).compile()
        return self._programs[key]


def _with_plain_mean(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step of the mean loss over label tokens: no weights come from outside."""

    def plain(state, frozen, batch):
        mask = (batch.loss_weights != 0).astype(jnp.float32)
        return step(state, frozen, batch._replace(loss_weights=mask / jnp.sum(mask)))

    return plain


class Bench:
    """The batches and our side; `against_peer` and `price_of_weights` measure."""

    def __init__(self, options: argparse.Namespace):
        self._path = options.model
        tokenizer, model = models.load(options.model)
        corpus = _corpus(tokenizer, options)
        mesh = mesh_lib.build(config.MeshConfig(), jax.devices()[:1])
        self._padded = [_padded(corpus, ids) for ids in _batches(corpus, options)]
        self._packed, self._packed_slots = _packed(corpus, mesh, options)
        self._num_labels = int(corpus.num_labels.sum())
        most = max(int((b.loss_weights != 0).sum()) for b in self._padded)
        self._slots = -(-most // 64) * 64
        self._ours = Ours(model, mesh)  # `model` ends here: steps donate its arrays

    def against_peer(self, python: str, num_rounds: int) -> dict[str, Any]:
        """Takes every step in turns with PyTorch, `num_rounds` times."""
        peer = Peer(python, self._path, [_for_peer(batch) for batch in self._padded])
        rounds = []
        for current in range(num_rounds + 1):
            for i, batch in enumerate(self._padded):
                packed = self._packed[i], self._packed_slots
                sides = {
                    "peer": functools.partial(peer.step, i),
                    "ours": functools.partial(self._ours.step, batch, self._slots),
                    "packed": functools.partial(self._ours.step, *packed),
                }
                now = turn(sides)
                progress.say(f"  round {current}, step {i}: {_told(now)}")
                if current:  # the first round compiles and warms up
                    rounds.append(now)
        peer.close()
        return {
            "peer": peer.description,
            "tokens": num_rounds * sum(b.inputs.size for b in self._padded),
            "labels": num_rounds * self._num_labels,
            **_by_name(rounds),
        }

    def price_of_weights(self, num_rounds: int) -> dict[str, Any]:
        """Takes every step with weights and with a plain mean, in changing order."""
        rounds = []
        for current in range(num_rounds + 1):
            for i, batch in enumerate(self._padded):
                now = {}
                for is_plain in (True, False) if (current + i) % 2 else (False, True):
                    name = "plain" if is_plain else "weighted"
                    now[name] = self._ours.step(batch, self._slots, is_plain)
                progress.say(f"  round {current}, step {i}: {_told(now)}")
                if current:
                    rounds.append(now)
        programs = (
            self._ours.program(self._padded[0], self._slots, plain)
            for plain in (False, True)
        )
        weighted, plain = (p.cost_analysis()["flops"] for p in programs)
        return {"weighted_flops_over_plain": weighted / plain, **_by_name(rounds)}


def turn(sides: dict[str, Callable[[], Seconds]]) -> dict[str, Seconds]:
    """Each side's step twice: `NAME_first` and, as training goes on, `NAME`."""
    taken = {}
    for name, step in sides.items():
        taken[f"{name}_first"] = step()
        taken[name] = step()
    return taken


def _by_name(rounds: Sequence[dict[str, Seconds]]) -> dict[str, list[Seconds]]:
    return {f"{name}_seconds": [now[name] for now in rounds] for name in rounds[0]}


def tables(found: dict[str, Any]) -> list[record.Table]:
    """What documentation shows of the figures."""
    seconds = {
        name: np.array(value)
        for name, value in found.items()
        if name.endswith("_seconds")
    }
    result = []
    if "peer" in found:
        peer, ours, packed = (seconds[f"{name}_seconds"] for name in _SIDES)
        sides = (
            ("PyTorch, padded batches", peer, found["tokens"]),
            ("ours, the same batches", ours, found["tokens"]),
            ("ours, packed rows", packed, None),
        )
        rows = [
            (
                name,
                tokens and tokens / times[:, 0].sum(),
                found["labels"] / times[:, 0].sum(),
            )
            for name, times, tokens in sides
        ]
        heads = ("", "tokens per second", "label tokens per second")
        result.append(record.Table("speed", heads, rows))
        padded = "tokens/s, same padded batches, over PyTorch's"
        labels = "label tokens/s, packed over PyTorch's padded"
        first = {name: seconds[f"{name}_first_seconds"] for name in _SIDES}
        ratios = [
            (padded, *_medians(peer, ours)),
            (labels, *_medians(peer, packed)),
            (f"{padded}, first steps", *_medians(first["peer"], first["ours"])),
            (f"{labels}, first steps", *_medians(first["peer"], first["packed"])),
        ]
        heads = ("median ratio of a turn", "wall clock", "processor seconds")
        result.append(record.Table("ratios", heads, ratios))
    weighted, plain = seconds["weighted_seconds"], seconds["plain_seconds"]
    price = [
        ("time, wall clock (median of pairs)", _medians(weighted, plain)[0]),
        ("time, processor seconds (median of pairs)", _medians(weighted, plain)[1]),
        ("FLOPs of the compiled program", found["weighted_flops_over_plain"]),
    ]
    heads = ("step with weights over step with a plain mean", "ratio")
    result.append(record.Table("weights", heads, price))
    return result


def _medians(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Median over steps of the ratio of seconds, [steps, 2] each."""
    wall, processor = np.median(a / b, axis=0)
    return float(wall), float(processor)


def _corpus(tokenizer: Any, options: argparse.Namespace) -> datatypes.Corpus:
    """The first usable examples, as many as needed; those without a label are not."""
    count = options.num_steps * options.batch_size
    num_rows, missing = 0, count
    while missing > 0:
        num_rows += missing
        source = config.SourceConfig(
            path="builtin:stdlib_functions", max_examples=num_rows
        )
        cfg = config.DataConfig(sources=(source,), max_length=options.max_length)
        corpus = data.load(cfg, tokenizer)
        missing = count - corpus.num_examples
        if corpus.num_read < num_rows:
            raise SystemExit(f"only {corpus.num_examples} examples; fewer steps")
    return corpus


def _batches(corpus: datatypes.Corpus, options: argparse.Namespace) -> list[np.ndarray]:
    shape = options.num_steps, options.batch_size
    order = np.random.default_rng(0).permutation(corpus.num_examples)
    return list(order[: np.prod(shape)].reshape(shape))


def _padded(corpus: datatypes.Corpus, ids: np.ndarray) -> datatypes.Batch:
    """One example a row, padded to the longest of the batch (a multiple of `_PAD`)."""
    width = -(-int(corpus.lengths[ids].max()) // _PAD) * _PAD
    shape = (1, len(ids), width)
    inputs, targets, segments, positions = (np.zeros(shape, np.int32) for _ in range(4))
    weights = np.zeros(shape, np.float32)
    example = np.full(shape, -1, np.int32)
    for row, i in enumerate(ids):
        tokens, is_label = corpus.example(int(i))
        n = len(tokens)
        inputs[0, row, :n], segments[0, row, :n], example[0, row, :n] = tokens, 1, i
        positions[0, row, :n] = np.arange(n)
        targets[0, row, : n - 1] = tokens[1:]
        weights[0, row, : n - 1] = is_label[1:]
    weights /= weights.sum()
    return datatypes.Batch(inputs, targets, segments, positions, weights, example)


def _packed(
    corpus: datatypes.Corpus, mesh: jax.sharding.Mesh, options: argparse.Namespace
) -> tuple[list[datatypes.Batch], int]:
    """The same examples as the planner packs them, as many to a step."""
    cfg = config.SelectionConfig(method="full", weighting="none")
    plan = selection.select(None, None, cfg, corpus=corpus)
    settings = config.AllocationConfig(
        batch_size=options.batch_size, num_epochs=1, row_length=2 * options.max_length
    )
    schedule = allocation.allocate(plan, corpus.lengths, corpus.num_labels, settings)
    layout = input_lib.Layout(schedule, corpus, mesh)
    batches = [
        input_lib.put(layout.rows(i, (0,)).batch, mesh, (0,))
        for i in range(options.num_steps)
    ]
    return batches, layout.label_slots


def _for_peer(batch: datatypes.Batch) -> dict[str, Any]:
    labels = np.where(batch.loss_weights != 0, batch.targets, -100)
    return {
        "input_ids": batch.inputs[0].tolist(),
        "attention_mask": batch.segment_ids[0].tolist(),
        # Shifted already: label t is the next token.
        "next_token": labels[0].tolist(),
    }


def _told(times: dict[str, Seconds]) -> str:
    return ", ".join(
        f"{name} {seconds.wall:.2f} s ({seconds.processor:.2f} of processors)"
        for name, seconds in times.items()
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints and writes the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument(
        "--peer_python",
        default=sys.executable,
        help="Python that has torch and transformers; '' leaves the PyTorch loop out",
    )
    parser.add_argument("--batch_size", type=int, default=8, help="examples of a step")
    parser.add_argument("--max_length", type=int, default=256, help="longest, tokens")
    parser.add_argument("--num_steps", type=int, default=4, help="different steps")
    parser.add_argument("--num_rounds", type=int, default=5, help="turns of every step")
    parser.add_argument("--output", default="", help="JSON file for the figures")
    options = parser.parse_args(argv)
    bench, found = Bench(options), {}
    if options.peer_python:
        found |= bench.against_peer(options.peer_python, options.num_rounds)
    found |= bench.price_of_weights(options.num_rounds)
    for table in tables(found):
        progress.say(" | ".join(table.heads))
        for row in table.texts():
            progress.say(" | ".join(row))
    if options.output:
        said = found.get("peer", "").split(", ")[:2]
        record.write(
            options.output,
            "training",
            tables(found),
            details=found,
            versions=dict(item.split(" ", 1) for item in said if item),
        )


if __name__ == "__main__":
    main()

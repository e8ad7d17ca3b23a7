"""Projected per-example gradients against TRAK and dattri, in one run.

    python -m experiments.bench attribution --peer_python PYTHON [--output FILE.json]

Gradients of each example's mean loss with respect to the whole model, projected to the
same width by everybody, on the same examples (real functions of the standard library):
our `per_example` (with a ±1 and with a sparse projection) and `probe`, TRAK's
`TRAKer.featurize` and dattri's task with `random_project`, both on a transformers model
of the same weights, and the bare gradients of `torch.func` without any projection. All
take turns; the first turn, which compiles, is left out.

Quality: for all pairs of examples, the correlation of the projected inner products and
cosines with the exact ones, made from unprojected gradients.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from clusterjax import config, data, datatypes, models, progress
from clusterjax.features import batches, extraction, extractors, model_state
from experiments.bench import peer_examples, record

Times = dict[str, float]
_TITLES = {
    "per_example, sparse": "clusterjax per_example, sparse projection",
    "per_example, signs": "clusterjax per_example, ±1 projection",
    "probe": "clusterjax probe, second projection",
    "trak": "TRAK, CPU projector",
    "dattri": "dattri, CPU projector",
    "gradients": "torch.func gradients, not projected",
}


class Ours:
    """One kind of pass over the corpus, compiled once."""

    def __init__(self, model: Any, corpus: datatypes.Corpus, cfg: Any, batch: int):
        longest = int(corpus.lengths.max())
        perf = config.PerfConfig(
            feature_batch_tokens=batch * longest, feature_micro_batch=batch
        )
        state = model_state.split(model, remat=extractors.remat(cfg, perf))
        where = batches.windows(corpus, None)
        buckets = batches.choose_buckets(
            where.length - 1, perf.feature_buckets, perf.feature_batch_tokens, 1
        )
        extractor = extractors.Extractor(state, cfg, perf, None)
        self._pass = extraction.Pass(
            extractor, state.params, corpus, where, buckets, None, perf
        )
        self._order = batches.order(np.arange(corpus.num_examples), where, buckets)

    def run(self) -> tuple[np.ndarray, Times]:
        """Raw features in the order of the corpus, and seconds."""
        rows: dict[int, np.ndarray] = {}
        wall, cpu = time.perf_counter(), time.process_time()
        for ids, raw_BD, _ in self._pass.run(self._order):
            rows.update(zip(map(int, ids), np.asarray(raw_BD)))
        times = {
            "wall": time.perf_counter() - wall,
            "processor": time.process_time() - cpu,
        }
        return np.stack([rows[i] for i in sorted(rows)]), times


class Peer:
    """The PyTorch passes in a process of their own."""

    def __init__(self, python: str, model: str, start: dict[str, Any]):
        path = pathlib.Path(__file__).with_name("torch_attribution.py")
        self._process = subprocess.Popen(
            [python, str(path), model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.description = self._ask(start)

    def run(self, name: str, folder: str) -> tuple[np.ndarray, Times]:
        """What a peer computes, and seconds."""
        path = f"{folder}/{name}.npy"
        times = self._ask({"run": name, "save": path})
        return np.load(path), times

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.write("null\n")
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, value: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(value) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise SystemExit("the PyTorch process ended; see its message above")
        return json.loads(line)


def agreement(found_nD: np.ndarray, exact_nD: np.ndarray) -> dict[str, float]:
    """Correlation over all pairs with the exact inner products and cosines."""
    pairs = np.triu_indices(len(found_nD), 1)

    def products(rows: np.ndarray, unit: bool) -> np.ndarray:
        wide = rows.astype(np.float64)
        if unit:
            wide /= np.linalg.norm(wide, axis=1, keepdims=True)
        return (wide @ wide.T)[pairs]

    return {
        name: float(
            np.corrcoef(products(found_nD, unit), products(exact_nD, unit))[0, 1]
        )
        for name, unit in (("products", False), ("cosines", True))
    }


def measure(options: argparse.Namespace) -> tuple[list[record.Table], dict, dict]:
    """Runs everything; returns tables, all measurements, and the peers' versions."""
    tokenizer, model = models.load(options.model)
    corpus = _corpus(tokenizer, options)
    common = {"dim": options.dim, "seed": 0}
    settings = {
        "per_example, sparse": {"kind": "per_example", "projection": "sparse"},
        "per_example, signs": {"kind": "per_example", "projection": "rademacher"},
        "probe": {"kind": "probe", "k_in": 16, "k_out": 16},
    }
    with tempfile.TemporaryDirectory() as folder:
        models.save(model, tokenizer, f"{folder}/model")
        runs: dict[str, Callable[[], tuple[np.ndarray, Times]]] = {
            name: Ours(
                model, corpus, config.FeaturesConfig(**keys, **common), options.batch
            ).run
            for name, keys in settings.items()
        }
        start = {
            "examples": peer_examples.of(corpus),
            "batch": options.batch,
            "dim": options.dim,
        }
        peer = Peer(options.peer_python, f"{folder}/model", start)
        for name in ("trak", "dattri", "gradients"):
            runs[name] = lambda name=name: peer.run(name, folder)
        times, found = _turns(runs, options.rounds)
        peer.close()
    whole = config.FeaturesConfig(kind="per_example", projection="identity")
    exact_nD, _ = Ours(model, corpus, whole, 4).run()
    exact_n = np.linalg.norm(exact_nD, axis=1)
    difference = float(np.abs(found.pop("gradients") / exact_n - 1).max())
    quality = {name: agreement(rows, exact_nD) for name, rows in found.items()}
    details = {
        "examples": corpus.num_examples,
        "mean_length": float(corpus.lengths.mean()),
        "parameters": exact_nD.shape[1],
        "largest_relative_difference_of_gradient_norms": difference,
        "threads_of_torch": peer.description["threads"],
        "seconds": times,
        "agreement": quality,
    }
    tables = [_table(times, quality, corpus.num_examples)]
    return tables, details, peer.description["versions"]


def _turns(
    runs: dict[str, Callable[[], tuple[np.ndarray, Times]]], rounds: int
) -> tuple[dict[str, list[Times]], dict[str, np.ndarray]]:
    times: dict[str, list[Times]] = {name: [] for name in runs}
    found: dict[str, np.ndarray] = {}
    for current in range(rounds + 1):
        for name, run in runs.items():
            found[name], spent = run()
            if current:
                times[name].append(spent)
            progress.say(f"  turn {current}: {name} {spent['wall']:.2f} s")
    return times, found


def _table(
    times: dict[str, list[Times]], quality: dict[str, dict[str, float]], count: int
) -> record.Table:
    heads = (
        "method",
        "examples per second",
        "processor seconds per example",
        "wall / our sparse",
        "processor / our sparse",
        "correlation of inner products",
        "of cosines",
    )
    ours = times["per_example, sparse"]
    rows = []
    for name, part in times.items():
        ratios = [
            record.median([a[clock] / b[clock] for a, b in zip(part, ours)])
            for clock in ("wall", "processor")
        ]
        agreed = quality.get(name, {})
        rows.append(
            (
                _TITLES[name],
                count / record.median([t["wall"] for t in part]),
                record.median([t["processor"] for t in part]) / count,
                *ratios,
                agreed.get("products"),
                agreed.get("cosines"),
            )
        )
    return record.Table("gradients", heads, rows, (None, None, None, 2, 2, 4, 4))


def _corpus(tokenizer: Any, options: argparse.Namespace) -> datatypes.Corpus:
    source = config.SourceConfig(
        path="builtin:stdlib_functions", max_examples=options.examples
    )
    cfg = config.DataConfig(sources=(source,), max_length=options.max_length)
    return data.load(cfg, tokenizer)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin", help="Hugging Face directory")
    parser.add_argument("--peer_python", default=sys.executable)
    parser.add_argument("--examples", type=int, default=32)
    parser.add_argument("--max_length", type=int, default=192)
    parser.add_argument("--batch", type=int, default=16, help="examples at a time")
    parser.add_argument("--dim", type=int, default=512, help="width of all projections")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", default="", help="JSON file for the figures")
    options = parser.parse_args(argv)
    tables, details, versions = measure(options)
    for table in tables:
        for row in (table.heads, *table.texts()):
            progress.say("  ".join(row))
    if options.output:
        record.write(
            options.output, "attribution", tables, details=details, versions=versions
        )


if __name__ == "__main__":
    main()

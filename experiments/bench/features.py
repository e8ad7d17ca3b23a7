"""Feature passes against plain PyTorch ones and against their own floor, in one run.

    python -m experiments.bench features --model DIR [--peer_python PYTHON]

All passes read the same examples (real functions of the standard library, real
lengths), in turns, so that whatever else the machine does meets all of them:

- `proxy` against a transformers forward with hidden states and full logits over
  right-padded batches of 16 in file order: examples per second;
- `proxy` against the bare body over the same rows, with the bound 1.05 + 0.30 · label
  share;
- `head` (64 × 64) against `proxy`, and `probe` (16 × 16 for every matrix) against the
  forward pass with the loss at the label positions;
- `probe` against per-example gradients by `torch.func` with the same kind of
  projection, per token of the examples that both saw.

Compilation is left out everywhere; the first round warms up. Besides the time on the
clock the processor seconds are told, since other work on the machine shows in the one
and hardly in the other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from clusterjax import config, data, datatypes, models, progress
from clusterjax.features import batches, extraction, extractors, model_state
from experiments.bench import peer_examples, record

_PEER_BATCH = 16
_K = 16

# Ratio → what it is, and the goal.
_RATIOS = {
    "proxy_speed_over_torch": ("proxy, examples/s over those of PyTorch", "≥ 1.8"),
    "proxy_over_body": ("proxy over the bare model body, time", "≤ {bound:.3f}"),
    "head_over_proxy": ("head (64 × 64) over proxy, time", "≤ 1.3"),
    "probe_over_forward": ("probe (k = 16) over the forward with loss, time", "≤ 2.5"),
    "probe_speed_over_torch_func": (
        "probe, speed over per-example gradients by torch.func",
        "≥ 1.5",
    ),
}


class Spent(NamedTuple):
    """What a pass took, seconds: on the clock, and of all processors together."""

    clock: float
    processor: float


class Peer:
    """The PyTorch passes in a process of its own."""

    def __init__(self, python: str, model: str, examples: list[Any]):
        self._process = subprocess.Popen(
            [python, __file__.replace("features.py", "torch_features.py"), model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._send({"examples": examples})
        self.description = self._answer()

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """Makes a pass; returns its seconds and the norms of its features."""
        self._send(order)
        return self._answer()

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
            raise RuntimeError("the PyTorch process ended; see its message above")
        return json.loads(line)


class Ours:
    """One kind of pass over the same rows."""

    def __init__(
        self,
        model: Any,
        corpus: datatypes.Corpus,
        cfg: config.FeaturesConfig,
        batch_tokens: int,
        only_body: bool = False,
    ):
        perf = config.PerfConfig(feature_batch_tokens=batch_tokens)
        state = model_state.split(model, remat=extractors.remat(cfg, perf))
        where = batches.windows(corpus, None)
        buckets = batches.choose_buckets(
            where.length - 1,
            perf.feature_buckets,
            perf.feature_batch_tokens,
            1,
            perf.feature_turn_tokens if cfg.kind == "probe" else None,
        )
        extractor: Any = extractors.Extractor(state, cfg, perf, None)
        if only_body:
            extractor = _Body(state)
        self.work = extraction.Pass(
            extractor, state.params, corpus, where, buckets, None, perf
        )

    def run(self) -> tuple[Spent, np.ndarray]:
        """Makes the pass; returns what it took and the norms in corpus order."""
        everything = np.arange(self.work.corpus.num_examples)
        ordered = batches.order(everything, self.work.where, self.work.buckets)
        norm = np.zeros(len(everything))
        begin, processor = time.perf_counter(), time.process_time()
        for ids, raw_BD, _ in self.work.run(ordered):
            norm[ids] = np.linalg.norm(raw_BD, axis=1)
        spent = Spent(time.perf_counter() - begin, time.process_time() - processor)
        return spent, norm


class _Body:
    """An extractor that stops at the hidden states: the floor of every kind."""

    shards = 1

    def __init__(self, state: model_state.ModelState):
        def body(params, rows):
            hidden_BTH = state.merge(params).hidden(rows.tokens)
            # One number a row, so that fetching the result costs nothing.
            return hidden_BTH.sum(axis=(1, 2))[:, None], hidden_BTH[:, 0, 0]

        self._body = jax.jit(body)

    def __call__(self, params: Any, rows: batches.Rows, sizes: Any) -> Any:
        return self._body(params, rows)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the comparisons; returns their figures."""
    tokenizer, model = models.load(options.model)
    corpus = _corpus(tokenizer, options)
    kinds = {
        "proxy": config.FeaturesConfig(),
        "head": config.FeaturesConfig(kind="head", k_in=64, k_out=64),
        "probe": config.FeaturesConfig(kind="probe", k_in=_K, k_out=_K),
    }
    tokens = options.batch_tokens
    passes = {kind: Ours(model, corpus, cfg, tokens) for kind, cfg in kinds.items()}
    passes["body"] = Ours(
        model, corpus, config.FeaturesConfig(), tokens, only_body=True
    )
    peer = Peer(options.peer_python, options.model, peer_examples.of(corpus))
    orders = {
        "torch_proxy": {"run": "proxy", "batch": _PEER_BATCH},
        "torch_func": {"run": "sketches", "count": options.num_gradients, "k": _K},
    }
    runs: dict[str, Callable[[], tuple[Spent, Any]]] = {
        name: found.run for name, found in passes.items()
    }
    for name, order in orders.items():
        runs[name] = lambda order=order: _timed(peer.run(order))
    seconds: dict[str, list[Spent]] = {name: [] for name in runs}
    norms: dict[str, np.ndarray] = {}
    for current in range(options.num_rounds + 1):
        for name, run in runs.items():
            spent, norms[name] = run()
            if current:
                seconds[name].append(spent)
            progress.say(
                f"  round {current}: {name} {spent.clock:.2f} s,"
                f" {spent.processor:.2f} s of processors"
            )
    peer.close()
    figures = _figures(
        corpus, passes["proxy"].work, seconds, norms, options.num_gradients
    )
    return figures | {"peer": peer.description}


def _figures(
    corpus: datatypes.Corpus,
    work: extraction.Pass,
    seconds: dict[str, list[Spent]],
    norms: dict[str, np.ndarray],
    num_gradients: int,
) -> dict[str, Any]:
    """Ratios within each round, clock and processor, and what was measured on."""
    positions = corpus.lengths - 1
    plan = work.plan(
        batches.order(np.arange(corpus.num_examples), work.where, work.buckets)
    )
    # torch.func saw the first examples only: compare by token.
    by_token = float(positions.sum() / positions[:num_gradients].sum())

    def ratios(above: str, below: str, factor: float = 1.0) -> list[Spent]:
        pairs = zip(seconds[above], seconds[below], strict=True)
        return [
            Spent(factor * a.clock / b.clock, factor * a.processor / b.processor)
            for a, b in pairs
        ]

    return {
        "examples": corpus.num_examples,
        "tokens": int(corpus.lengths.sum()),
        "mean_length": float(corpus.lengths.mean()),
        "longest": int(corpus.lengths.max()),
        "label_share": float(corpus.num_labels.sum() / positions.sum()),
        "our_padding": plan.padding(positions),
        "proxy_norm_difference": float(
            np.max(np.abs(norms["proxy"] / norms["torch_proxy"] - 1))
        ),
        "proxy_speed_over_torch": ratios("torch_proxy", "proxy"),
        "proxy_over_body": ratios("proxy", "body"),
        "head_over_proxy": ratios("head", "proxy"),
        "probe_over_forward": ratios("probe", "proxy"),
        "probe_speed_over_torch_func": ratios("torch_func", "probe", by_token),
        "seconds": seconds,
    }


def tables(found: dict[str, Any]) -> list[record.Table]:
    """Seconds of the passes, and the ratios beside their goals."""
    passes = [
        (
            name.replace("_", " "),
            record.median([each.clock for each in spent]),
            record.spread([each.clock for each in spent]),
            record.median([each.processor for each in spent]),
        )
        for name, spent in found["seconds"].items()
    ]
    bound = 1.05 + 0.30 * found["label_share"]
    rows = [
        (
            text,
            goal.format(bound=bound),
            record.median([each.clock for each in found[key]]),
            record.spread([each.clock for each in found[key]]),
            record.median([each.processor for each in found[key]]),
        )
        for key, (text, goal) in _RATIOS.items()
    ]
    setup = {
        "examples": "examples",
        "tokens": "tokens",
        "longest": "longest example, tokens",
        "label_share": "labels, share of the positions",
        "our_padding": "padding of our batches, share",
        "proxy_norm_difference": "largest relative difference of a norm, to PyTorch",
    }
    heads = ("clock, median", "smallest–largest", "processors, median")
    return [
        record.Table("ratios", ("ratio", "goal", *heads), rows),
        record.Table("passes", ("pass", *(f"{h} (s)" for h in heads)), passes),
        record.figures_table("setup", found, setup),
    ]


def _timed(answer: dict[str, Any]) -> tuple[Spent, np.ndarray]:
    return Spent(answer["seconds"], answer["processor"]), np.array(answer["norm"])


def _corpus(tokenizer: Any, options: argparse.Namespace) -> datatypes.Corpus:
    source = config.SourceConfig(
        path="builtin:stdlib_functions", max_examples=options.num_examples
    )
    cfg = config.DataConfig(sources=(source,), max_length=options.max_length)
    return data.load(cfg, tokenizer)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints and writes the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument(
        "--peer_python",
        default=sys.executable,
        help="Python that has torch and transformers",
    )
    parser.add_argument("--num_examples", type=int, default=64, help="of a pass")
    parser.add_argument(
        "--num_gradients", type=int, default=4, help="examples that torch.func sees"
    )
    parser.add_argument("--max_length", type=int, default=512, help="longest, tokens")
    parser.add_argument("--batch_tokens", type=int, default=2048, help="of our batches")
    parser.add_argument("--num_rounds", type=int, default=5, help="turns of every pass")
    parser.add_argument("--output", default="", help="JSON file for the figures")
    options = parser.parse_args(argv)
    found = measure(options)
    made = tables(found)
    if options.output:
        said = found["peer"].split(", ")[:2]
        record.write(
            options.output,
            "features",
            made,
            details=found,
            versions=dict(item.split(" ", 1) for item in said),
        )
    for table in made:
        progress.say(f"{table.name}: {' | '.join(table.heads)}")
        for row in table.texts():
            progress.say(f"  {' | '.join(row)}")


if __name__ == "__main__":
    main()

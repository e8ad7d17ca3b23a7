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

Compilation is left out everywhere; the first round warms up.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags

from clusterjax import config, data, datatypes, models, progress
from clusterjax.features import batches, extraction, extractors, model_state

_MODEL = flags.DEFINE_string("model", None, "Hugging Face directory of the decoder.")
_PEER = flags.DEFINE_string(
    "peer_python", sys.executable, "Python that has torch and transformers."
)
_EXAMPLES = flags.DEFINE_integer("num_examples", 64, "Examples of a pass.")
_GRADIENTS = flags.DEFINE_integer(
    "num_gradients", 4, "Examples of the per-example gradients by torch.func."
)
_LENGTH = flags.DEFINE_integer("max_length", 512, "Longest example, tokens.")
_TOKENS = flags.DEFINE_integer("batch_tokens", 2048, "Tokens of our batches.")
_ROUNDS = flags.DEFINE_integer("num_rounds", 3, "Times that every pass is made.")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file for the figures.")

_PEER_BATCH = 16
_K = 16


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
        only_body: bool = False,
    ):
        perf = config.PerfConfig(feature_batch_tokens=_TOKENS.value)
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

    def run(self) -> tuple[float, np.ndarray]:
        """Makes the pass; returns its seconds and the norms in corpus order."""
        everything = np.arange(self.work.corpus.num_examples)
        ordered = batches.order(everything, self.work.where, self.work.buckets)
        norm = np.zeros(len(everything))
        begin = time.perf_counter()
        for ids, raw_BD, _ in self.work.run(ordered):
            norm[ids] = np.linalg.norm(raw_BD, axis=1)
        return time.perf_counter() - begin, norm


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


def measure(model_path: str, peer_python: str) -> dict[str, Any]:
    """Runs the comparisons; returns their figures."""
    tokenizer, model = models.load(model_path)
    corpus = _corpus(tokenizer, _EXAMPLES.value)
    kinds = {
        "proxy": config.FeaturesConfig(),
        "head": config.FeaturesConfig(kind="head", k_in=64, k_out=64),
        "probe": config.FeaturesConfig(kind="probe", k_in=_K, k_out=_K),
    }
    passes = {kind: Ours(model, corpus, cfg) for kind, cfg in kinds.items()}
    passes["body"] = Ours(model, corpus, config.FeaturesConfig(), only_body=True)
    peer = Peer(peer_python, model_path, _for_peer(corpus))
    orders = {
        "torch_proxy": {"run": "proxy", "batch": _PEER_BATCH},
        "torch_func": {"run": "sketches", "count": _GRADIENTS.value, "k": _K},
    }
    runs: dict[str, Callable[[], tuple[float, Any]]] = {
        name: found.run for name, found in passes.items()
    }
    for name, order in orders.items():
        runs[name] = lambda order=order: _timed(peer.run(order))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    norms: dict[str, np.ndarray] = {}
    for current in range(_ROUNDS.value + 1):
        for name, run in runs.items():
            spent, norms[name] = run()
            if current:
                seconds[name].append(spent)
            progress.say(f"  round {current}: {name} {spent:.2f} s")
    peer.close()
    return _figures(corpus, passes["proxy"].work, seconds, norms, peer.description)


def _figures(
    corpus: datatypes.Corpus,
    work: extraction.Pass,
    seconds: dict[str, list[float]],
    norms: dict[str, np.ndarray],
    peer: str,
) -> dict[str, Any]:
    """The ratios; medians over rounds of ratios taken within a round."""

    def ratio(above: str, below: str) -> float:
        pairs = zip(seconds[above], seconds[below], strict=True)
        return statistics.median(a / b for a, b in pairs)

    count = _GRADIENTS.value
    positions = corpus.lengths - 1
    share = float(corpus.num_labels.sum() / positions.sum())
    plan = work.plan(
        batches.order(np.arange(corpus.num_examples), work.where, work.buckets)
    )
    # torch.func saw the first examples only: compare by token.
    by_token = float(positions.sum() / positions[:count].sum())
    return {
        "examples": corpus.num_examples,
        "mean_length": float(corpus.lengths.mean()),
        "label_share": share,
        "our_padding": plan.padding(positions),
        "peer": peer,
        "jax": jax.__version__,
        "proxy_norm_difference": float(
            np.max(np.abs(norms["proxy"] / norms["torch_proxy"] - 1))
        ),
        "proxy_speed_over_torch": ratio("torch_proxy", "proxy"),
        "proxy_over_body": ratio("proxy", "body"),
        "proxy_over_body_bound": 1.05 + 0.30 * share,
        "head_over_proxy": ratio("head", "proxy"),
        "probe_over_forward": ratio("probe", "proxy"),
        "probe_speed_over_torch_func": ratio("torch_func", "probe") * by_token,
        "seconds": seconds,
    }


def _timed(answer: dict[str, Any]) -> tuple[float, np.ndarray]:
    return answer["seconds"], np.array(answer["norm"])


def _corpus(tokenizer: Any, count: int) -> datatypes.Corpus:
    source = config.SourceConfig(path="builtin:stdlib_functions", max_examples=count)
    cfg = config.DataConfig(sources=(source,), max_length=_LENGTH.value)
    return data.load(cfg, tokenizer)


def _for_peer(corpus: datatypes.Corpus) -> list[Any]:
    result = []
    for i in range(corpus.num_examples):
        tokens, is_label = corpus.example(i)
        labels = np.where(is_label, tokens, -100)
        result.append((tokens.tolist(), labels.tolist()))
    return result


def main(argv: Sequence[str]) -> None:
    """Measures, prints and writes the figures."""
    del argv
    if not _MODEL.value:
        raise SystemExit("--model DIR is needed: a Hugging Face directory")
    found = measure(_MODEL.value, _PEER.value)
    if _OUTPUT.value:
        with open(_OUTPUT.value, "w") as file:
            json.dump(found, file, indent=2)
    found.pop("seconds")
    for name, value in found.items():
        text = f"{value:.3f}" if isinstance(value, float) else value
        progress.say(f"{name}: {text}")


if __name__ == "__main__":
    app.run(main)

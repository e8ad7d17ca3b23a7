"""Exact match: answers generated greedily, compared with the reference as text."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from clusterjax import config, datatypes, progress
from clusterjax.models import decoder, generation

_BATCH = 32


def measure(
    model: decoder.Decoder,
    corpus: datatypes.Corpus,
    tokenizer: Any,
    cfg: config.EvalConfig,
    row_sharding: jax.sharding.Sharding | None = None,
) -> dict[str, Any]:
    """Shares of held-out prompts whose generated answer is exactly the reference.

    The answer of an example is its first run of label tokens; what comes before is the
    prompt. White space at the ends and the end token do not count.

    Args:
      model: the decoder.
      corpus: held-out examples.
      tokenizer: `data.tokenizer.Tokenizer` of the model.
      cfg: `exact_match` examples of every source, evenly spaced among those whose
        answer has at most `max_new_tokens` tokens.
      row_sharding: where the rows of a batch lie.

    Returns:
      `exact_match` (share, None when no example qualifies), `exact_match_examples`,
      and `exact_match_sources` (share by source).
    """
    chosen = choose(corpus, cfg)
    right = np.zeros(len(chosen), bool)
    by_length = np.argsort([_answer_start(corpus, i) for i in chosen], kind="stable")
    with progress.track("answers", len(chosen), "prompts") as advance:
        for begin in range(0, len(chosen), _BATCH):
            rows = by_length[begin : begin + _BATCH]
            ids = [int(chosen[row]) for row in rows]
            right[rows] = _are_right(model, corpus, ids, tokenizer, cfg, row_sharding)
            advance(len(rows))
    source = corpus.source_id[chosen]
    return {
        "exact_match": float(right.mean()) if len(chosen) else None,
        "exact_match_examples": len(chosen),
        "exact_match_sources": {
            name: float(right[source == i].mean())
            for i, name in enumerate(corpus.source_names)
            if (source == i).any()
        },
    }


def choose(corpus: datatypes.Corpus, cfg: config.EvalConfig) -> np.ndarray:
    """int64, the examples that are asked; see `measure`."""
    short = np.array(
        [
            len(_answer(corpus, i)) <= cfg.max_new_tokens
            for i in range(corpus.num_examples)
        ]
    )
    parts = []
    for source in range(len(corpus.source_names)):
        of_source = np.flatnonzero((corpus.source_id == source) & short)
        count = min(cfg.exact_match, len(of_source))
        parts.append(of_source[np.arange(count) * len(of_source) // max(count, 1)])
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _answer_start(corpus: datatypes.Corpus, i: int) -> int:
    return int(np.argmax(corpus.example(i)[1]))


def _answer(corpus: datatypes.Corpus, i: int) -> np.ndarray:
    tokens, labels = corpus.example(i)
    start = int(np.argmax(labels))
    after = np.flatnonzero(~labels[start:])
    return tokens[start : start + after[0]] if after.size else tokens[start:]


def _are_right(
    model: decoder.Decoder,
    corpus: datatypes.Corpus,
    ids: list[int],
    tokenizer: Any,
    cfg: config.EvalConfig,
    row_sharding: jax.sharding.Sharding | None,
) -> list[bool]:
    prompts = [corpus.example(i)[0][: _answer_start(corpus, i)] for i in ids]
    # A full batch always: one compiled program for each padded prompt length.
    prompts += [prompts[-1]] * (_BATCH - len(prompts))
    end_ids = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    answers = generation.generate(
        model,
        prompts,
        cfg.max_new_tokens,
        end_ids=end_ids,
        row_sharding=row_sharding,
    )

    def text(tokens: np.ndarray) -> str:
        return tokenizer.decode(tokens[~np.isin(tokens, end_ids)].tolist()).strip()

    return [
        text(answer) == text(_answer(corpus, i))
        for answer, i in zip(answers, ids, strict=False)
    ]

"""Exact match by generation: which examples are asked, and what counts as right."""

import dataclasses

import numpy as np
import pytest

from clusterjax import config, data, exact_match, models
from clusterjax.models import generation


@pytest.fixture(scope="module")
def asked():
    tokenizer, model = models.load("builtin")
    cfg = config.DataConfig(
        sources=(
            config.SourceConfig(
                path="builtin:skills", split="heldout", max_examples=20
            ),
        ),
    )
    return tokenizer, model, data.load(cfg, tokenizer)


def test_agrees_with_one_by_one_generation(asked):
    tokenizer, model, corpus = asked
    cfg = config.EvalConfig(exact_match=6, max_new_tokens=12)
    chosen = exact_match.choose(corpus, cfg)
    assert len(chosen) == 6 and len(set(chosen)) == 6
    # The reference answers of half of the examples become what the model says.
    said = {}
    tokens = corpus.tokens.copy()
    for i in chosen:
        begin = int(corpus.offsets[i])
        start = int(np.argmax(corpus.example(i)[1]))
        answer = generation.generate(
            model, [corpus.example(i)[0][:start]], 12, end_ids=(tokenizer.eos_id,)
        )[0]
        length = int(corpus.offsets[i + 1]) - begin - start
        said[int(i)] = tokenizer.decode(
            answer[answer != tokenizer.eos_id].tolist()
        ).strip()
        if len(answer) == length:
            tokens[begin + start : begin + start + length] = answer
    changed = dataclasses.replace(corpus, tokens=tokens)
    expected = [
        said[int(i)]
        == tokenizer.decode(
            [t for t in exact_match._answer(changed, i) if t != tokenizer.eos_id]
        ).strip()
        for i in chosen
    ]
    found = exact_match.measure(model, changed, tokenizer, cfg)
    assert found["exact_match"] == pytest.approx(np.mean(expected))
    assert found["exact_match_examples"] == 6


def test_long_answers_are_not_asked(asked):
    _, _, corpus = asked
    cfg = config.EvalConfig(exact_match=100, max_new_tokens=3)
    chosen = exact_match.choose(corpus, cfg)
    lengths = np.array(
        [len(exact_match._answer(corpus, i)) for i in range(corpus.num_examples)]
    )
    np.testing.assert_array_equal(chosen, np.flatnonzero(lengths <= 3))


def test_a_model_that_knows_the_answers(asked, monkeypatch):
    tokenizer, model, corpus = asked

    def perfect(model, prompts, max_new_tokens, **rest):
        del model, max_new_tokens, rest
        starts = {
            tuple(corpus.example(i)[0][: exact_match._answer_start(corpus, i)]): i
            for i in range(corpus.num_examples)
        }
        return [exact_match._answer(corpus, starts[tuple(p)]) for p in prompts]

    monkeypatch.setattr(generation, "generate", perfect)
    cfg = config.EvalConfig(exact_match=5, max_new_tokens=30)
    found = exact_match.measure(model, corpus, tokenizer, cfg)
    assert found["exact_match"] == 1.0
    assert found["exact_match_sources"] == {"skills": 1.0}

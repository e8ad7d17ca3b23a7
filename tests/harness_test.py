"""Scores and answers for evaluation suites, against whole logits and plain loops."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from clusterjax import models
from experiments import evaluate
from experiments.harness import scoring, skill_tasks

TEXT = (
    "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\n"
    "class Reader:\n    def __init__(self, path):\n        self.path = path\n"
)


@pytest.fixture(scope="module")
def loaded():
    return models.load("builtin", dtype="float32")


@pytest.fixture(scope="module")
def scorer(loaded):
    return scoring.Scorer(*loaded, batch_size=3, vocab_chunk=700)


_WIDTH = 128


@nnx.jit
def _logits(model, tokens_BT):
    return model(tokens_BT)


def _log_probs(model, tokens):
    """log p of every next token from whole logits in float64, [T, V]."""
    # Padding on the right changes nothing before it; one length compiles once.
    row = np.pad(np.array(tokens, np.int32), (0, _WIDTH - len(tokens)))[None]
    logits = np.asarray(_logits(model, row), np.float64)[0, : len(tokens)]
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


PAIRS = [
    ("import os\nimport ", "sys\n"),
    ("import os\nimport", " sys\n"),
    ("", "import os"),
    ("x = 1", ""),
    (TEXT, "        return self.path\n"),
    ("Compute 2 + 2.\n", "2 + 2 = 4"),
    ("def f(x):\n    return", " x"),
]


def test_continuations_equal_whole_logits(loaded, scorer):
    tokenizer, model = loaded
    scores = scorer.score([scorer.continuation(*pair) for pair in PAIRS])
    for (context, continuation), score in zip(PAIRS, scores, strict=True):
        prompt = tokenizer.encode(context.rstrip())
        tokens = tokenizer.encode(context + continuation)
        scored = len(tokens) - len(prompt)
        if not prompt:
            tokens = [tokenizer.bos_id, *tokens]
        expected, greedy = 0.0, True
        if scored:
            log_TV = _log_probs(model, tokens[:-1])[-scored:]
            targets = tokens[-scored:]
            expected = log_TV[np.arange(scored), targets].sum()
            greedy = (log_TV.argmax(-1) == targets).all()
        assert score.log_likelihood == pytest.approx(expected, abs=2e-4)
        assert score.is_greedy == greedy


def test_what_a_greedy_answer_says_is_greedy(loaded, scorer):
    tokenizer, model = loaded
    prompt = tokenizer.encode("import os\nimport")
    [new] = models.generate(model, [prompt], 4)
    whole = tuple(prompt) + tuple(int(t) for t in new)
    other = (*whole[:-1], (whole[-1] + 1) % tokenizer.vocab_size)
    found = scorer.score([scoring.Window(whole, 4), scoring.Window(other, 4)])
    assert [score.is_greedy for score in found] == [True, False]


def test_neighbours_and_batches_do_not_matter(loaded, scorer):
    windows = [scorer.continuation(*pair) for pair in PAIRS]
    together = scorer.score(windows)
    alone = [scorer.score([window])[0] for window in windows]
    wide = scoring.Scorer(*loaded, batch_size=8).score(windows[::-1])[::-1]
    for a, b, c in zip(together, alone, wide, strict=True):
        assert a.log_likelihood == pytest.approx(b.log_likelihood, abs=1e-4)
        assert a.log_likelihood == pytest.approx(c.log_likelihood, abs=1e-4)
        assert a.is_greedy == b.is_greedy == c.is_greedy


def test_rolling_windows_predict_every_token_once(loaded):
    tokenizer, model = loaded
    short = scoring.Scorer(tokenizer, model, max_length=16)
    tokens = [tokenizer.bos_id, *tokenizer.encode(TEXT)]
    windows = short.rolling(TEXT)
    assert sum(window.num_scored for window in windows) == len(tokens) - 1 > 40
    place, expected = 1, []
    for window in windows:
        end = place + window.num_scored
        assert list(window.tokens) == tokens[end - len(window.tokens) : end]
        assert len(window.tokens) <= 17  # 16 are read
        log_TV = _log_probs(model, list(window.tokens[:-1]))
        targets = window.tokens[-window.num_scored :]
        rows = log_TV[-window.num_scored :]
        expected.append(rows[np.arange(len(targets)), list(targets)].sum())
        place = end
    # The last window looks back as far as it can.
    assert len(windows[-1].tokens) == 17
    found = [score.log_likelihood for score in short.score(windows)]
    np.testing.assert_allclose(found, expected, atol=2e-4)
    assert short.rolling("") == []


def test_long_contexts_lose_their_beginning(loaded):
    short = scoring.Scorer(*loaded, max_length=8)
    window = short.continuation(TEXT, "        return self.path\n")
    tokens = loaded[0].encode(TEXT + "        return self.path\n")
    assert list(window.tokens) == tokens[-9:] and window.num_scored <= 8


def _plain_answer(model, tokenizer, prompt, count):
    tokens = tokenizer.encode(prompt)
    start = len(tokens)
    for _ in range(count):
        token = int(_log_probs(model, tokens)[-1].argmax())
        if token == tokenizer.eos_id:
            break
        tokens.append(token)
    return tokenizer.decode(tokens[start:])


def test_answers_equal_a_plain_loop_and_end_at_the_stop(loaded, scorer, monkeypatch):
    tokenizer, model = loaded
    monkeypatch.setattr(scoring, "_STRIDE", 5)
    prompts = ["import os\nimport", "def f(x):\n    return", "class A:\n", "for i in"]
    stops = [scoring.Stop(12), scoring.Stop(12, ("\n",)), scoring.Stop(7)]
    stops.append(scoring.Stop(12))
    found = scorer.generate(prompts, stops)
    for prompt, stop, answer in zip(prompts, stops, found, strict=True):
        plain = _plain_answer(model, tokenizer, prompt, stop.max_new_tokens)
        assert answer == plain.split("\n")[0] if stop.texts else answer == plain
    assert any(found)


def test_no_room_for_a_prompt_is_told(loaded):
    short = scoring.Scorer(*loaded, max_length=8)
    with pytest.raises(ValueError, match="8 new tokens leave no room"):
        short.generate(["a"], [scoring.Stop(8)])


def test_draws_follow_the_key(scorer):
    stop = [scoring.Stop(8, temperature=1.5)]
    a, b = (scorer.generate(["def "], stop, jax.random.key(seed))[0] for seed in (1, 2))
    assert a == scorer.generate(["def "], stop, jax.random.key(1))[0] != b


def test_the_offline_tasks_are_those_of_the_generator():
    assert skill_tasks.FILE.read_text(encoding="utf-8") == skill_tasks.text()
    for line in skill_tasks.FILE.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert row["choices"][row["place"]] == row["answer"]
        assert len(set(row["choices"])) == 4


def test_without_the_harness_the_extra_is_named(capsys):
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        assert evaluate.main(["--model", "builtin", "--tasks", "skills_bits"]) == 2
        assert "pip install --editable '.[eval]'" in capsys.readouterr().err
    else:
        pytest.skip("lm-evaluation-harness is installed")


def test_the_harness_runs_the_offline_tasks(tmp_path, monkeypatch, scorer):
    pytest.importorskip("lm_eval", reason="needs the extra `eval`")
    monkeypatch.chdir(skill_tasks.FOLDER.parents[2])
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    output = tmp_path / "results.json"
    names = "skills_choice,skills_bits,skills_exact"
    arguments = ["--model", "builtin", "--tasks", names, "--limit", "6"]
    assert evaluate.main([*arguments, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    rows = [json.loads(x) for x in skill_tasks.FILE.read_text().splitlines()][:6]
    # The same by our own scorer, question by question.
    right = []
    for row in rows:
        prompt = row["instruction"] + "\n"
        windows = [scorer.continuation(prompt, choice) for choice in row["choices"]]
        likely = [score.log_likelihood for score in scorer.score(windows)]
        right.append(int(np.argmax(likely)) == row["place"])
    assert found["skills_choice"]["acc,none"] == pytest.approx(np.mean(right))
    texts = [row["instruction"] + "\n" + row["answer"] for row in rows]
    total = sum(
        score.log_likelihood
        for text in texts
        for score in scorer.score(scorer.rolling(text))
    )
    bits = -total / np.log(2) / sum(len(text.encode()) for text in texts)
    assert found["skills_bits"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    assert 0 <= found["skills_exact"]["exact_match,none"] <= 1

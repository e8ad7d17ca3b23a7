"""Pre-training from end to end, in small: text, tokenizer, training, files, figures."""

import textwrap

import numpy as np
import pytest

from clusterjax import data, models
from clusterjax.data.builtin import splits, stdlib_functions
from experiments import pretrain
from experiments.pretraining import card, tokens, training
from experiments.pretraining import text as text_lib

RECIPE = training.Recipe(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    rows=2,
    warmup_steps=3,
)


@pytest.fixture(scope="module")
def text():
    """Three modules of the library and a few tasks."""
    root = stdlib_functions.library_root()
    train, heldout = [], []
    for name in ("textwrap", "heapq", "fnmatch"):
        source = (root / f"{name}.py").read_text()
        tree = stdlib_functions.parse(source)
        kept, cut = text_lib._documents(name, source, tree, set())
        train += kept
        heldout += cut
    return text_lib.PretrainingText(train, heldout, ["What is 1 + 1?\n2\n"])


@pytest.fixture(scope="module")
def tokenizer(text):
    return tokens.train_tokenizer(text.train, RECIPE.vocab_size)


def test_twenty_steps_lower_the_loss_and_leave_a_model(text, tmp_path):
    facts = pretrain.run(tmp_path, text, RECIPE, num_steps=20)
    facts |= {"command": "…", "other_libraries": [], "remark": ""}
    # The first steps know nothing: the loss is that of guessing, ln(vocabulary).
    assert facts["final_loss"] < np.log(RECIPE.vocab_size) - 0.1
    tokenizer, model = models.load(tmp_path)
    assert model.config.vocab_size == RECIPE.vocab_size
    assert tokenizer.bos_token == tokens.BOS
    score = facts["heldout"]["standard library"]
    assert 1 < score["kneser_ney"] < score["model"] < 8
    page = card.render(facts)
    assert f"| {score['model']:.3f} | {score['kneser_ney']:.3f} |" in page
    assert "{" not in page


def test_a_stopped_run_goes_on_with_the_same_parameters(text, tokenizer, tmp_path):
    config = training.decoder_config(RECIPE, tokenizer)
    rows = tokens.pack(text.train, tokenizer)
    whole, losses = training.train(config, rows, RECIPE, 10)
    state = tmp_path / "state.npz"
    # Stopped before the rates fall, with another number of steps in view.
    with pytest.raises(KeyboardInterrupt):
        training.train(config, rows, RECIPE, 20, state, 4, _interrupt)
    resumed, resumed_losses = training.train(config, rows, RECIPE, 10, state, 4)
    assert resumed_losses == losses
    for path, value in whole.items():
        np.testing.assert_array_equal(value, resumed[path])


def _interrupt(step, params, loss):
    raise KeyboardInterrupt


def test_rows_hold_every_token_once(text, tokenizer):
    rows = tokens.pack(text.train, tokenizer)
    stream = np.concatenate([rows[0], *(row[1:] for row in rows[1:])])
    ids = []
    for document in text.train:
        ids += [tokenizer.bos_id, *tokenizer.encode(document), tokenizer.eos_id]
    np.testing.assert_array_equal(stream, ids[: len(stream)])
    assert len(ids) - len(stream) < tokens.ROW_TOKENS
    cut = tokens.halves(rows)
    assert cut.shape == (2 * len(rows), tokens.ROW_TOKENS // 2 + 1)
    targets = np.concatenate([cut[: len(rows), 1:], cut[len(rows) :, 1:]], axis=1)
    np.testing.assert_array_equal(targets, rows[:, 1:])


def test_each_pass_sees_every_row():
    order = tokens.row_order(10, count=3, seed=0)
    seen = np.concatenate([next(order) for _ in range(20)])
    for i in range(6):
        assert sorted(seen[10 * i : 10 * i + 10]) == list(range(10))


def test_bits_per_byte_do_not_depend_on_padding(text, tokenizer):
    """Scored one by one, without padding, in float64 sums."""
    config = training.decoder_config(RECIPE, tokenizer)
    params, _ = training.train(config, tokens.pack(text.train, tokenizer), RECIPE, 4)
    documents = text.heldout_stdlib[:3] + text.heldout_skills
    nats = 0.0
    for document in documents:
        row = np.asarray([[tokenizer.bos_id, *tokenizer.encode(document)]], np.int32)
        nats += float(np.sum(training.token_losses(config, params, row), dtype=float))
    expected = nats / np.log(2) / sum(len(d.encode()) for d in documents)
    found = training.bits_per_byte(config, params, tokenizer, documents)
    assert found == pytest.approx(expected, rel=1e-5)


def test_long_documents_are_cut_without_loss(tokenizer):
    document = "def f():\n" + "    x = 'é' + str(12)\n" * 200
    pieces = tokens.pieces(document, tokenizer)
    assert len(pieces) > 1
    assert "".join(pieces) == document
    assert all(len(tokenizer.encode(p)) <= tokens.ROW_TOKENS - 1 for p in pieces)


def test_tokenizer_splits_digits_and_keeps_every_byte(tokenizer):
    backend = tokenizer.backend
    assert [backend.decode([i]) for i in tokenizer.encode("2026")] == list("2026")
    text = "\tnaïve ☃ \x00 <|end|>"
    ids = tokenizer.encode(text)
    assert backend.decode(ids, skip_special_tokens=False) == text
    assert ids[-1] == tokenizer.eos_id


def test_heldout_functions_are_cut_from_the_text(tmp_path):
    names = [f"function_{i}" for i in range(60)]
    heldout = [n for n in names if splits.is_heldout(f"module.{n}")]
    kept = [n for n in names if n not in heldout]
    assert heldout
    body = "total = {0!r}\nreturn total + 'a body of its own'"
    functions = {
        n: f"def {n}():\n{textwrap.indent(body.format(n), '    ')}" for n in names
    }
    # A copy of a held-out body under a name of the training part.
    copy = (
        f"def {kept[0]}_copy():\n{textwrap.indent(body.format(heldout[0]), '        ')}"
    )
    assert not splits.is_heldout(f"module.{kept[0]}_copy")
    source = (
        '"""A module with many functions."""\n\n'
        + "\n\n".join([*functions.values(), copy])
        + "\n"
    )
    root, other = tmp_path / "library", tmp_path / "other"
    root.mkdir()
    other.mkdir()
    (root / "module.py").write_text(source)
    # Another Python's library, where a training function has a held-out name.
    moved = body.format(kept[1])
    (other / "module.py").write_text(
        f"def {heldout[0]}():\n{textwrap.indent(moved, '    ')}\n"
    )
    found = text_lib.collect(root, 100, [other])
    joined = "\n".join(found.train)
    assert '"""A module with many functions."""' in joined
    assert {n for n in names if f"def {n}()" in joined} == set(kept) - {kept[1]}
    assert "_copy" not in joined
    assert sorted(found.heldout_stdlib) == sorted(functions[n] + "\n" for n in heldout)
    assert not set(found.heldout_skills) & set(found.train)
    assert found.heldout_skills


def test_template_renders_one_begin_token(tokenizer):
    assert tokenizer.chat_template == tokens.CHAT_TEMPLATE
    assert not tokenizer.adds_bos
    assert data.tokenizer.Tokenizer is type(tokenizer)

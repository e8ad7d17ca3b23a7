"""The embedded model: size, form, and that it has learnt what its card says."""

import json
import pathlib
import re

import numpy as np
import pytest

from clusterjax import models
from clusterjax.data import chat
from clusterjax.data.builtin import stdlib_functions
from clusterjax.models import checkpoints
from experiments import kneser_ney
from experiments.pretraining import text as text_lib
from experiments.pretraining import tokens, training

ASSETS = pathlib.Path(checkpoints.__file__).parent / "assets" / "builtin"


@pytest.fixture(scope="module")
def loaded():
    return models.load("builtin")


@pytest.fixture(scope="module")
def text():
    return text_lib.collect(stdlib_functions.library_root(), 3000)


@pytest.fixture(scope="module")
def card():
    return (ASSETS / "MODEL_CARD.md").read_text()


def test_files_and_size(loaded):
    names = {path.name for path in ASSETS.iterdir()}
    assert names >= {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "MODEL_CARD.md",
    }
    assert sum(path.stat().st_size for path in ASSETS.iterdir()) <= 12e6
    config = json.loads((ASSETS / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    tokenizer, model = loaded
    assert tokenizer.vocab_size == model.config.vocab_size == 4096
    for name in ("bos", "eos", "pad"):
        assert config[f"{name}_token_id"] == getattr(tokenizer, f"{name}_id")


def test_number_of_parameters(loaded, card):
    _, model = loaded
    table = models.parameters.table(model.config)
    count = sum(int(np.prod(item.shape)) for item in table.values())
    assert 3e6 <= count <= 5e6
    assert f"{count:,} parameters" in card


def test_heldout_bits_per_byte_against_kneser_ney(loaded, text, card):
    """A tenth of the held-out functions; the card has the figures for all of them."""
    tokenizer, model = loaded
    sample = [
        piece
        for document in text.heldout_stdlib[::10]
        for piece in tokens.pieces(document, tokenizer)
    ]
    params = training.parameters_of(model)
    found = training.bits_per_byte(model.config, params, tokenizer, sample)
    baseline = kneser_ney.KneserNey([d.encode() for d in text.train], order=5)
    reference = baseline.bits_per_byte([d.encode() for d in sample])
    assert found <= 0.9 * reference
    for name in ("standard library", "skills"):
        row = next(line for line in card.splitlines() if line.startswith(f"| {name} "))
        stated = [float(n) for n in re.findall(r"\d\.\d{3}", row)]
        assert stated[0] <= 0.9 * stated[1], row
        if name == "standard library":
            # Sample and library differ; what the model saves over the 5-gram hardly.
            assert abs(found / reference - stated[0] / stated[1]) < 0.05


def test_chat_template(loaded):
    tokenizer, _ = loaded
    template = chat.load("auto", tokenizer)
    messages = [
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "2"},
    ]
    rendered = template.text(messages)
    assert rendered == "<|begin|><|user|>What is 1 + 1?<|end|><|assistant|>2<|end|>"
    ids = tokenizer.encode(rendered)
    assert ids.count(tokenizer.bos_id) == 1
    assert ids[-1] == tokenizer.eos_id
    roles = tokenizer.encode("<|user|><|assistant|>")
    assert len(roles) == 2 and set(roles) <= set(ids)


def test_the_model_continues_python(loaded):
    tokenizer, model = loaded
    prompt = [tokenizer.bos_id, *tokenizer.encode("def __repr__(self):")]
    (new,) = models.generate(model, [prompt], 12, end_ids=[tokenizer.eos_id])
    assert tokenizer.backend.decode(new.tolist()).startswith("\n    return ")


def test_saved_again_it_is_the_same(loaded, tmp_path):
    tokenizer, model = loaded
    models.save(model, tokenizer, tmp_path)
    again_tokenizer, again = models.load(tmp_path)
    assert again_tokenizer.fingerprint == tokenizer.fingerprint
    row = np.asarray([tokenizer.encode("def f(x):\n    return x")], np.int32)
    np.testing.assert_array_equal(model(row), again(row))

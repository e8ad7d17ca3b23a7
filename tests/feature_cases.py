"""Models and corpora that the feature tests share."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from clusterjax import datatypes, files
from clusterjax import mesh as meshes
from clusterjax.models import checkpoints, decoder, parameters

GOLDEN = pathlib.Path(__file__).parent / "golden" / "models"
GOLDEN_NAMES = sorted(path.name for path in GOLDEN.iterdir())


def golden(
    name: str,
) -> tuple[decoder.Decoder, datatypes.Corpus, dict[str, np.ndarray]]:
    """A golden model, its examples as a corpus, and what the reference computed."""
    model = checkpoints.load_decoder(GOLDEN / name)
    expected = dict(np.load(GOLDEN / name / "expected.npz"))
    examples = []
    for ids, mask, labels in zip(
        expected["input_ids"], expected["attention_mask"], expected["labels"]
    ):
        used = mask.astype(bool)
        examples.append((ids[used], labels[used] != -100))
    return model, corpus(examples), expected


def is_tied(name: str) -> bool:
    text = (GOLDEN / name / "config.json").read_text()
    return bool(json.loads(text)["tie_word_embeddings"])


def corpus(examples: list[tuple[np.ndarray, np.ndarray]]) -> datatypes.Corpus:
    """A corpus of (tokens, label mask) pairs."""
    lengths = [len(tokens) for tokens, _ in examples]
    count = len(examples)
    masks = [np.asarray(mask, bool).copy() for _, mask in examples]
    for mask in masks:
        mask[0] = False
    tokens = np.concatenate([np.asarray(t, np.int32) for t, _ in examples])
    hashes = [
        int(files.hash_arrays(np.asarray(t, np.int32), m)[:16], 16)
        for (t, _), m in zip(examples, masks)
    ]
    return datatypes.Corpus(
        tokens=tokens,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        label_mask=np.concatenate(masks),
        num_labels=np.array([m.sum() for m in masks], np.int32),
        user_weight=np.ones(count, np.float32),
        source_id=np.arange(count, dtype=np.int32) % 2,
        source_names=("even", "odd"),
        row=np.arange(count, dtype=np.int64),
        content_hash=np.array([[h, h ^ 1] for h in hashes], np.uint64),
        uid=np.array([f"test:{i}:{h:016x}" for i, h in enumerate(hashes)]),
        fingerprint=files.hash_arrays(np.array(hashes, np.uint64)),
        num_read=count,
    )


def random_corpus(
    rng: np.random.Generator, count: int, vocab: int, longest: int = 60
) -> datatypes.Corpus:
    """Examples of random lengths, each with a prompt and an answer."""
    examples = []
    for _ in range(count):
        length = int(rng.integers(4, longest + 1))
        prompt = int(rng.integers(1, length - 1))
        tokens = rng.integers(0, vocab, length).astype(np.int32)
        examples.append((tokens, np.arange(length) >= prompt))
    return corpus(examples)


def tiny_config(**changes) -> decoder.DecoderConfig:
    settings = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.2,
    }
    return decoder.DecoderConfig(**{**settings, **changes})


def tiny_model(**changes) -> decoder.Decoder:
    return decoder.Decoder(tiny_config(**changes), nnx.Rngs(0))


def relative(found, expected) -> float:
    found, expected = np.asarray(found), np.asarray(expected)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def assert_same_features(found_ND, expected_ND, tolerance=1e-5):
    """METHOD §1: difference ≤ 1e-5 · max(own norm, 0.01 · median norm), row by row."""
    found, expected = np.asarray(found_ND), np.asarray(expected_ND)
    assert found.shape == expected.shape
    norm = np.linalg.norm(expected, axis=1)
    bound = tolerance * np.maximum(norm, 0.01 * np.median(norm))
    difference = np.linalg.norm(found - expected, axis=1)
    assert (difference <= bound).all(), (difference / bound).max()


def assemble(config: decoder.DecoderConfig, arrays) -> decoder.Decoder:
    return checkpoints.assemble(config, arrays)


def sharded(model: decoder.Decoder, mesh) -> decoder.Decoder:
    """The model with its parameters placed as in training."""
    names = parameters.dimension_names(model.config)
    flat = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    placed = {}
    for path, variable in flat.items():
        array = variable[...]
        spec, _ = meshes.parameter_spec(names[path], array.shape, mesh)
        placed[path] = jax.device_put(array, NamedSharding(mesh, spec))
    return checkpoints.assemble(model.config, placed)

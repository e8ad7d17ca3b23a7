"""A tiny decoder, corpus and plan for tests of the trainer."""

from __future__ import annotations

import dataclasses

import numpy as np
import planning_cases
from flax import nnx

from clusterjax import allocation, config, datatypes
from clusterjax.models import checkpoints, decoder

VOCAB = 61
ROW_LENGTH = 48


def corpus(count: int = 40, seed: int = 0, longest: int = 40) -> datatypes.Corpus:
    """Random tokens; lengths from 5 to `longest`, prompts and answers of any length."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, longest + 1, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    prompts = np.array([rng.integers(1, n) for n in lengths])
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    return datatypes.Corpus(
        tokens=rng.integers(0, VOCAB, offsets[-1]).astype(np.int32),
        offsets=offsets,
        label_mask=position >= np.repeat(prompts, lengths),
        num_labels=(lengths - prompts).astype(np.int32),
        user_weight=np.ones(count, np.float32),
        source_id=(np.arange(count) % 3).astype(np.int32),
        source_names=("a", "b", "c"),
        row=np.arange(count),
        content_hash=np.zeros((count, 2), np.uint64),
        uid=np.array([f"s:{i}" for i in range(count)]),
        fingerprint=f"corpus-{count}-{seed}",
        num_read=count,
    )


def model(seed: int = 0, dtype: str = "float32", **changes) -> decoder.Decoder:
    """Two layers, 16 wide; tied output matrix unless told."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "tie_embeddings": True,
        "initializer_range": 0.1,
    }
    drawn = decoder.Decoder(
        decoder.DecoderConfig(**{**settings, **changes}), nnx.Rngs(seed)
    )
    if dtype == "float32":
        return drawn
    # The same numbers in another type.
    wide = dataclasses.replace(drawn.config, param_dtype=dtype, compute_dtype=dtype)
    state = nnx.state(drawn, nnx.Param)
    arrays = {tuple(p): v[...].astype(dtype) for p, v in nnx.to_flat_state(state)}
    return checkpoints.assemble(wide, arrays)


def schedule(
    data: datatypes.Corpus,
    sizes: tuple[int, ...] = (20, 12, 8),
    *,
    normalise: str = "token",
    weighting: str = "share",
    **settings,
) -> allocation.Schedule:
    """A schedule over clusters of these sizes that keeps every example."""
    plan = planning_cases.plan(
        list(sizes),
        num_labels=data.num_labels,
        normalise=normalise,
        weighting=weighting,
    )
    defaults = {"batch_size": 16, "num_epochs": 1, "row_length": ROW_LENGTH}
    cfg = config.AllocationConfig(**{**defaults, **settings})
    return allocation.allocate(plan, data.lengths, data.num_labels, cfg)

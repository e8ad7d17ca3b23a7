"""Training of the embedded model from random values, and its score in bits."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax import contrib

from clusterjax import files, progress
from clusterjax.data import tokenizer as tokenizer_lib
from clusterjax.models import checkpoints, decoder, parameters
from experiments.pretraining import tokens

Params = dict[parameters.Path, jax.Array]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What decides the model, besides the text.

    Attributes:
      vocab_size: entries of the tokenizer, special tokens included.
      hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim:
        as in `DecoderConfig`.
      rows: rows of `tokens.ROW_TOKENS` tokens in a step.
      learning_rate: peak of Muon, for the matrices of the blocks.
      adam_learning_rate: peak of Adam, for embedding and norms.
      weight_decay: of the matrices of the blocks, times the learning rate.
      warmup_steps: steps of the linear rise of both rates; then they are constant.
      decay_fraction: last share of the steps, in which they fall linearly to zero.
        Before it, rows are cut in half, which makes attention cheaper.
      seed: of the initial values and of the order of the rows.
    """

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 640
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rows: int = 8
    learning_rate: float = 0.02
    adam_learning_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup_steps: int = 50
    decay_fraction: float = 0.3
    seed: int = 0


def decoder_config(
    recipe: Recipe, tokenizer: tokenizer_lib.Tokenizer
) -> decoder.DecoderConfig:
    """The decoder of a recipe, with the token ids that config.json keeps."""
    source = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    names = (field.name for field in dataclasses.fields(decoder.DecoderConfig))
    shape = {n: getattr(recipe, n) for n in names if hasattr(recipe, n)}
    return decoder.DecoderConfig(
        **shape,
        max_positions=tokens.ROW_TOKENS,
        tie_embeddings=True,
        source_json=json.dumps(source),
    )


def optimizer(recipe: Recipe, num_steps: int) -> optax.GradientTransformation:
    """Muon on the matrices of the blocks (arXiv 2502.16982), Adam on the rest."""
    decay = round(recipe.decay_fraction * num_steps)
    warmup = min(recipe.warmup_steps, num_steps - decay)

    def schedule(peak: float) -> optax.Schedule:
        return optax.join_schedules(
            [
                optax.linear_schedule(peak / (warmup + 1), peak, warmup),
                optax.constant_schedule(peak),
                optax.linear_schedule(peak, 0.0, decay),
            ],
            [warmup, num_steps - decay],
        )

    def matrix_axes(params: Params) -> dict[parameters.Path, Any]:
        # The first axis counts layers: each layer is a matrix of its own.
        axes = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
        return {path: axes if path[-1] == "kernel" else None for path in params}

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        contrib.muon(
            schedule(recipe.learning_rate),
            weight_decay=recipe.weight_decay,
            adam_b2=0.98,
            adam_learning_rate=schedule(recipe.adam_learning_rate),
            muon_weight_dimension_numbers=matrix_axes,  # pyright: ignore
        ),
    )


def parameters_of(model: decoder.Decoder) -> Params:
    """The parameters of a decoder, by path."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {tuple(map(str, path)): variable[...] for path, variable in flat}


def token_losses(
    config: decoder.DecoderConfig, params: Params, rows_BT: jax.Array
) -> jax.Array:
    """float32 [B, T − 1]: −log p of each token after the first, in nats."""
    model = checkpoints.assemble(config, params)
    return optax.softmax_cross_entropy_with_integer_labels(
        model(rows_BT[:, :-1]), rows_BT[:, 1:]
    )


def train(
    config: decoder.DecoderConfig,
    rows: np.ndarray,
    recipe: Recipe,
    num_steps: int,
    state_file: pathlib.Path | None = None,
    save_every: int = 100,
    on_save: Callable[[int, Params, float], None] = lambda step, params, loss: None,
) -> tuple[Params, list[float]]:
    """Trains from random values, or from where `state_file` stopped.

    Before the rates fall, a state does not depend on `num_steps`: a run may be
    stopped there and go on with another number.

    Args:
      config: the decoder.
      rows: int32 [rows, T + 1], from `tokens.pack`.
      recipe: batch size, learning rates and seed.
      num_steps: optimiser steps.
      state_file: where the state is kept between steps.
      save_every: steps between two savings.
      on_save: called then with (steps done, parameters, mean loss since the last).

    Returns:
      The parameters by path, and the training loss of each step in nats per token.
    """
    params = parameters_of(decoder.Decoder(config, nnx.Rngs(recipe.seed)))
    transform = optimizer(recipe, num_steps)
    state = (params, transform.init(params))
    losses: list[float] = []
    if state_file is not None and state_file.exists():
        state, losses = _read_state(state_file, state)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, rows_BT: jax.Array) -> tuple[Any, jax.Array]:
        def mean_loss(params: Params) -> jax.Array:
            return token_losses(config, params, rows_BT).mean()

        params, opt_state = state
        loss, gradient = jax.value_and_grad(mean_loss)(params)
        updates, opt_state = transform.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    num_short = num_steps - round(recipe.decay_fraction * num_steps)
    order = itertools.islice(
        tokens.row_order(len(rows), recipe.rows, recipe.seed), len(losses), num_steps
    )
    count = recipe.rows * tokens.ROW_TOKENS
    total = (num_steps - len(losses)) * count
    with progress.track("pretrain", total, "tokens") as advance:
        for chosen in order:
            short = len(losses) < num_short
            state, loss = step(
                state, tokens.halves(rows[chosen]) if short else rows[chosen]
            )
            losses.append(float(loss))
            advance(count)
            if len(losses) % save_every == 0:
                if state_file is not None:
                    _write_state(state_file, state, losses)
                on_save(len(losses), state[0], float(np.mean(losses[-save_every:])))
    return state[0], losses


def _write_state(path: pathlib.Path, state: Any, losses: list[float]) -> None:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]

    def write(partial: os.PathLike[str]) -> None:
        with open(partial, "wb") as file:
            np.savez(file, np.asarray(losses), *leaves)

    files.write_with(path, write)


def _read_state(path: pathlib.Path, like: Any) -> tuple[Any, list[float]]:
    with np.load(path) as stored:
        losses, *leaves = (stored[f"arr_{i}"] for i in range(len(stored.files)))
    state = jax.tree.unflatten(jax.tree.structure(like), map(jnp.asarray, leaves))
    return state, losses.tolist()


def bits_per_byte(
    config: decoder.DecoderConfig,
    params: Params,
    tokenizer: tokenizer_lib.Tokenizer,
    texts: Sequence[str],
) -> float:
    """Bits the model spends on each byte of `texts`, each after one begin token.

    The end token is not counted, so that the figure compares with a byte model's.
    """
    encodings = sorted(
        (
            np.asarray(encoding.ids, np.int32)
            for encoding in tokenizer.encode_batch(texts)
        ),
        key=len,
    )
    evaluate = jax.jit(lambda params, rows: token_losses(config, params, rows))
    begin_id = tokenizer.encode(tokens.BOS)[0]
    nats = 0.0
    batch = 32
    for i in range(0, len(encodings), batch):
        group = encodings[i : i + batch]
        # Few widths, so that few programs are compiled.
        width = 64 * math.ceil((len(group[-1]) + 1) / 64)
        rows = np.full((batch, width), tokenizer.pad_id, np.int32)
        real = np.zeros((batch, width - 1), bool)
        for row, ids in enumerate(group):
            rows[row, 0] = begin_id
            rows[row, 1 : len(ids) + 1] = ids
            real[row, : len(ids)] = True
        losses = np.asarray(evaluate(params, rows), np.float64)
        nats += losses[real].sum()
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)

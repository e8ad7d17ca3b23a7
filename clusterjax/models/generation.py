"""Text generation with a key-value cache, greedy or by temperature."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from clusterjax.models import attention, decoder

# Prompts are padded to a multiple of this, so that few lengths are compiled.
_PROMPT_MULTIPLE = 32


class _Loop(NamedTuple):
    """State of the generation loop; n new tokens have been written so far."""

    n: jax.Array
    last_B: jax.Array
    done_B: jax.Array
    new_BN: jax.Array
    cache: tuple[jax.Array, jax.Array]  # keys, values [layers, B, slots, kv, head_dim]


def generate(
    model: decoder.Decoder,
    prompts: Sequence[Sequence[int] | np.ndarray],
    max_new_tokens: int,
    *,
    end_ids: Sequence[int] = (),
    temperature: float = 0.0,
    key: jax.Array | None = None,
    adapters: decoder.Adapters | None = None,
    row_sharding: jax.sharding.Sharding | None = None,
) -> list[np.ndarray]:
    """Continues each prompt; all prompts go through the model as one batch.

    Args:
      model: the decoder.
      prompts: token ids of each prompt, at least one token each.
      max_new_tokens: most tokens that are added to a prompt.
      end_ids: tokens that end an answer.
      temperature: 0 takes the likeliest token; otherwise logits are divided by it and
        a token is drawn.
      key: JAX key of the draws; needed when temperature > 0.
      adapters: additions to the linear layers, shared by all rows (LoRA).
      row_sharding: sharding of the rows of the batch; None: the default.

    Returns:
      For each prompt the new tokens, int32, up to and including an end token.

    Raises:
      ValueError: an empty prompt, or temperature > 0 without a key.
    """
    if not prompts:
        return []
    if min(len(prompt) for prompt in prompts) == 0:
        raise ValueError("every prompt needs at least one token")
    if temperature > 0 and key is None:
        raise ValueError(f"temperature={temperature} needs a key")
    longest = max(len(prompt) for prompt in prompts)
    length = -(-longest // _PROMPT_MULTIPLE) * _PROMPT_MULTIPLE
    tokens_BT = np.zeros((len(prompts), length), np.int32)
    valid_BT = np.zeros((len(prompts), length), bool)
    for row, prompt in enumerate(prompts):
        # Padding goes left, so that every row adds its next token in the same slot.
        tokens_BT[row, length - len(prompt) :] = prompt
        valid_BT[row, length - len(prompt) :] = True
    graph, params = nnx.split(model)
    new_BN = _generate(
        graph,
        params,
        adapters,
        jax.device_put(tokens_BT, row_sharding),
        jax.device_put(valid_BT, row_sharding),
        jax.random.key(0) if key is None else key,
        temperature,
        max_new_tokens=max_new_tokens,
        end_ids=tuple(end_ids),
        greedy=temperature == 0,
    )
    return [_until_end(row, end_ids) for row in np.asarray(new_BN)]


def _until_end(row: np.ndarray, end_ids: Sequence[int]) -> np.ndarray:
    (ends,) = np.nonzero(np.isin(row, end_ids))
    return row[: ends[0] + 1] if ends.size else row


@functools.partial(
    jax.jit, static_argnames=("graph", "max_new_tokens", "end_ids", "greedy")
)
def _generate(
    graph: Any,
    params: Any,
    adapters: decoder.Adapters | None,
    tokens_BT: jax.Array,
    valid_BT: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    *,
    max_new_tokens: int,
    end_ids: tuple[int, ...],
    greedy: bool,
) -> jax.Array:
    """Returns new tokens [B, max_new_tokens]; what follows an end token is junk."""
    model = nnx.merge(graph, params)
    batch, length = tokens_BT.shape
    prompt_B = jnp.sum(valid_BT, axis=1, dtype=jnp.int32)
    slots_valid_BS = jnp.pad(
        valid_BT, ((0, 0), (0, max_new_tokens)), constant_values=True
    )
    ends_1E = jnp.asarray(end_ids, jnp.int32).reshape(1, -1)

    def choose(hidden_BH, n):
        logits_BV = model.logits(hidden_BH)
        if greedy:
            return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        scaled_BV = logits_BV / temperature
        draw_B = jax.random.categorical(jax.random.fold_in(key, n), scaled_BV)
        return draw_B.astype(jnp.int32)

    def record(state: _Loop, token_B, cache) -> _Loop:
        new_BN = jax.lax.dynamic_update_slice(
            state.new_BN, token_B[:, None], (0, state.n)
        )
        done_B = state.done_B | jnp.any(token_B[:, None] == ends_1E, axis=1)
        return _Loop(state.n + 1, token_B, done_B, new_BN, cache)

    def step(state: _Loop) -> _Loop:
        hidden_BTH, cache = _extend(
            model,
            state.last_B[:, None],
            (prompt_B + state.n - 1)[:, None],
            state.cache,
            slots_valid_BS,
            length + state.n - 1,
            adapters,
        )
        return record(state, choose(hidden_BTH[:, 0], state.n), cache)

    hidden_BTH, cache = _prefill(model, tokens_BT, valid_BT, max_new_tokens, adapters)
    empty = _Loop(
        n=jnp.int32(0),
        last_B=jnp.zeros(batch, jnp.int32),
        done_B=jnp.zeros(batch, bool),
        new_BN=jnp.zeros((batch, max_new_tokens), jnp.int32),
        cache=cache,
    )
    first = record(empty, choose(hidden_BTH[:, -1], 0), cache)
    last = jax.lax.while_loop(
        lambda state: (state.n < max_new_tokens) & ~jnp.all(state.done_B), step, first
    )
    return last.new_BN


def _prefill(
    model: decoder.Decoder,
    tokens_BT: jax.Array,
    valid_BT: jax.Array,
    num_free: int,
    adapters: decoder.Adapters | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Runs the prompts; returns hidden states and the cache with room for more."""
    segment_ids = valid_BT.astype(jnp.int32)
    positions = attention.positions_from_segments(segment_ids)

    def attend(q, k, v, window, _):
        mixed = attention.attend(q, k, v, segment_ids, window, mesh=model.mesh)
        return mixed, (k, v)

    hidden_BTH, kept = model.run(tokens_BT, positions, attend, adapters=adapters)
    widths = ((0, 0), (0, 0), (0, num_free), (0, 0), (0, 0))
    keys, values = (jnp.pad(item, widths) for item in kept)
    return hidden_BTH, (keys, values)


def _extend(
    model: decoder.Decoder,
    token_B1: jax.Array,
    position_B1: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    slots_valid_BS: jax.Array,
    slot: jax.Array,
    adapters: decoder.Adapters | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Runs one new token per row, which takes `slot` of the cache."""

    def attend(q, k, v, window, layer_cache):
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(old, new, slot, axis=1)
            for old, new in zip(layer_cache, (k, v), strict=True)
        )
        mixed = attention.attend_cached(q, keys, values, slots_valid_BS, slot, window)
        return mixed, (k, v)

    hidden_BTH, new = model.run(token_B1, position_B1, attend, cache, adapters=adapters)
    # Only the new slot is written, in place, instead of every layer's whole cache.
    keys, values = (
        jax.lax.dynamic_update_slice_in_dim(old, item, slot, axis=2)
        for old, item in zip(cache, new, strict=True)
    )
    return hidden_BTH, (keys, values)

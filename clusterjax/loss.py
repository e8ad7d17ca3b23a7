"""Token losses without logits: label positions only, the vocabulary in chunks.

A batch of 8 rows of 2,048 tokens with a vocabulary of 152k would need 10 GB for its
logits alone, most of it for positions that carry no label. Here the label positions
are first packed into a buffer of static size, [P, H], and the output matrix then
passes by in chunks of rows, with an online log-sum-exp; the backward pass computes
the chunks again. No array is larger than [P, chunk] or the output matrix itself.

The chance of the label enters through its log odds against all other classes,

    a = log Σ_{v≠y} exp(z_v) − z_y,    nll = softplus(a),    1 − p_y = sigmoid(a),

so that neither a loss nor a 1 − p_y near zero is the difference of two numbers near
one (METHOD §1). P = packed label positions; other letters as in `datatypes`.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

Carry = TypeVar("Carry")


class Labels(NamedTuple):
    """Label positions of a batch, packed; P = num_shards · size, padded.

    Attributes:
      index_P: int32, position in the flattened batch [B · T], 0 where not valid.
      valid_P: bool, whether the slot holds a label position.
      overflow: bool [num_shards], whether a label position found no slot.
    """

    index_P: jax.Array
    valid_P: jax.Array
    overflow: jax.Array

    def take(self, array_BT: jax.Array) -> jax.Array:
        """Returns [P, ...], the entries of [B, T, ...] at the label positions."""
        shards = self.overflow.shape[0]
        rest = array_BT.shape[2:]
        rows = array_BT.reshape(shards, -1, *rest)
        # Indices stay inside their shard, so that no data crosses the network.
        local = self.index_P.reshape(shards, -1)
        local = local - jnp.arange(shards, dtype=local.dtype)[:, None] * rows.shape[1]
        picked = jax.vmap(lambda x, i: x.at[i].get(mode="promise_in_bounds"))(
            rows, jnp.maximum(local, 0)
        )
        return picked.reshape(-1, *rest)


def find_labels(mask_BT: jax.Array, size: int, num_shards: int = 1) -> Labels:
    """Lists the positions where `mask_BT` is true, shard by shard.

    Args:
      mask_BT: bool, true where the next token is a label.
      size: slots of each shard; static, at least the largest number of labels in
        any shard's rows (`overflow` tells when it is not).
      num_shards: R, equal groups of rows that are packed apart, so that rows sharded
        over R devices are packed where they are; divides B.
    """
    mask = mask_BT.reshape(num_shards, -1)
    width = mask.shape[1]
    find = jax.vmap(lambda row: jnp.nonzero(row, size=size, fill_value=0)[0])
    index = find(mask).astype(jnp.int32)
    count = jnp.sum(mask, axis=1, dtype=jnp.int32)
    valid = jnp.arange(size)[None, :] < count[:, None]
    first = jnp.arange(num_shards, dtype=jnp.int32)[:, None] * width
    return Labels((index + first).reshape(-1), valid.reshape(-1), count > size)


def gather_labels(
    hidden_BTH: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    size: int,
    num_shards: int = 1,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Packs the positions of non-zero weight into a buffer of static size.

    Args:
      hidden_BTH: hidden states after the final norm.
      targets_BT: int32, the token that each position predicts.
      weights_BT: float, 0 where there is no label.
      size, num_shards: as in `find_labels`.

    Returns:
      hidden_PH, targets_P and weights_P, with weight 0 in unused slots. Labels that
      find no slot make the weights NaN: wrong sizes are loud, never a smaller loss.
    """
    labels = find_labels(weights_BT != 0, size, num_shards)
    weights_P = jnp.where(labels.valid_P, labels.take(weights_BT), 0)
    weights_P = jnp.where(jnp.any(labels.overflow), jnp.nan, weights_P)
    targets_P = jnp.where(labels.valid_P, labels.take(targets_BT), 0)
    return labels.take(hidden_BTH), targets_P, weights_P


def weighted_nll(
    hidden_BTH: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    matrix_VH: jax.Array,
    *,
    size: int,
    num_shards: int = 1,
    vocab_chunk: int = 8192,
    vocab_shards: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Σ u_it ℓ_it over a batch (METHOD §4), and the unweighted sum of its ℓ_it.

    Args:
      hidden_BTH, targets_BT, weights_BT, size, num_shards: as in `gather_labels`.
      matrix_VH, vocab_chunk, vocab_shards: as in `token_nll`.

    Returns:
      Two float32 scalars (float64 under x64): the weighted sum and, for metrics
      only, Σ ℓ_it over the positions of non-zero weight.
    """
    hidden_PH, targets_P, weights_P = gather_labels(
        hidden_BTH, targets_BT, weights_BT, size, num_shards
    )
    nll_P = token_nll(hidden_PH, targets_P, matrix_VH, vocab_chunk, vocab_shards)
    plain = jax.lax.stop_gradient(jnp.sum(jnp.where(weights_P != 0, nll_P, 0)))
    return jnp.sum(weights_P * nll_P), plain


def token_nll(
    hidden_PH: jax.Array,
    targets_P: jax.Array,
    matrix_VH: jax.Array,
    vocab_chunk: int = 8192,
    vocab_shards: int = 1,
) -> jax.Array:
    """Returns −log p(target) of each position, [P] float32 (float64 under x64), nats.

    Differentiable in `hidden_PH` and `matrix_VH`; works under vmap, jit and sharding.

    Args:
      hidden_PH: hidden states after the final norm; products are in this type.
      targets_P: int32 in [0, V).
      matrix_VH: output matrix.
      vocab_chunk: rows of the matrix that are looked at together, about.
      vocab_shards: devices over which the rows of the matrix are sharded; each chunk
        then takes its rows from all of them. Divides V.
    """
    nll_P = _token_nll(hidden_PH, targets_P, matrix_VH, vocab_chunk, vocab_shards)
    return typing.cast(jax.Array, nll_P)


def log_odds(
    hidden_PH: jax.Array,
    targets_P: jax.Array,
    matrix_VH: jax.Array,
    vocab_chunk: int = 8192,
    vocab_shards: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Returns a = log Σ_{v≠y} exp(z_v) − z_y and log Σ_v exp(z_v), both [P].

    Arguments as in `token_nll`; not differentiable in reverse mode at low memory.
    """
    dtype = accumulator_dtype(hidden_PH.dtype)
    target_logit_P = _target_logits(hidden_PH, targets_P, matrix_VH)

    def add(carry, logits_PC, chunk: Chunk):
        top_P, sum_P = carry
        others_PC = jnp.where(chunk.is_other(targets_P), logits_PC, -jnp.inf)
        new_top_P = jnp.maximum(top_P, jnp.max(others_PC, axis=1))
        sum_P = sum_P * jnp.exp(top_P - new_top_P) + jnp.sum(
            jnp.exp(others_PC - new_top_P[:, None]), axis=1
        )
        return new_top_P, sum_P

    # A finite start, since −inf − (−inf) is NaN in a chunk that holds only the label.
    lowest = jnp.finfo(dtype).min
    start = (jnp.full_like(target_logit_P, lowest), jnp.zeros_like(target_logit_P))
    top_P, sum_P = over_vocabulary(
        add, start, hidden_PH, matrix_VH, vocab_chunk, vocab_shards
    )
    others_P = top_P + jnp.log(sum_P)
    return others_P - target_logit_P, jnp.logaddexp(others_P, target_logit_P)


def expected_rows(
    hidden_PH: jax.Array,
    targets_P: jax.Array,
    matrix_VH: jax.Array,
    embed: Callable[[Chunk], jax.Array],
    width: int,
    vocab_chunk: int = 8192,
    vocab_shards: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Σ_v (p_v − [v = y]) E_v for any rows E of the vocabulary, in one pass.

    With the output matrix as E this is the gradient of the loss with respect to the
    hidden state, at the cost of one more product and no second pass; with a random
    projection it is the projected logit gradient. The label's term is
    −(1 − p_y) E_y with 1 − p_y summed over the other classes.

    Args:
      hidden_PH, targets_P, matrix_VH, vocab_chunk, vocab_shards: as in `token_nll`.
      embed: chunk → its rows of E, [C, X], in a type to compute in.
      width: X.

    Returns:
      The log odds a [P] of `log_odds`, and the sums [P, X] in float32 (float64).
    """
    dtype = accumulator_dtype(hidden_PH.dtype)
    target_logit_P = _target_logits(hidden_PH, targets_P, matrix_VH)

    def add(carry, logits_PC, chunk: Chunk):
        top_P, sum_P, others_PX, label_PX = carry
        rows_CX = embed(chunk)
        others_PC = jnp.where(chunk.is_other(targets_P), logits_PC, -jnp.inf)
        new_top_P = jnp.maximum(top_P, jnp.max(others_PC, axis=1))
        shrink_P = jnp.exp(top_P - new_top_P)
        mass_PC = jnp.exp(others_PC - new_top_P[:, None])
        sum_P = sum_P * shrink_P + jnp.sum(mass_PC, axis=1)
        others_PX = others_PX * shrink_P[:, None] + jnp.einsum(
            "pc,cx->px",
            mass_PC.astype(rows_CX.dtype),
            rows_CX,
            preferred_element_type=dtype,
        )
        place_P, here_P = chunk.find(targets_P)
        label_PX = jnp.where(here_P[:, None], rows_CX[place_P], label_PX)
        return new_top_P, sum_P, others_PX, label_PX

    zeros_PX = jnp.zeros((len(targets_P), width), dtype)
    start = (
        jnp.full_like(target_logit_P, jnp.finfo(dtype).min),
        jnp.zeros_like(target_logit_P),
        zeros_PX,
        zeros_PX,
    )
    top_P, sum_P, others_PX, label_PX = over_vocabulary(
        add, start, hidden_PH, matrix_VH, vocab_chunk, vocab_shards
    )
    margin_P = top_P + jnp.log(sum_P) - target_logit_P
    miss_P1 = jax.nn.sigmoid(margin_P)[:, None]
    # p_v = (mass of v / mass of the others) · (1 − p_y).
    return margin_P, miss_P1 * (others_PX / sum_P[:, None] - label_PX)


class Chunk(NamedTuple):
    """Some rows of the output matrix.

    Attributes:
      rows_CH: the rows, in the type of the hidden states.
      vocab_C: int32, their token ids.
      fresh_C: bool, false for rows that an earlier chunk has already shown.
      start: first row of the chunk inside each vocabulary shard.
      shape: vocabulary shards, rows from each.
      per_shard: vocabulary of a shard.
    """

    rows_CH: jax.Array
    vocab_C: jax.Array
    fresh_C: jax.Array
    start: jax.Array
    shape: tuple[int, int]
    per_shard: int

    def is_other(self, targets_P: jax.Array) -> jax.Array:
        """bool [P, C]: a class of this chunk, seen first here, and not the target."""
        other_PC = targets_P[:, None] != self.vocab_C[None, :]
        return other_PC & self.fresh_C[None, :]

    def find(self, targets_P: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Place of each target in the chunk (0 if absent), and whether it is there."""
        shards, size = self.shape
        shard_P, inside_P = jnp.divmod(targets_P, self.per_shard)
        inside_P = inside_P - self.start
        here_P = (inside_P >= 0) & (inside_P < size) & (shard_P < shards)
        return jnp.where(here_P, shard_P * size + inside_P, 0), here_P


def over_vocabulary(
    add: Callable[[Carry, jax.Array, Chunk], Carry],
    start: Carry,
    hidden_PH: jax.Array,
    matrix_VH: jax.Array,
    vocab_chunk: int,
    vocab_shards: int = 1,
) -> Carry:
    """Folds `add(carry, logits_PC, chunk)` over the vocabulary.

    Chunks are of one size; when that does not divide V, the last one overlaps its
    neighbour and says so in `fresh_C` (padding would copy the matrix).
    """
    vocab, width = matrix_VH.shape
    if vocab % vocab_shards:
        raise ValueError(f"vocab_shards={vocab_shards} does not divide V={vocab}")
    matrix_SWH = matrix_VH.reshape(vocab_shards, vocab // vocab_shards, width)
    per_shard = matrix_SWH.shape[1]
    count = -(-vocab // max(vocab_chunk, 1))
    size = -(-per_shard // count)
    count = -(-per_shard // size)
    dtype = accumulator_dtype(hidden_PH.dtype)

    def body(carry, i):
        begin = jnp.minimum(i * size, per_shard - size)
        rows = jax.lax.dynamic_slice_in_dim(matrix_SWH, begin, size, axis=1)
        rows_CH = rows.reshape(-1, width).astype(hidden_PH.dtype)
        inside = begin + jnp.arange(size, dtype=jnp.int32)
        first = jnp.arange(vocab_shards, dtype=jnp.int32) * per_shard
        chunk = Chunk(
            rows_CH,
            (first[:, None] + inside[None, :]).reshape(-1),
            jnp.tile(inside >= i * size, vocab_shards),
            begin,
            (vocab_shards, size),
            per_shard,
        )
        logits_PC = jnp.einsum(
            "ph,ch->pc", hidden_PH, rows_CH, preferred_element_type=dtype
        )
        return add(carry, logits_PC, chunk), None

    return jax.lax.scan(body, start, jnp.arange(count, dtype=jnp.int32))[0]


def accumulator_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """float32 for float32 and narrower types, float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def _target_logits(
    hidden_PH: jax.Array, targets_P: jax.Array, matrix_VH: jax.Array
) -> jax.Array:
    rows_PH = jnp.take(matrix_VH, targets_P, axis=0).astype(hidden_PH.dtype)
    dtype = accumulator_dtype(hidden_PH.dtype)
    return jnp.einsum("ph,ph->p", hidden_PH, rows_PH, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _token_nll(hidden_PH, targets_P, matrix_VH, vocab_chunk, vocab_shards):
    margin_P, _ = log_odds(hidden_PH, targets_P, matrix_VH, vocab_chunk, vocab_shards)
    return jax.nn.softplus(margin_P)


def _token_nll_forward(hidden_PH, targets_P, matrix_VH, vocab_chunk, vocab_shards):
    margin_P, lse_P = log_odds(
        hidden_PH, targets_P, matrix_VH, vocab_chunk, vocab_shards
    )
    kept = (hidden_PH, targets_P, matrix_VH, margin_P, lse_P)
    return jax.nn.softplus(margin_P), kept


def _token_nll_backward(vocab_chunk, vocab_shards, kept, cotangent_P):
    """d nll / d z_v = p_v − [v = y], with p_y − 1 = −sigmoid(a)."""
    hidden_PH, targets_P, matrix_VH, margin_P, lse_P = kept
    dtype = accumulator_dtype(hidden_PH.dtype)
    vocab, width = matrix_VH.shape
    miss_P = jax.nn.sigmoid(margin_P)

    def add(carry, logits_PC, chunk: Chunk):
        d_hidden_PH, d_matrix_SWH = carry
        p_PC = jnp.where(chunk.fresh_C[None, :], jnp.exp(logits_PC - lse_P[:, None]), 0)
        is_target = targets_P[:, None] == chunk.vocab_C[None, :]
        error_PC = jnp.where(is_target & chunk.fresh_C[None, :], -miss_P[:, None], p_PC)
        error_PC = (error_PC * cotangent_P[:, None]).astype(hidden_PH.dtype)
        d_hidden_PH = d_hidden_PH + jnp.einsum(
            "pc,ch->ph", error_PC, chunk.rows_CH, preferred_element_type=dtype
        )
        d_rows_CH = jnp.einsum(
            "pc,ph->ch", error_PC, hidden_PH, preferred_element_type=dtype
        )
        d_rows = d_rows_CH.reshape(vocab_shards, -1, width)
        at = (jnp.zeros_like(chunk.start), chunk.start, jnp.zeros_like(chunk.start))
        earlier = jax.lax.dynamic_slice(d_matrix_SWH, at, d_rows.shape)
        d_matrix_SWH = jax.lax.dynamic_update_slice(d_matrix_SWH, earlier + d_rows, at)
        return d_hidden_PH, d_matrix_SWH

    start = (
        jnp.zeros(hidden_PH.shape, dtype),
        jnp.zeros((vocab_shards, vocab // vocab_shards, width), dtype),
    )
    d_hidden_PH, d_matrix_SWH = over_vocabulary(
        add, start, hidden_PH, matrix_VH, vocab_chunk, vocab_shards
    )
    d_matrix_VH = d_matrix_SWH.reshape(vocab, width).astype(matrix_VH.dtype)
    return d_hidden_PH.astype(hidden_PH.dtype), None, d_matrix_VH


_token_nll.defvjp(_token_nll_forward, _token_nll_backward)

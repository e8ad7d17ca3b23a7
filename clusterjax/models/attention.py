"""Causal self-attention over packed rows, behind one function."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def positions_from_segments(segment_ids_BT: jax.Array) -> jax.Array:
    """Returns positions [B, T] int32 that restart at 0 where the segment changes."""
    index_T = jnp.arange(segment_ids_BT.shape[1], dtype=jnp.int32)
    changes_BT = jnp.concatenate(
        [
            jnp.ones_like(segment_ids_BT[:, :1], dtype=bool),
            segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1],
        ],
        axis=1,
    )
    start_BT = jax.lax.cummax(jnp.where(changes_BT, index_T[None], 0), axis=1)
    return index_T[None] - start_BT


def visible(
    num_queries: int,
    num_keys: int,
    segment_ids_BT: jax.Array | None,
    window: int | None,
) -> jax.Array:
    """Returns the mask [B or 1, 1, query, key]: same segment, not later, in window."""
    query_T = jnp.arange(num_queries)[:, None]
    key_T = jnp.arange(num_keys)[None, :]
    mask = key_T <= query_T
    if window is not None:
        mask = mask & (query_T - key_T < window)
    mask = mask[None, None]
    if segment_ids_BT is not None:
        same = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
        mask = mask & same[:, None]
    return mask


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Causal attention inside each segment of each row.

    Args:
      q: [B, T, heads, head_dim], already rotated.
      k: [B, T, kv_heads, head_dim], already rotated; kv_heads divides heads.
      v: [B, T, kv_heads, head_dim].
      segment_ids_BT: int32 example number in the row, 0 for padding; None: one
        segment a row. Padding sees only padding, so it stays finite and never
        reaches an example.
      window: a query sees at most this many newest keys, itself included.

    Returns:
      [B, T, heads, head_dim] in the dtype of q. The softmax is in float32 (float64
      for float64 inputs).
    """
    mask = visible(q.shape[1], k.shape[1], segment_ids_BT, window)
    if q.dtype == jnp.float64:
        return _attend_wide(q, k, v, mask)
    return jax.nn.dot_product_attention(q, k, v, mask=mask)


def _attend_wide(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
) -> jax.Array:
    """Attention in float64, where `dot_product_attention` would round to float32."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[3] ** 0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e300), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def attend_cached(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    key_valid_BS: jax.Array,
    query_slot: jax.Array,
    window: int | None = None,
) -> jax.Array:
    """Attention of one new token per row over the slots of a cache.

    Args:
      q: [B, 1, heads, head_dim], already rotated.
      k: [B, slots, kv_heads, head_dim], already rotated, the new key included.
      v: [B, slots, kv_heads, head_dim].
      key_valid_BS: bool [B, slots], false for padding.
      query_slot: int32 scalar, the slot of the new token; later slots are not seen.
      window: a query sees at most this many newest keys, itself included.

    Returns:
      [B, 1, heads, head_dim].
    """
    slot_S = jnp.arange(k.shape[1])
    seen_S = slot_S <= query_slot
    if window is not None:
        seen_S = seen_S & (query_slot - slot_S < window)
    mask = (key_valid_BS & seen_S[None])[:, None, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask)

"""Causal self-attention over packed rows, behind one function.

On CPUs the mask [B, 1, T, T] is a boolean that XLA computes where it is used. On GPUs
and TPUs a fused kernel that JAX ships (`fused_attention`) takes the segment ids as
they are, so that nothing of size T × T is ever in memory.
"""

from __future__ import annotations

import math
import warnings
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec

from clusterjax import mesh as mesh_lib
from clusterjax.models import fused_attention

Kernel = Literal["masked", "splash", "triton"]

# Queries of one block of masked attention, about, and most blocks of a row.
_QUERY_BLOCK = 128
_MAX_BLOCKS = 8


def positions_from_segments(segment_ids_BT: jax.Array) -> jax.Array:
    """Returns positions [B, T] int32 that restart at 0 where the segment changes."""
    index_1T = jnp.arange(segment_ids_BT.shape[1], dtype=jnp.int32)[None]
    changes_BT = jnp.concatenate(
        [
            jnp.ones_like(segment_ids_BT[:, :1], dtype=bool),
            segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1],
        ],
        axis=1,
    )
    start_BT = jax.lax.cummax(jnp.where(changes_BT, index_1T, 0), axis=1)
    return index_1T - start_BT


def visible(
    length: int, segment_ids_BT: jax.Array | None, window: int | None
) -> jax.Array:
    """Returns the mask [B or 1, 1, query, key]: same segment, not later, in window."""
    query_T = jnp.arange(length)[:, None]
    key_T = jnp.arange(length)[None, :]
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
    *,
    mesh: Mesh | None = None,
    kernel: Kernel | None = None,
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
      mesh: where the rows (`data`, `fsdp`) and heads (`tensor`) are spread: a fused
        kernel has to be told, XLA finds out by itself.
      kernel: how to compute it; None: what suits the devices (see `choose`).

    Returns:
      [B, T, heads, head_dim] in the dtype of q. The softmax is in float32, or in
      float64 for float64 inputs.
    """
    if kernel is None:
        # XLA spreads the masked form over devices in any way, a fused kernel it can't.
        divides = q.shape[0] % _num_free_shards(mesh) == 0
        kernel = choose(mesh, q.shape[1], window) if divides else "masked"
    if kernel == "masked":
        return _in_blocks(q, k, v, visible(q.shape[1], segment_ids_BT, window), window)
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones(q.shape[:2], jnp.int32)

    def compute(q, k, v, segment_ids_BT):
        if kernel == "splash":
            return fused_attention.splash(q, k, v, segment_ids_BT, window)
        return fused_attention.triton(q, k, v, segment_ids_BT)

    rows, heads = _free_axes(mesh)
    if mesh is None or not rows + heads:
        return compute(q, k, v, segment_ids_BT)
    spec = PartitionSpec(rows or None, None, heads or None, None)
    # Kernels do not say whether their results vary over the mesh (check_vma).
    return jax.shard_map(
        compute,
        mesh=mesh,
        in_specs=(spec, spec, spec, PartitionSpec(rows or None, None)),
        out_specs=spec,
        check_vma=False,
    )(q, k, v, segment_ids_BT)


def _in_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, window: int | None
) -> jax.Array:
    """Masked attention, a few blocks of queries one by one.

    The keys behind the last query of a block, and those before its first window, are
    seen by none of its queries: they are left out rather than masked.
    """
    length = q.shape[1]
    count = min(-(-length // _QUERY_BLOCK), _MAX_BLOCKS)
    size = -(-length // count)
    parts = []
    for begin in range(0, length, size):
        end = min(begin + size, length)
        first = 0 if window is None else max(begin + 1 - window, 0)
        keys = slice(first, end)
        seen = mask[:, :, begin:end, keys]
        parts.append(_masked(q[:, begin:end], k[:, keys], v[:, keys], seen))
    return jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]


def _masked(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention with a mask [B or 1, 1, query, key] (Q queries, S keys).

    `jax.nn.dot_product_attention` is the same, but rounds float64 to float32.
    """
    batch, num_queries, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    grouped = (batch, num_queries, kv_heads, heads // kv_heads, head_dim)
    scaled = (q * head_dim**-0.5).reshape(grouped)
    # With the group beside the query neither product has to transpose [Q, S].
    scores = jnp.einsum("bqkgd,bskd->bkqgs", scaled, k, preferred_element_type=wide)
    lowest = jnp.finfo(wide).min
    weights = jax.nn.softmax(jnp.where(mask[:, :, :, None], scores, lowest), axis=-1)
    mixed = jnp.einsum("bkqgs,bskd->bqkgd", weights.astype(v.dtype), v)
    return mixed.reshape(q.shape)


def choose(mesh: Mesh | None, length: int, window: int | None) -> Kernel:
    """Returns the kernel for the devices of `mesh` (None: the default backend).

    The devices count, not the machine that compiles: a program for a TPU pod may be
    built where there is none. Triton's kernel knows no window, so a window that is
    shorter than the row is masked on GPUs. A kernel that the installed JAX does not
    have is replaced by the masked form, with a warning.
    """
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    fused = None
    if platform == "tpu":
        fused = "splash"
    elif platform in ("gpu", "cuda", "rocm") and (window is None or window >= length):
        fused = "triton"
    if fused is None:
        return "masked"
    if not fused_attention.is_installed(fused):
        warnings.warn(
            f"JAX {jax.__version__} has no {fused} attention kernel: attention is "
            "masked, slower and with more memory. For the kernel install "
            "clusterjax[cuda] or clusterjax[tpu], which ask for a JAX that has it.",
            stacklevel=2,
        )
        return "masked"
    return fused


def constrain_rows(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """Keeps rows on the data shards, so that FSDP gathers parameters, not activations.

    Nothing happens when the rows do not divide, or inside a `shard_map` that has taken
    these axes already.
    """
    rows, _ = _free_axes(mesh)
    if mesh is None or not rows or x.shape[0] % mesh_lib.num_shards(mesh):
        return x
    spec = PartitionSpec(rows, *(None,) * (x.ndim - 1))
    return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, spec))


def _num_free_shards(mesh: Mesh | None) -> int:
    """Devices that the rows are to be spread over; 1 without a mesh."""
    rows, _ = _free_axes(mesh)
    return math.prod(mesh.shape[axis] for axis in rows) if mesh is not None else 1


def _free_axes(mesh: Mesh | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Mesh axes of rows and of heads that are not yet taken by hand."""
    if mesh is None:
        return (), ()
    context = jax.sharding.get_abstract_mesh()
    taken = set()
    if not context.empty:
        taken = {
            axis
            for axis, kind in zip(context.axis_names, context.axis_types, strict=True)
            if kind == AxisType.Manual
        }
    if taken:
        return (), ()
    rows = tuple(axis for axis in mesh_lib.BATCH_AXES if mesh.shape.get(axis, 1) > 1)
    heads = ("tensor",) if mesh.shape.get("tensor", 1) > 1 else ()
    return rows, heads


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
    return _masked(q, k, v, mask)

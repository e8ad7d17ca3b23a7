"""Fused attention kernels that come with JAX, for packed rows.

TPU: splash attention (causal and windowed, grouped heads, segment ids). GPU: the
Triton flash attention of Pallas (causal, segment ids). cuDNN's flash attention is not
used: through JAX's public interface it takes packed rows only as a dense bias.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

# A row is padded to a multiple of this: the smallest tile of both kernels.
_TILE = 128
_LARGEST_BLOCK = 512

_MODULES = {
    "splash": "jax.experimental.pallas.ops.tpu.splash_attention",
    "triton": "jax.experimental.pallas.ops.gpu.attention",
}


@functools.cache
def is_installed(kernel: Literal["splash", "triton"]) -> bool:
    """Whether the installed JAX has the kernel; these modules are experimental ones.

    JAX 0.12.1 left Triton's out (the extra `cuda` asks for an older one).
    """
    try:
        return importlib.util.find_spec(_MODULES[kernel]) is not None
    except ModuleNotFoundError:  # a package above it is gone
        return False


def splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids_BT: jax.Array,
    window: int | None,
    interpret: bool = False,
) -> jax.Array:
    """TPU kernel; arguments as in `attention.attend`.

    `interpret` runs the kernel's own program without a TPU, slowly, for tests.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernel_lib,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as mask_lib,
    )

    length, heads = q.shape[1:3]
    q, k, v, segment_ids_BT = (_pad_length(x) for x in (q, k, v, segment_ids_BT))
    padded = q.shape[1]
    shape = (padded, padded)
    if window is None or window >= length:
        mask = mask_lib.CausalMask(shape)
    else:
        mask = mask_lib.LocalMask(shape, (window - 1, 0), offset=0)
    block = next(b for b in (_LARGEST_BLOCK, 256, _TILE) if padded % b == 0)
    kernel = kernel_lib.make_splash_mha(
        mask=mask_lib.MultiHeadMask([mask] * heads),
        block_sizes=kernel_lib.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )

    def one_row(q_THD, k_THD, v_THD, segment_ids_T):
        q_HTD, k_HTD, v_HTD = (x.swapaxes(0, 1) for x in (q_THD, k_THD, v_THD))
        ids = kernel_lib.SegmentIds(segment_ids_T, segment_ids_T)
        # The kernel does not scale.
        q_HTD = q_HTD * np.asarray(q_HTD.shape[-1] ** -0.5, q_HTD.dtype)
        return kernel(q_HTD, k_HTD, v_HTD, segment_ids=ids).swapaxes(0, 1)  # pyright: ignore[reportAttributeAccessIssue]

    return jax.vmap(one_row)(q, k, v, segment_ids_BT)[:, :length]


def triton(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids_BT: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """GPU kernel, without a window; arguments as in `attention.attend`."""
    with warnings.catch_warnings():
        # JAX 0.12 calls this module deprecated in favour of a package of its own.
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention as kernel_lib

    length, heads, head_dim = q.shape[1:]
    groups = heads // k.shape[2]
    # The kernel wants as many key heads as query heads; the repeat's own gradient
    # sums over the group.
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    q, k, v, segment_ids_BT = (_pad_length(x) for x in (q, k, v, segment_ids_BT))
    mixed = kernel_lib.mha(
        q,
        k,
        v,
        segment_ids=segment_ids_BT,
        sm_scale=head_dim**-0.5,
        causal=True,
        interpret=interpret,
    )
    return mixed[:, :length]  # pyright: ignore[reportIndexIssue]


def _pad_length(x: jax.Array) -> jax.Array:
    """Pads axis 1 with zeros to a multiple of the tile (segment 0 is padding)."""
    missing = -x.shape[1] % _TILE
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))

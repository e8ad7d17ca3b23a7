"""Rotary position embedding (arXiv 2104.09864), with linear and llama3 scaling."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Frequencies of the rotary embedding.

    Attributes:
      theta: base of the geometric series of wavelengths.
      kind: "default", "linear" (all frequencies divided by `factor`) or "llama3"
        (only the low frequencies are, with a smooth passage between).
      factor: by how much the context was stretched; unused for "default".
      low_freq_factor: llama3 only: wavelengths above original / this are stretched.
      high_freq_factor: llama3 only: wavelengths below original / this stay.
      original_max_positions: llama3 only: context length before stretching, tokens.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Returns the angle per position of each pair of channels, [head_dim / 2] f32."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequency = 1.0 / config.theta**exponent
    if config.kind == "linear":
        frequency = frequency / config.factor
    elif config.kind == "llama3":
        low, high = config.low_freq_factor, config.high_freq_factor
        turns = config.original_max_positions * frequency / (2 * math.pi)
        # 1 where the wavelength is short (kept), 0 where it is long (stretched).
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequency = keep * frequency + (1 - keep) * frequency / config.factor
    return frequency.astype(np.float32)


def rotation(
    positions_BT: jax.Array, config: RopeConfig, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine of the angles, each [B, T, 1, head_dim / 2] float32."""
    frequencies = jnp.asarray(inverse_frequencies(config, head_dim))
    angles = (
        positions_BT.astype(jnp.float32)[:, :, None, None]
        * frequencies[None, None, None]
    )
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the channel pairs (i, i + half) of x [B, T, heads, head_dim]."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )

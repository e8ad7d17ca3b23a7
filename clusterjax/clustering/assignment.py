"""Nearest centres of sharded rows, and the inertia that they leave."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from clusterjax.clustering import rows as rows_lib

HIGHEST = jax.lax.Precision.HIGHEST


def argmin(score: jax.Array) -> jax.Array:
    """int32, position of the least value along the last axis, ties to the lower one.

    By the value and then its position: on CPUs XLA's own argmin takes as long as the
    distances themselves.
    """
    size = score.shape[-1]
    least = jnp.min(score, axis=-1, keepdims=True)
    position = jnp.where(score == least, jnp.arange(size, dtype=jnp.int32), size)
    # Without a least value (NaN) no position would be in range.
    return jnp.minimum(jnp.min(position, axis=-1), size - 1)


def assign(rows: rows_lib.Rows, centers_KD: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Nearest centre of every row, ties to the lower id.

    Returns:
      labels int32 [N] and squared euclidean distances float32 [N], on the host.
    """
    label_N, distance_N = _assign(
        rows.values_ND, centers_KD, mesh=rows.mesh, block=rows.block
    )
    return (
        rows_lib.to_host(label_N, rows.num_rows),
        rows_lib.to_host(distance_N, rows.num_rows),
    )


@functools.partial(jax.jit, static_argnames=("mesh", "block"))
def _assign(
    values_ND: jax.Array, centers_KD: jax.Array, *, mesh: Mesh, block: int
) -> tuple[jax.Array, jax.Array]:
    axes = rows_lib.data_axes(mesh)

    def local(x_ND: jax.Array, c_KD: jax.Array) -> tuple[jax.Array, jax.Array]:
        half_K = 0.5 * jnp.sum(c_KD**2, axis=1)

        def body(x_bD: jax.Array) -> tuple[jax.Array, jax.Array]:
            score_bK = half_K[None] - jnp.matmul(x_bD, c_KD.T, precision=HIGHEST)
            label_b = argmin(score_bK)
            # Differences, not expanded squares: no cancellation near a centre.
            return label_b, jnp.sum((x_bD - c_KD[label_b]) ** 2, axis=1)

        label, distance = jax.lax.map(body, x_ND.reshape(-1, block, x_ND.shape[1]))
        return label.reshape(-1), distance.reshape(-1)

    return jax.shard_map(
        local, mesh=mesh, in_specs=(P(axes), P()), out_specs=(P(axes), P(axes))
    )(values_ND, centers_KD)


def inertia(rows: rows_lib.Rows, centers_GKD: jax.Array) -> jax.Array:
    """float32 [G]: weighted sum of squared distances to the nearest centres."""
    return _inertia(
        rows.values_ND,
        rows.weight_N,
        rows.square_N,
        centers_GKD,
        mesh=rows.mesh,
        block=rows.block,
    )


@functools.partial(jax.jit, static_argnames=("mesh", "block"))
def _inertia(
    values_ND: jax.Array,
    weight_N: jax.Array,
    square_N: jax.Array,
    centers_GKD: jax.Array,
    *,
    mesh: Mesh,
    block: int,
) -> jax.Array:
    axes = rows_lib.data_axes(mesh)

    def local(
        x_ND: jax.Array, w_N: jax.Array, sq_N: jax.Array, c_GKD: jax.Array
    ) -> jax.Array:
        groups, clusters, dim = c_GKD.shape
        flat_CD = c_GKD.reshape(-1, dim)
        square_C = jnp.sum(flat_CD**2, axis=1)

        def body(args: tuple[jax.Array, ...]) -> jax.Array:
            x_bD, w_b, sq_b = args
            dot_bC = jnp.matmul(x_bD, flat_CD.T, precision=HIGHEST)
            d_bC = sq_b[:, None] + square_C[None] - 2 * dot_bC
            d_bG = jnp.min(d_bC.reshape(-1, groups, clusters), axis=-1)
            return jnp.sum(w_b[:, None] * jnp.maximum(d_bG, 0), axis=0)

        parts = (
            x_ND.reshape(-1, block, dim),
            w_N.reshape(-1, block),
            sq_N.reshape(-1, block),
        )
        return jax.lax.psum(jnp.sum(jax.lax.map(body, parts), axis=0), axes)

    return jax.shard_map(
        local, mesh=mesh, in_specs=(P(axes), P(axes), P(axes), P()), out_specs=P()
    )(values_ND, weight_N, square_N, centers_GKD)

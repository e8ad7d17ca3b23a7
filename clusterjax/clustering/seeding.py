"""k-means++ starts (Arthur and Vassilvitskii 2007) with greedy candidates.

Every step draws a few candidates with probability proportional to weight × squared
distance to the nearest centre and takes the one that leaves the least inertia. The
draws are an exponential race (the first arrivals of independent clocks with these
rates), so they need no running sums over rows and are the same on any layout.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from clusterjax.clustering import rows as rows_lib


def num_candidates(num_clusters: int) -> int:
    """Candidates of a greedy step: 2 + ⌊ln K⌋."""
    return 2 + int(math.log(num_clusters))


def plus_plus(
    rows: rows_lib.Rows, num_clusters: int, num_restarts: int, key: jax.Array
) -> jax.Array:
    """Draws `num_restarts` independent starts.

    Returns:
      float32 [R, K, D], in the centred coordinates of `rows`. Two centres of a start
      may coincide when there are fewer distinct rows than clusters.
    """
    return _plus_plus(
        rows.values_ND,
        rows.weight_N,
        rows.square_N,
        jax.random.split(key, num_restarts),
        num_clusters=num_clusters,
        candidates=num_candidates(num_clusters),
        mesh=rows.mesh,
        block=rows.block,
    )


@functools.partial(
    jax.jit, static_argnames=("num_clusters", "candidates", "mesh", "block")
)
def _plus_plus(
    values_ND: jax.Array,
    weight_N: jax.Array,
    square_N: jax.Array,
    key_R: jax.Array,
    *,
    num_clusters: int,
    candidates: int,
    mesh: Mesh,
    block: int,
) -> jax.Array:
    axes = rows_lib.data_axes(mesh)

    def local(x_ND: jax.Array, w_N: jax.Array, sq_N: jax.Array) -> jax.Array:
        size, dim = x_ND.shape
        shard = _Shard(
            x_nbD=x_ND.reshape(-1, block, dim),
            w_nb=w_N.reshape(-1, block),
            square_nb=sq_N.reshape(-1, block),
            first_row=rows_lib.shard_index(axes, mesh) * size,
        )

        def step(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple:
            centers_RKD, near_nbR = state
            candidate_RLD = _draw(shard, key_R, i, near_nbR, candidates, axes)
            left_RL = jax.lax.psum(_left(shard, near_nbR, candidate_RLD, axes), axes)
            # The first centre is drawn by weight alone, and not chosen.
            best_R = jnp.where(i == 0, 0, jnp.argmin(left_RL, axis=1))
            near_nbR = jnp.where(i == 0, jnp.inf, near_nbR)
            center_RD = jnp.take_along_axis(
                candidate_RLD, best_R[:, None, None], axis=1
            )[:, 0]
            centers_RKD = centers_RKD.at[:, i].set(center_RD)
            return centers_RKD, _nearer(shard, near_nbR, center_RD)

        restarts = key_R.shape[0]
        near_nbR = jnp.ones((*shard.w_nb.shape, restarts)) + 0 * w_N[0]
        centers = jnp.zeros((restarts, num_clusters, dim))
        return jax.lax.fori_loop(0, num_clusters, step, (centers, near_nbR))[0]

    return jax.shard_map(
        local, mesh=mesh, in_specs=(P(axes), P(axes), P(axes)), out_specs=P()
    )(values_ND, weight_N, square_N)


class _Shard(NamedTuple):
    """The rows of one shard, in blocks, and the global number of the first."""

    x_nbD: jax.Array
    w_nb: jax.Array
    square_nb: jax.Array
    first_row: jax.Array


def _draw(
    shard: _Shard,
    key_R: jax.Array,
    step: jax.Array,
    near_nbR: jax.Array,
    count: int,
    axes: tuple[str, ...],
) -> jax.Array:
    """float32 [R, count, D]: the rows whose clocks ring first, over all shards."""
    x_ND = shard.x_nbD.reshape(-1, shard.x_nbD.shape[-1])
    size, restarts = len(x_ND), len(key_R)
    mass_NR = (shard.w_nb[..., None] * near_nbR).reshape(size, restarts)
    clock_NR = _clocks(key_R, step, shard.first_row, size)
    score_RN = jnp.where(mass_NR > 0, mass_NR / clock_NR, -1.0).T
    best_RL, at_RL = jax.lax.top_k(score_RN, count)
    # The best of every shard meet, with their global row numbers: count × shards.
    all_best = jnp.moveaxis(jax.lax.all_gather(best_RL, axes), 0, 1)
    all_row = jnp.moveaxis(jax.lax.all_gather(shard.first_row + at_RL, axes), 0, 1)
    _, pick_RL = jax.lax.top_k(all_best.reshape(restarts, -1), count)
    row_RL = jnp.take_along_axis(all_row.reshape(restarts, -1), pick_RL, axis=1)
    local_RL = row_RL - shard.first_row
    mine_RL = (local_RL >= 0) & (local_RL < size)
    row_RLD = x_ND[jnp.clip(local_RL, 0, size - 1)]
    return jax.lax.psum(jnp.where(mine_RL[..., None], row_RLD, 0), axes)


def _left(
    shard: _Shard, near_nbR: jax.Array, candidate_RLD: jax.Array, axes: tuple[str, ...]
) -> jax.Array:
    """float32 [R, L]: inertia of this shard that each candidate would leave."""

    def body(left_RL: jax.Array, args: tuple[jax.Array, ...]) -> tuple:
        x_bD, w_b, square_b, near_bR = args
        d_bRL = _distance(x_bD, square_b, candidate_RLD)
        d_bRL = jnp.minimum(near_bR[..., None], d_bRL)
        return left_RL + jnp.einsum("b,brl->rl", w_b, d_bRL), None

    zero = jax.lax.pcast(jnp.zeros(candidate_RLD.shape[:2]), axes, to="varying")
    blocks = (shard.x_nbD, shard.w_nb, shard.square_nb, near_nbR)
    return jax.lax.scan(body, zero, blocks)[0]


def _nearer(shard: _Shard, near_nbR: jax.Array, center_RD: jax.Array) -> jax.Array:
    """Squared distances to the nearest centre, with one centre more."""

    def body(args: tuple[jax.Array, ...]) -> jax.Array:
        x_bD, square_b, near_bR = args
        d_bR = _distance(x_bD, square_b, center_RD[:, None])[..., 0]
        return jnp.minimum(near_bR, d_bR)

    return jax.lax.map(body, (shard.x_nbD, shard.square_nb, near_nbR))


def _distance(x_bD: jax.Array, square_b: jax.Array, c_RLD: jax.Array) -> jax.Array:
    """float32 [b, R, L]: squared distances of a block of rows."""
    c_CD = c_RLD.reshape(-1, c_RLD.shape[-1])
    dot_bC = jnp.matmul(x_bD, c_CD.T, precision=jax.lax.Precision.HIGHEST)
    square_C = jnp.sum(c_CD**2, axis=-1)
    d_bC = jnp.maximum(square_b[:, None] + square_C[None] - 2 * dot_bC, 0)
    return d_bC.reshape(-1, *c_RLD.shape[:2])


def _clocks(
    key_R: jax.Array, step: jax.Array, first_row: jax.Array, rows: int
) -> jax.Array:
    """float32 [rows, R]: exponential noise that hangs on (key, step, global row)."""
    group = first_row // rows_lib.NOISE_ROWS + jnp.arange(rows // rows_lib.NOISE_ROWS)

    def noise(key: jax.Array) -> jax.Array:
        step_key = jax.random.fold_in(key, step)
        keys = jax.vmap(lambda g: jax.random.fold_in(step_key, g))(group)
        draw = jax.vmap(lambda k: jax.random.exponential(k, (rows_lib.NOISE_ROWS,)))
        # A clock at exactly zero would win whatever its rate.
        return jnp.maximum(draw(keys).reshape(-1), 1e-30)

    return jax.vmap(noise)(key_R).T

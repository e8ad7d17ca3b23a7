"""k-means++ starts (Arthur and Vassilvitskii 2007) with greedy candidates.

Every step draws a few candidates with probability proportional to weight × squared
distance to the nearest centre and takes the one that leaves the least inertia. The
draws are an exponential race (the first arrivals of independent clocks with these
rates), so they need no running sums over rows and are the same on any layout.
"""

from __future__ import annotations

import functools
import math

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
    restarts = key_R.shape[0]

    def local(x_ND: jax.Array, w_N: jax.Array, sq_N: jax.Array) -> jax.Array:
        rows, dim = x_ND.shape
        first_row = rows_lib.shard_index(axes, mesh) * rows
        x_nbD = x_ND.reshape(-1, block, dim)

        def blocks(a: jax.Array) -> jax.Array:
            return a.reshape(-1, block, *a.shape[1:])

        def distance(x_bD: jax.Array, sq_b: jax.Array, c_RLD: jax.Array) -> jax.Array:
            dot_bC = jnp.matmul(
                x_bD, c_RLD.reshape(-1, dim).T, precision=jax.lax.Precision.HIGHEST
            )
            c2_C = jnp.sum(c_RLD**2, axis=-1).reshape(-1)
            d_bC = jnp.maximum(sq_b[:, None] + c2_C[None] - 2 * dot_bC, 0)
            return d_bC.reshape(-1, *c_RLD.shape[:2])

        def draw(i: jax.Array, near_NR: jax.Array, count: int) -> jax.Array:
            """[R, count, D]: the rows whose clocks ring first."""
            clock_NR = _clocks(key_R, i, first_row, rows)
            mass_NR = w_N[:, None] * near_NR
            score_RN = jnp.where(mass_NR > 0, mass_NR / clock_NR, -1.0).T
            best_RL, local_RL = jax.lax.top_k(score_RN, min(count, rows))
            owner = jax.lax.all_gather(best_RL, axes)
            row_RL = first_row + local_RL
            owner_row = jax.lax.all_gather(row_RL, axes)
            best_RsL = jnp.moveaxis(owner, 0, 1).reshape(restarts, -1)
            row_RsL = jnp.moveaxis(owner_row, 0, 1).reshape(restarts, -1)
            _, pick_RL = jax.lax.top_k(best_RsL, count)
            chosen_RL = jnp.take_along_axis(row_RsL, pick_RL, axis=1)
            mine_RL = (chosen_RL >= first_row) & (chosen_RL < first_row + rows)
            at_RL = jnp.clip(chosen_RL - first_row, 0, rows - 1)
            return jax.lax.psum(jnp.where(mine_RL[..., None], x_ND[at_RL], 0), axes)

        def nearest(near_NR: jax.Array, c_RD: jax.Array) -> jax.Array:
            def body(args: tuple[jax.Array, ...]) -> jax.Array:
                x_bD, sq_b, near_bR = args
                d_bR = distance(x_bD, sq_b, c_RD[:, None])[..., 0]
                return jnp.minimum(near_bR, d_bR)

            near = jax.lax.map(body, (x_nbD, blocks(sq_N), blocks(near_NR)))
            return near.reshape(near_NR.shape)

        def step(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple:
            centers_RKD, near_NR = state
            c_RLD = draw(i, near_NR, candidates)

            def body(pot_RL: jax.Array, args: tuple[jax.Array, ...]) -> tuple:
                x_bD, w_b, sq_b, near_bR = args
                d_bRL = jnp.minimum(near_bR[..., None], distance(x_bD, sq_b, c_RLD))
                return pot_RL + jnp.einsum("b,brl->rl", w_b, d_bRL), None

            zero = jax.lax.pcast(jnp.zeros((restarts, candidates)), axes, to="varying")
            pot_RL, _ = jax.lax.scan(
                body, zero, (x_nbD, blocks(w_N), blocks(sq_N), blocks(near_NR))
            )
            best_R = jnp.argmin(jax.lax.psum(pot_RL, axes), axis=1)
            c_RD = jnp.take_along_axis(c_RLD, best_R[:, None, None], axis=1)[:, 0]
            return centers_RKD.at[:, i].set(c_RD), nearest(near_NR, c_RD)

        ones_NR = jnp.ones((rows, restarts)) + 0 * w_N[:, None]
        first_RD = draw(jnp.int32(0), ones_NR, 1)[:, 0]
        centers = jnp.zeros((restarts, num_clusters, dim)).at[:, 0].set(first_RD)
        near_NR = nearest(jnp.inf * ones_NR, first_RD)
        centers, _ = jax.lax.fori_loop(1, num_clusters, step, (centers, near_NR))
        return centers

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(axes), P(axes), P(axes)),
        out_specs=P(),
    )(values_ND, weight_N, square_N)


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

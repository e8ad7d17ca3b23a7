"""Lloyd's iterations, several starts at once, over sharded rows.

Per iteration only the K×D sums and K counts of each start cross the network, in one
all-reduce.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from clusterjax.clustering import assignment
from clusterjax.clustering import rows as rows_lib


class LoopState(NamedTuple):
    """State of G starts that run together.

    Attributes:
      centers_GKD: float32, centred coordinates.
      iterations_G: int32, iterations done.
      active_G: bool, not yet converged and below the limit.
      converged_G: bool, the centre shift met the tolerance.
      empty_GK: bool, clusters that got no row in the last iteration.
      weight_GK: float32, weight of the rows of each cluster in the last iteration.
    """

    centers_GKD: jax.Array
    iterations_G: jax.Array
    active_G: jax.Array
    converged_G: jax.Array
    empty_GK: jax.Array
    weight_GK: jax.Array


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run of Lloyd's iterations depends on besides the rows (hashable).

    `scatter` adds rows up one by one instead of by a matrix product: faster on CPUs
    with many clusters, but slow and without a fixed order on accelerators.
    """

    spherical: bool
    mesh: Mesh
    block: int
    scatter: bool


def initial(centers_GKD: jax.Array) -> LoopState:
    groups, clusters, _ = centers_GKD.shape
    return LoopState(
        centers_GKD=centers_GKD,
        iterations_G=jnp.zeros(groups, jnp.int32),
        active_G=jnp.ones(groups, bool),
        converged_G=jnp.zeros(groups, bool),
        empty_GK=jnp.zeros((groups, clusters), bool),
        weight_GK=jnp.zeros((groups, clusters)),
    )


def run(
    rows: rows_lib.Rows,
    state: LoopState,
    tolerance: float,
    max_iterations: int,
    options: Options,
) -> LoopState:
    """Iterates until every start is done or one has an empty cluster."""
    state = _run(
        rows.values_ND,
        rows.weight_N,
        state,
        jnp.float32(tolerance),
        jnp.int32(max_iterations),
        options=options,
    )
    return jax.block_until_ready(state)


@functools.partial(jax.jit, static_argnames=("options",))
def _run(
    values_ND: jax.Array,
    weight_N: jax.Array,
    state: LoopState,
    tolerance: jax.Array,
    max_iterations: jax.Array,
    *,
    options: Options,
) -> LoopState:
    axes = rows_lib.data_axes(options.mesh)

    def local(x_ND: jax.Array, w_N: jax.Array, state: LoopState) -> LoopState:
        x_nbD = x_ND.reshape(-1, options.block, x_ND.shape[1])
        w_nb = w_N.reshape(-1, options.block)

        def unfinished(state: LoopState) -> jax.Array:
            return jnp.any(state.active_G) & ~jnp.any(state.empty_GK)

        def iterate(state: LoopState) -> LoopState:
            sums = _sums(x_nbD, w_nb, state.centers_GKD, axes, options)
            total = jax.lax.psum(sums, axes)
            return advance(state, total, tolerance, max_iterations, options.spherical)

        return jax.lax.while_loop(unfinished, iterate, state)

    return jax.shard_map(
        local,
        mesh=options.mesh,
        in_specs=(P(axes), P(axes), P()),
        out_specs=P(),
    )(values_ND, weight_N, state)


def totals(rows: rows_lib.Rows, centers_GKD: jax.Array, options: Options) -> jax.Array:
    """float32 [G, K, D + 1]: sums of the rows nearest to each centre, weights last."""
    return _totals(rows.values_ND, rows.weight_N, centers_GKD, options=options)


@functools.partial(jax.jit, static_argnames=("options",))
def _totals(
    values_ND: jax.Array,
    weight_N: jax.Array,
    centers_GKD: jax.Array,
    *,
    options: Options,
) -> jax.Array:
    axes = rows_lib.data_axes(options.mesh)

    def local(x_ND: jax.Array, w_N: jax.Array, c_GKD: jax.Array) -> jax.Array:
        x_nbD = x_ND.reshape(-1, options.block, x_ND.shape[1])
        w_nb = w_N.reshape(-1, options.block)
        return jax.lax.psum(_sums(x_nbD, w_nb, c_GKD, axes, options), axes)

    return jax.shard_map(
        local, mesh=options.mesh, in_specs=(P(axes), P(axes), P()), out_specs=P()
    )(values_ND, weight_N, centers_GKD)


def _sums(
    x_nbD: jax.Array,
    w_nb: jax.Array,
    centers_GKD: jax.Array,
    axes: tuple[str, ...],
    options: Options,
) -> jax.Array:
    """float32 [G, K, D + 1]: weighted sums of this shard's rows, and weights, last."""
    groups, clusters, dim = centers_GKD.shape
    flat_CD = centers_GKD.reshape(-1, dim)
    half_C = 0.5 * jnp.sum(flat_CD**2, axis=1)
    add = scatter if options.scatter else one_hot

    def block(carry: tuple, args: tuple[jax.Array, jax.Array]) -> tuple:
        x_bD, w_b = args
        score_bC = half_C[None] - jnp.matmul(
            x_bD, flat_CD.T, precision=assignment.HIGHEST
        )
        label_bG = assignment.argmin(score_bC.reshape(-1, groups, clusters))
        sums_GKD, count_GK = add(x_bD, w_b, label_bG, clusters)
        return (carry[0] + sums_GKD, carry[1] + count_GK), None

    zero = (jnp.zeros((groups, clusters, dim)), jnp.zeros((groups, clusters)))
    zero = jax.tree.map(lambda a: jax.lax.pcast(a, axes, to="varying"), zero)
    (sums_GKD, count_GK), _ = jax.lax.scan(block, zero, (x_nbD, w_nb))
    return jnp.concatenate([sums_GKD, count_GK[..., None]], axis=-1)


def one_hot(
    x_bD: jax.Array, w_b: jax.Array, label_bG: jax.Array, clusters: int
) -> tuple[jax.Array, jax.Array]:
    """Sums [G, K, D] and weights [G, K] of a block, by a matrix product."""
    groups = label_bG.shape[1]
    member_bGK = label_bG[..., None] == jnp.arange(clusters)[None, None]
    weight_bGK = jnp.where(member_bGK, w_b[:, None, None], 0)
    weight_bC = weight_bGK.reshape(len(w_b), -1)
    sums_CD = jnp.matmul(weight_bC.T, x_bD, precision=assignment.HIGHEST)
    return (
        sums_CD.reshape(groups, clusters, -1),
        jnp.sum(weight_bC, axis=0).reshape(groups, clusters),
    )


def scatter(
    x_bD: jax.Array, w_b: jax.Array, label_bG: jax.Array, clusters: int
) -> tuple[jax.Array, jax.Array]:
    """As `one_hot`, row by row: less work for many clusters, but a serial loop."""
    weighted_bD = x_bD * w_b[:, None]
    sums = [
        jax.ops.segment_sum(weighted_bD, label_b, clusters) for label_b in label_bG.T
    ]
    counts = [jax.ops.segment_sum(w_b, label_b, clusters) for label_b in label_bG.T]
    return jnp.stack(sums), jnp.stack(counts)


def advance(
    state: LoopState,
    sums_GKE: jax.Array,
    tolerance: jax.Array,
    max_iterations: jax.Array,
    spherical: bool,
) -> LoopState:
    """One update of the centres from the summed rows; finished starts stay put."""
    weight_GK1 = sums_GKE[..., -1:]
    empty_GK = weight_GK1[..., 0] <= 0
    mean = sums_GKE[..., :-1] / jnp.where(weight_GK1 > 0, weight_GK1, 1)
    if spherical:
        mean = unit(mean)
    old = state.centers_GKD
    new = jnp.where(empty_GK[..., None], old, mean)
    new = jnp.where(state.active_G[:, None, None], new, old)
    shift_G = jnp.sum((new - old) ** 2, axis=(1, 2))
    iterations_G = state.iterations_G + state.active_G
    holes_GK = empty_GK & state.active_G[:, None]
    met_G = state.active_G & (shift_G <= tolerance) & ~jnp.any(holes_GK, axis=1)
    return LoopState(
        centers_GKD=new,
        iterations_G=iterations_G,
        active_G=state.active_G & ~met_G & (iterations_G < max_iterations),
        converged_G=state.converged_G | met_G,
        empty_GK=holes_GK,
        weight_GK=jnp.where(
            state.active_G[:, None], weight_GK1[..., 0], state.weight_GK
        ),
    )


def unit(x: jax.Array) -> jax.Array:
    """Rows scaled to unit length; a zero row stays zero."""
    length = jnp.linalg.norm(x, axis=-1, keepdims=True)
    return x / jnp.where(length > 0, length, 1)

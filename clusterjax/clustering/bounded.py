"""Lloyd's iterations of one start that leave out rows whose centre can't change.

For each row an upper bound of the distance to its centre and lower bounds of those to
the others, a bound per group of centres, follow from how far centres have moved (the
triangle inequality: Elkan 2003; groups of centres: Ding et al. 2015, "Yinyang
K-means"). Rows whose bounds keep apart are not read. The result is that of plain
iterations; what it saves are reads and products, so it pays where rows can be picked
out one by one: on CPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from clusterjax.clustering import assignment, lloyd
from clusterjax.clustering import rows as rows_lib

# Lower bounds kept for each row: as many groups of centres.
GROUPS = 16
# Changed rows of a block that are added up one by one.
_CHUNK = 256
# Sums are taken anew so often, as adding and taking away rows leaves rounding.
_RENEW_EVERY = 64
# Bounds give way by this share of |row|² + |centre|², the rounding of a distance.
_ROUNDING = 4e-6

_Arrays = Sequence[jax.Array]
_Look = Callable[..., _Arrays]


class _Bounds(NamedTuple):
    """What a shard knows of its n rows, and of the sums over all shards.

    Attributes:
      label_n: int32, centre of each row, −1 before the first.
      upper_n: distance to it when the row was last read, plus `moved_K` since.
      lower_nT: distance to the nearest other centre of each group at that time, less
        `fled_T` since.
      moved_K: float32, how far each centre has moved in all.
      fled_T: float32, sum over iterations of the farthest move in each group.
      total_KE: float32 [K, D + 1], sums of the rows of each centre, weights last.
    """

    label_n: jax.Array
    upper_n: jax.Array
    lower_nT: jax.Array
    moved_K: jax.Array
    fled_T: jax.Array
    total_KE: jax.Array


def run(
    rows: rows_lib.Rows,
    state: lloyd.LoopState,
    tolerance: float,
    max_iterations: int,
    options: lloyd.Options,
) -> lloyd.LoopState:
    """As `lloyd.run`, for a group of one start."""
    state = _run(
        rows.values_ND,
        rows.weight_N,
        rows.square_N,
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
    square_N: jax.Array,
    state: lloyd.LoopState,
    tolerance: jax.Array,
    max_iterations: jax.Array,
    *,
    options: lloyd.Options,
) -> lloyd.LoopState:
    axes = rows_lib.data_axes(options.mesh)

    def local(
        x_nD: jax.Array, w_n: jax.Array, square_n: jax.Array, state: lloyd.LoopState
    ) -> lloyd.LoopState:
        _, clusters, dim = state.centers_GKD.shape

        def unfinished(carry: tuple[lloyd.LoopState, _Bounds]) -> jax.Array:
            return carry[0].active_G[0] & ~jnp.any(carry[0].empty_GK)

        def iterate(
            carry: tuple[lloyd.LoopState, _Bounds],
        ) -> tuple[lloyd.LoopState, _Bounds]:
            state, bounds = carry
            bounds = _renewed(bounds, state.iterations_G[0] % _RENEW_EVERY == 0)
            centers_KD = state.centers_GKD[0]
            bounds, change_KE = _read(x_nD, w_n, square_n, centers_KD, bounds, options)
            total_KE = bounds.total_KE + jax.lax.psum(change_KE, axes)
            state = lloyd.advance(
                state, total_KE[None], tolerance, max_iterations, options.spherical
            )
            bounds = _moved(bounds, state.centers_GKD[0] - centers_KD)
            return state, bounds._replace(total_KE=total_KE)

        start = _unknown(len(x_nD), clusters, dim, axes)
        return jax.lax.while_loop(unfinished, iterate, (state, start))[0]

    return jax.shard_map(
        local,
        mesh=options.mesh,
        in_specs=(P(axes), P(axes), P(axes), P()),
        out_specs=P(),
    )(values_ND, weight_N, square_N, state)


def _unknown(size: int, clusters: int, dim: int, axes: tuple[str, ...]) -> _Bounds:
    groups = min(clusters, GROUPS)
    own = jnp.full(size, -1), jnp.zeros(size), jnp.zeros((size, groups))
    own = jax.tree.map(lambda a: jax.lax.pcast(a, axes, to="varying"), own)
    return _Bounds(
        *own,
        moved_K=jnp.zeros(clusters),
        fled_T=jnp.zeros(groups),
        total_KE=jnp.zeros((clusters, dim + 1)),
    )


def _renewed(bounds: _Bounds, renew: jax.Array) -> _Bounds:
    """Forgets everything, where `renew`: rows without a label are read."""
    return bounds._replace(
        label_n=jnp.where(renew, -1, bounds.label_n),
        moved_K=jnp.where(renew, 0, bounds.moved_K),
        fled_T=jnp.where(renew, 0, bounds.fled_T),
        total_KE=jnp.where(renew, 0, bounds.total_KE),
    )


def _moved(bounds: _Bounds, step_KD: jax.Array) -> _Bounds:
    """The bounds after the centres' last step."""
    step_K = jnp.sqrt(jnp.sum(step_KD**2, axis=1)) * (1 + 1e-5)
    return bounds._replace(
        moved_K=bounds.moved_K + step_K,
        fled_T=bounds.fled_T + jnp.max(_grouped(step_K, 0), axis=0),
    )


def _grouped(x_K: jax.Array, padding: float) -> jax.Array:
    """[…, K] → […, ⌈K/T⌉, T]: every T-th centre is in one group."""
    clusters = x_K.shape[-1]
    groups = min(clusters, GROUPS)
    wide = [(0, 0)] * (x_K.ndim - 1) + [(0, -clusters % groups)]
    padded = jnp.pad(x_K, wide, constant_values=padding)
    return padded.reshape(*x_K.shape[:-1], -1, groups)


def _read(
    x_nD: jax.Array,
    w_n: jax.Array,
    square_n: jax.Array,
    centers_KD: jax.Array,
    bounds: _Bounds,
    options: lloyd.Options,
) -> tuple[_Bounds, jax.Array]:
    """Reads the rows whose centre may have changed, in blocks.

    Returns:
      The bounds, and how the sums of this shard change: float32 [K, D + 1].
    """
    upper_n = bounds.upper_n + bounds.moved_K[bounds.label_n]
    lower_n = functools.reduce(jnp.minimum, (bounds.lower_nT - bounds.fled_T[None]).T)
    unsure_n = ((bounds.label_n < 0) | (upper_n >= lower_n)) & (w_n > 0)
    count = jnp.sum(unsure_n)
    shard = x_nD, w_n, square_n
    known = bounds.label_n, bounds.upper_n, bounds.lower_nT
    look = functools.partial(_look, centers_KD, bounds, options)
    # Reading on is faster than picking out most of the rows.
    *known, change_KE = jax.lax.cond(
        count > 0.6 * len(x_nD),
        lambda: _read_all(look, shard, known, bounds.total_KE, options.block),
        lambda: _read_some(
            look, shard, known, bounds.total_KE, unsure_n, options.block
        ),
    )
    label_n, upper_n, lower_nT = known
    bounds = bounds._replace(label_n=label_n, upper_n=upper_n, lower_nT=lower_nT)
    return bounds, change_KE


def _read_all(
    look: _Look, shard: _Arrays, known: _Arrays, total_KE: jax.Array, block: int
) -> _Arrays:
    """New (label_n, upper_n, lower_nT, change_KE), from all rows in turn."""
    in_blocks = [a.reshape(-1, block, *a.shape[1:]) for a in (*shard, known[0])]

    def body(change_KE: jax.Array, parts: list[jax.Array]) -> tuple[jax.Array, _Arrays]:
        *found, change_KE = look(*parts, change_KE)
        return change_KE, tuple(found)

    change_KE, found = jax.lax.scan(body, _nothing(total_KE, shard), in_blocks)
    return *(a.reshape(-1, *a.shape[2:]) for a in found), change_KE


def _read_some(
    look: _Look,
    shard: _Arrays,
    known: _Arrays,
    total_KE: jax.Array,
    unsure_n: jax.Array,
    block: int,
) -> _Arrays:
    """As `_read_all`, from the rows `unsure_n` alone."""
    size = len(unsure_n)
    chosen_n = jnp.nonzero(unsure_n, size=size, fill_value=size)[0]

    def body(i: jax.Array, carry: _Arrays) -> _Arrays:
        *known, change_KE = carry
        row_b = jax.lax.dynamic_slice(chosen_n, (i * block,), (block,))
        x_bD, w_b, square_b, old_b = (
            a.at[row_b].get(mode="clip") for a in (*shard, known[0])
        )
        w_b = jnp.where(row_b < size, w_b, 0)
        *found, change_KE = look(x_bD, w_b, square_b, old_b, change_KE)
        known = [a.at[row_b].set(b, mode="drop") for a, b in zip(known, found)]
        return *known, change_KE

    num_blocks = -(-jnp.sum(unsure_n) // block)
    start = *known, _nothing(total_KE, shard)
    return jax.lax.fori_loop(0, num_blocks, body, start)


def _nothing(total_KE: jax.Array, shard: _Arrays) -> jax.Array:
    """Zeros of that shape that differ between shards, as the sums will."""
    return jnp.zeros_like(total_KE) + 0 * shard[1][0]


def _look(
    centers_KD: jax.Array,
    bounds: _Bounds,
    options: lloyd.Options,
    x_bD: jax.Array,
    w_b: jax.Array,
    square_b: jax.Array,
    old_b: jax.Array,
    change_KE: jax.Array,
) -> _Arrays:
    """New (label_b, upper_b, lower_bT) of a block's rows, and the sums' change."""
    half_K = 0.5 * jnp.sum(centers_KD**2, axis=1)
    score_bK = half_K[None] - jnp.matmul(
        x_bD, centers_KD.T, precision=assignment.HIGHEST
    )
    new_b = assignment.argmin(score_bK)
    near_b, far_bT = _distances(score_bK, new_b, square_b, half_K)
    changed_b = (old_b != new_b) & (w_b > 0)
    change_KE = jax.lax.cond(
        # Some hundred rows are sooner added one by one than by a product.
        jnp.sum(changed_b) > _CHUNK,
        lambda: _add_all(change_KE, x_bD, w_b, old_b, new_b, options),
        lambda: _add_few(change_KE, x_bD, w_b, old_b, new_b, changed_b),
    )
    upper_b = near_b - bounds.moved_K[new_b]
    return new_b, upper_b, far_bT + bounds.fled_T[None], change_KE


def _distances(
    score_bK: jax.Array, label_b: jax.Array, square_b: jax.Array, half_K: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Upper bound [b] to the nearest centre, lower bounds [b, T] to the others."""
    slack_b = _ROUNDING * (square_b + 2 * jnp.max(half_K))
    own_bK = jnp.arange(score_bK.shape[1])[None] == label_b[:, None]
    near_b = jnp.sum(jnp.where(own_bK, score_bK, 0), axis=1)
    others_bKT = _grouped(jnp.where(own_bK, jnp.inf, score_bK), jnp.inf)
    # Slice by slice: XLA's own reduction over a short axis is slow on CPUs.
    parts = [others_bKT[:, i] for i in range(others_bKT.shape[1])]
    far_bT = functools.reduce(jnp.minimum, parts)
    return (
        jnp.sqrt(jnp.maximum(square_b + 2 * near_b, 0) + slack_b),
        jnp.sqrt(jnp.maximum((square_b - slack_b)[:, None] + 2 * far_bT, 0)),
    )


def _add_all(
    change_KE: jax.Array,
    x_bD: jax.Array,
    w_b: jax.Array,
    old_b: jax.Array,
    new_b: jax.Array,
    options: lloyd.Options,
) -> jax.Array:
    """Adds a block's rows to their new centres' sums and takes them from the old."""
    clusters = len(change_KE)

    def added(label_b: jax.Array, w_b: jax.Array) -> jax.Array:
        add = lloyd.scatter if options.scatter else lloyd.one_hot
        sums_GKD, weight_GK = add(x_bD, w_b, label_b[:, None], clusters)
        return jnp.concatenate([sums_GKD[0], weight_GK[0][:, None]], axis=1)

    change_KE += added(new_b, w_b)
    known_b = old_b >= 0
    return jax.lax.cond(
        jnp.any(known_b),
        lambda: change_KE - added(jnp.maximum(old_b, 0), jnp.where(known_b, w_b, 0)),
        lambda: change_KE,
    )


def _add_few(
    change_KE: jax.Array,
    x_bD: jax.Array,
    w_b: jax.Array,
    old_b: jax.Array,
    new_b: jax.Array,
    changed_b: jax.Array,
) -> jax.Array:
    """As `_add_all`, for up to `_CHUNK` rows that have changed."""
    clusters, size = len(change_KE), len(x_bD)
    row_c = jnp.nonzero(changed_b, size=min(_CHUNK, size), fill_value=size)[0]
    w_c1 = w_b.at[row_c].get(mode="fill", fill_value=0)[:, None]
    x_cE = jnp.concatenate([w_c1 * x_bD.at[row_c].get(mode="clip"), w_c1], axis=1)
    change_KE = change_KE.at[new_b.at[row_c].get(mode="clip")].add(x_cE)
    old_c = old_b.at[row_c].get(mode="clip")
    old_c = jnp.where(old_c < 0, clusters, old_c)
    return change_KE.at[old_c].add(-x_cE, mode="drop")

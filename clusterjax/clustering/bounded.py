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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from clusterjax.clustering import assignment, lloyd
from clusterjax.clustering import rows as rows_lib

# Lower bounds kept for each row: as many groups of centres.
GROUPS = 16
# Rows that go over to another centre are added there so many at a time.
_CHUNK = 256
# Sums are taken anew so often, as adding and taking away rows leaves rounding.
_RENEW_EVERY = 64
# Bounds give way by this share of |row|² + |centre|², the rounding of a distance.
_ROUNDING = 4e-6

_Arrays = Sequence[jax.Array]
_Look = Callable[[jax.Array, jax.Array], _Arrays]
_Body = Callable[[jax.Array, Any], Any]


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
    shard = x_nD, square_n
    known = bounds.label_n, bounds.upper_n, bounds.lower_nT
    look = functools.partial(_look, centers_KD, bounds)
    # Reading on is faster than picking out nearly all rows.
    label_n, upper_n, lower_nT = jax.lax.cond(
        count > 0.85 * len(x_nD),
        lambda: _read_all(look, shard, options.block),
        lambda: _read_some(look, shard, known, unsure_n, options.block),
    )
    change_KE = _change(x_nD, w_n, bounds.label_n, label_n, len(centers_KD), options)
    bounds = bounds._replace(label_n=label_n, upper_n=upper_n, lower_nT=lower_nT)
    return bounds, change_KE


def _read_all(look: _Look, shard: _Arrays, block: int) -> _Arrays:
    """New (label_n, upper_n, lower_nT), from all rows in turn."""
    in_blocks = [a.reshape(-1, block, *a.shape[1:]) for a in shard]
    found = jax.lax.map(lambda parts: look(*parts), in_blocks)
    return [a.reshape(-1, *a.shape[2:]) for a in found]


def _read_some(
    look: _Look, shard: _Arrays, known: _Arrays, unsure_n: jax.Array, block: int
) -> _Arrays:
    """As `_read_all`, from the rows `unsure_n` alone."""

    def body(row_b: jax.Array, known: _Arrays) -> _Arrays:
        found = look(*(a.at[row_b].get(mode="clip") for a in shard))
        return [a.at[row_b].set(b, mode="drop") for a, b in zip(known, found)]

    return _for_each(unsure_n, block, body, list(known))


def _for_each(chosen_n: jax.Array, size: int, body: _Body, start: Any) -> Any:
    """`body(row_b, carry)` for `size` of the chosen rows at a time; n is none."""
    n = len(chosen_n)
    row_n = jnp.nonzero(chosen_n, size=n, fill_value=n)[0]
    row_n = jnp.pad(row_n, (0, -n % size), constant_values=n)

    def step(i: jax.Array, carry: Any) -> Any:
        return body(jax.lax.dynamic_slice(row_n, (i * size,), (size,)), carry)

    return jax.lax.fori_loop(0, -(-jnp.sum(chosen_n) // size), step, start)


def _look(
    centers_KD: jax.Array, bounds: _Bounds, x_bD: jax.Array, square_b: jax.Array
) -> _Arrays:
    """New (label_b, upper_b, lower_bT) of these rows."""
    half_K = 0.5 * jnp.sum(centers_KD**2, axis=1)
    score_bK = half_K[None] - jnp.matmul(
        x_bD, centers_KD.T, precision=assignment.HIGHEST
    )
    label_b = assignment.argmin(score_bK)
    near_b, far_bT = _distances(score_bK, label_b, square_b, half_K)
    upper_b = near_b - bounds.moved_K[label_b]
    return [label_b, upper_b, far_bT + bounds.fled_T[None]]


def _distances(
    score_bK: jax.Array, label_b: jax.Array, square_b: jax.Array, half_K: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Upper bound [b] to the nearest centre, lower bounds [b, T] to the others."""
    slack_b = _ROUNDING * (square_b + 2 * jnp.max(half_K))
    own_bK = jnp.arange(score_bK.shape[1])[None] == label_b[:, None]
    near_b = jnp.min(score_bK, axis=1)
    others_bKT = _grouped(jnp.where(own_bK, jnp.inf, score_bK), jnp.inf)
    # Slice by slice: XLA's own reduction over a short axis is slow on CPUs.
    parts = [others_bKT[:, i] for i in range(others_bKT.shape[1])]
    far_bT = functools.reduce(jnp.minimum, parts)
    return (
        jnp.sqrt(jnp.maximum(square_b + 2 * near_b, 0) + slack_b),
        jnp.sqrt(jnp.maximum((square_b - slack_b)[:, None] + 2 * far_bT, 0)),
    )


def _change(
    x_nD: jax.Array,
    w_n: jax.Array,
    old_n: jax.Array,
    new_n: jax.Array,
    clusters: int,
    options: lloyd.Options,
) -> jax.Array:
    """float32 [K, D + 1]: the sums by the new labels less those by the old ones.

    Either every row (of weight above 0) had a label before, or none had.
    """
    # Differs between shards from the start, as the sums will.
    zero_KE = jnp.zeros((clusters, x_nD.shape[1] + 1)) + 0 * w_n[0]
    return jax.lax.cond(
        jnp.any((old_n < 0) & (w_n > 0)),
        lambda: _summed(zero_KE, x_nD, w_n, new_n, options),
        lambda: _moves(zero_KE, x_nD, w_n, old_n, new_n),
    )


def _summed(
    zero_KE: jax.Array,
    x_nD: jax.Array,
    w_n: jax.Array,
    label_n: jax.Array,
    options: lloyd.Options,
) -> jax.Array:
    """Sums of all rows by their labels."""
    add = lloyd.scatter if options.scatter else lloyd.one_hot
    in_blocks = [a.reshape(-1, options.block, *a.shape[1:]) for a in (x_nD, w_n)]

    def body(total_KE: jax.Array, parts: _Arrays) -> tuple[jax.Array, None]:
        x_bD, w_b, label_b = parts
        sums_GKD, weight_GK = add(x_bD, w_b, label_b[:, None], len(total_KE))
        part_KE = jnp.concatenate([sums_GKD[0], weight_GK[0][:, None]], axis=1)
        return total_KE + part_KE, None

    label_nb = label_n.reshape(-1, options.block)
    return jax.lax.scan(body, zero_KE, (*in_blocks, label_nb))[0]


def _moves(
    zero_KE: jax.Array, x_nD: jax.Array, w_n: jax.Array, old_n: jax.Array, new_n: Any
) -> jax.Array:
    """What the rows that go over to another centre add there and take away."""

    def body(row_b: jax.Array, change_KE: jax.Array) -> jax.Array:
        w_b1 = w_n.at[row_b].get(mode="fill", fill_value=0)[:, None]
        x_bE = jnp.concatenate([w_b1 * x_nD.at[row_b].get(mode="clip"), w_b1], axis=1)
        change_KE = change_KE.at[new_n.at[row_b].get(mode="clip")].add(x_bE)
        return change_KE.at[old_n.at[row_b].get(mode="clip")].add(-x_bE)

    changed_n = (old_n != new_n) & (w_n > 0)
    return _for_each(changed_n, min(_CHUNK, len(w_n)), body, zero_KE)

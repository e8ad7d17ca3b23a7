"""Subset rules that need more than a sort, jitted: k-center, herding, herded order.

The module itself fits `selection.keep.SubsetRules`: a runner hands it to the planner,
which imports no jax.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

HIGHEST = jax.lax.Precision.HIGHEST
# Candidates of k-center that are looked at together.
_LOOKAHEAD = 64
# Up to so many bytes herding keeps all inner products.
_GRAM_BYTES = 1 << 31


def k_center(values_ND: np.ndarray, count: int, start: int) -> np.ndarray:
    """The greedy farthest-first cover (Gonzalez 1985).

    Each next row is the one farthest from its nearest chosen row. Distances only fall
    as rows are chosen, so among the farthest few dozen the next picks are known before
    the others are updated: picks as by the plain loop, at matrix-product speed.

    Args:
      values_ND: float [N, D], finite.
      count: rows to choose, at most N.
      start: the first row.

    Returns:
      int64 [count], rows in the order chosen; ties go to the lower row. Rows equal to
      a chosen one come last, ascending.
    """
    num_rows = len(values_ND)
    # Around the mean, products cancel least; distances do not change.
    centered = np.asarray(values_ND, np.float32)
    centered = jnp.asarray(centered - centered.mean(axis=0, keepdims=True))
    lookahead = min(_LOOKAHEAD, num_rows)
    chosen, found = _k_center(
        centered, jnp.int32(start), count=min(count, num_rows), lookahead=lookahead
    )
    chosen = np.asarray(chosen, np.int64)[: int(found)]
    rest = np.setdiff1d(np.arange(num_rows), chosen)
    return np.concatenate([chosen, rest[: count - len(chosen)]])


@functools.partial(jax.jit, static_argnames=("count", "lookahead"))
def _k_center(
    x_ND: jax.Array, start: jax.Array, *, count: int, lookahead: int
) -> tuple[jax.Array, jax.Array]:
    """Rows chosen [count], of which the first `found` are valid."""
    square_N = jnp.sum(x_ND * x_ND, axis=1)

    def distance(c_CD: jax.Array, square_C: jax.Array) -> jax.Array:
        dot_NC = jnp.matmul(x_ND, c_CD.T, precision=HIGHEST)
        sum_NC = square_N[:, None] + square_C[None]
        d_NC = sum_NC - 2 * dot_NC
        # Equal rows must be at distance 0, not at the product's rounding error.
        return jnp.where(d_NC <= 1e-6 * sum_NC, 0.0, d_NC)

    def unfinished(state: tuple) -> jax.Array:
        near_N, _, found = state
        return (found < count) & (jnp.max(near_N) > 0)

    def batch(state: tuple) -> tuple:
        near_N, chosen, found = state
        _, row_C = jax.lax.top_k(near_N, lookahead)
        # All rows outside the batch are at most this far.
        outside = jnp.max(near_N.at[row_C].set(-1.0))
        distance_NC = distance(x_ND[row_C], square_N[row_C])
        between_CC = distance_NC[row_C]

        def safe(inner: tuple) -> jax.Array:
            near_C, _, _, found, picks = inner
            farthest = jnp.max(near_C)
            return (
                (found < count) & (farthest > 0) & ((farthest > outside) | (picks == 0))
            )

        def pick(inner: tuple) -> tuple:
            near_C, picked_C, chosen, found, picks = inner
            tied_C = near_C == jnp.max(near_C)
            c = jnp.argmin(jnp.where(tied_C, row_C, x_ND.shape[0]))
            near_C = jnp.minimum(near_C, between_CC[c]).at[c].set(-1.0)
            chosen = chosen.at[found].set(row_C[c])
            return near_C, picked_C.at[c].set(True), chosen, found + 1, picks + 1

        inner = (near_N[row_C], jnp.zeros(lookahead, bool), chosen, found, 0)
        _, picked_C, chosen, found, _ = jax.lax.while_loop(safe, pick, inner)
        reached_NC = jnp.where(picked_C[None], distance_NC, jnp.inf)
        near_N = jnp.minimum(near_N, jnp.min(reached_NC, axis=1))
        gone_N = jnp.zeros(len(near_N), bool).at[row_C].max(picked_C)
        return jnp.where(gone_N, -1.0, near_N), chosen, found

    near_N = distance(x_ND[start][None], square_N[start][None])[:, 0]
    state = (
        near_N.at[start].set(-1.0),
        jnp.zeros(count, jnp.int32).at[0].set(start),
        jnp.int32(1),
    )
    _, chosen, found = jax.lax.while_loop(unfinished, batch, state)
    return chosen, found


def herding(vectors_ND: np.ndarray, count: int) -> np.ndarray:
    """Rows chosen one by one, each leaving the running sum nearest to zero (METHOD §3).

    Args:
      vectors_ND: float [N, D], herding vectors; they should sum to about zero.
      count: rows to choose, at most N.

    Returns:
      int64 [count], rows in the order chosen; ties go to the lower row.
    """
    vectors = jnp.asarray(vectors_ND, jnp.float32)
    herd = _herd_gram if _gram_fits(len(vectors)) else _herd
    return np.asarray(herd(vectors, count=min(count, len(vectors))), np.int64)


@functools.partial(jax.jit, static_argnames=("count",))
def _herd_gram(v_ND: jax.Array, *, count: int) -> jax.Array:
    """Herding from all inner products: O(N) work for each pick."""
    gram_NN = jnp.matmul(v_ND, v_ND.T, precision=HIGHEST)

    def pick(i: jax.Array, state: tuple) -> tuple:
        cost_N, chosen = state
        row = jnp.argmin(cost_N)
        cost_N = (cost_N + 2 * gram_NN[row]).at[row].set(jnp.inf)
        return cost_N, chosen.at[i].set(row)

    state = (jnp.sum(v_ND * v_ND, axis=1), jnp.zeros(count, jnp.int32))
    return jax.lax.fori_loop(0, count, pick, state)[1]


@functools.partial(jax.jit, static_argnames=("count",))
def _herd(v_ND: jax.Array, *, count: int) -> jax.Array:
    """Herding with one pass over the rows for each pick: O(N) memory."""

    def pick(i: jax.Array, state: tuple) -> tuple:
        square_N, total_D, chosen = state
        cost_N = 2 * jnp.matmul(v_ND, total_D, precision=HIGHEST) + square_N
        row = jnp.argmin(cost_N)
        square_N = square_N.at[row].set(jnp.inf)
        return square_N, total_D + v_ND[row], chosen.at[i].set(row)

    dim = v_ND.shape[1]
    state = (
        jnp.sum(v_ND * v_ND, axis=1),
        jnp.zeros(dim),
        jnp.zeros(count, jnp.int32),
    )
    return jax.lax.fori_loop(0, count, pick, state)[2]


def herded_order(
    vectors_MD: np.ndarray,
    cluster_M: np.ndarray,
    quota_SK: np.ndarray,
    *,
    pool: int = 0,
    seed: int = 0,
) -> np.ndarray:
    """Orders examples so that prefix sums stay near zero, under quotas of the steps.

    Each next example is, among those whose cluster still has a place in the current
    step, the one that leaves the running sum of vectors nearest to zero (METHOD §5).
    Vectors are taken as they are: they should sum to about zero.

    Args:
      vectors_MD: float [M, D], the herding vectors of METHOD §3.
      cluster_M: int [M], in [0, K).
      quota_SK: int [S, K], examples of each cluster in each step; its columns sum to
        at most the cluster sizes.
      pool: candidates looked at for a pick, drawn at random and refilled as they are
        taken; 0 looks at all (exact greedy). Every cluster keeps one candidate at
        least. Work is O(M · pool · D).
      seed: of the pool.

    Returns:
      int64 [sum of quotas], rows in order: those of step 0, then of step 1, and so on.

    Raises:
      ValueError: the steps want more of a cluster than it has.
    """
    num_rows = len(vectors_MD)
    sizes_K = np.bincount(cluster_M, minlength=quota_SK.shape[1])
    if (quota_SK.sum(axis=0) > sizes_K).any():
        raise ValueError(
            f"the steps want {quota_SK.sum(axis=0)} examples of the clusters, which"
            f" have {sizes_K}"
        )
    count = int(quota_SK.sum())
    vectors = jnp.asarray(vectors_MD, jnp.float32)
    cluster = jnp.asarray(cluster_M, jnp.int32)
    quota = jnp.asarray(quota_SK, jnp.int32)
    exact = not 0 < pool < num_rows
    if exact and _gram_fits(num_rows):
        return np.asarray(_order_gram(vectors, cluster, quota, count=count), np.int64)
    # The stream of every cluster: its rows at random, one cluster after the other.
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(num_rows)
    stream = shuffled[np.argsort(cluster_M[shuffled], kind="stable")]
    first_K = np.concatenate([[0], np.cumsum(sizes_K)[:-1]])
    share = num_rows if exact else -(-pool // max(1, np.count_nonzero(sizes_K)))
    taken_K = np.minimum(sizes_K, share)
    slots = np.concatenate([f + np.arange(t) for f, t in zip(first_K, taken_K)])
    order = _order_pool(
        vectors,
        cluster,
        quota,
        jnp.asarray(stream, jnp.int32),
        jnp.asarray(stream[slots], jnp.int32),
        jnp.asarray(first_K + taken_K, jnp.int32),
        jnp.asarray(first_K + sizes_K, jnp.int32),
        count=count,
    )
    return np.asarray(order, np.int64)


@functools.partial(jax.jit, static_argnames=("count",))
def _order_gram(
    v_MD: jax.Array, cluster_M: jax.Array, quota_SK: jax.Array, *, count: int
) -> jax.Array:
    """Exact greedy order from all inner products."""
    gram_MM = jnp.matmul(v_MD, v_MD.T, precision=HIGHEST)

    def pick(i: jax.Array, state: tuple) -> tuple:
        cost_M, step, left_K, order = state
        step, left_K = _current_step(step, left_K, quota_SK)
        open_M = left_K[cluster_M] > 0
        row = jnp.argmin(jnp.where(open_M, cost_M, jnp.inf))
        cost_M = (cost_M + 2 * gram_MM[row]).at[row].set(jnp.inf)
        left_K = left_K.at[cluster_M[row]].add(-1)
        return cost_M, step, left_K, order.at[i].set(row)

    state = (
        jnp.sum(v_MD * v_MD, axis=1),
        jnp.int32(0),
        quota_SK[0],
        jnp.zeros(count, jnp.int32),
    )
    return jax.lax.fori_loop(0, count, pick, state)[-1]


@functools.partial(jax.jit, static_argnames=("count",))
def _order_pool(
    v_MD: jax.Array,
    cluster_M: jax.Array,
    quota_SK: jax.Array,
    stream_M: jax.Array,
    row_P: jax.Array,
    next_K: jax.Array,
    end_K: jax.Array,
    *,
    count: int,
) -> jax.Array:
    """Greedy order from a pool of P candidates; cluster c refills from its stream."""
    last = len(stream_M) - 1

    def pick(i: jax.Array, state: tuple) -> tuple:
        pool_PD, square_P, row_P, next_K, total_D, step, left_K, order = state
        step, left_K = _current_step(step, left_K, quota_SK)
        cost_P = 2 * jnp.matmul(pool_PD, total_D, precision=HIGHEST) + square_P
        open_P = left_K[cluster_M[row_P]] > 0
        slot = jnp.argmin(jnp.where(open_P, cost_P, jnp.inf))
        row = row_P[slot]
        c = cluster_M[row]
        total_D = total_D + pool_PD[slot]
        left_K = left_K.at[c].add(-1)
        # A used-up stream leaves the slot closed.
        fresh = next_K[c] < end_K[c]
        new_row = jnp.where(fresh, stream_M[jnp.minimum(next_K[c], last)], row)
        new_D = v_MD[new_row]
        square = jnp.where(fresh, jnp.sum(new_D * new_D), jnp.inf)
        return (
            pool_PD.at[slot].set(new_D),
            square_P.at[slot].set(square),
            row_P.at[slot].set(new_row),
            next_K.at[c].add(1),
            total_D,
            step,
            left_K,
            order.at[i].set(row),
        )

    pool_PD = v_MD[row_P]
    state = (
        pool_PD,
        jnp.sum(pool_PD * pool_PD, axis=1),
        row_P,
        next_K,
        jnp.zeros(v_MD.shape[1]),
        jnp.int32(0),
        quota_SK[0],
        jnp.zeros(count, jnp.int32),
    )
    return jax.lax.fori_loop(0, count, pick, state)[-1]


def _current_step(
    step: jax.Array, left_K: jax.Array, quota_SK: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The step with places left, and its places; steps may be empty."""

    def full(state: tuple) -> jax.Array:
        return ~jnp.any(state[1] > 0) & (state[0] < len(quota_SK) - 1)

    def following(state: tuple) -> tuple:
        return state[0] + 1, quota_SK[state[0] + 1]

    return jax.lax.while_loop(full, following, (step, left_K))


def _gram_fits(num_rows: int) -> bool:
    return 4 * num_rows**2 <= _GRAM_BYTES

"""The herded order of the kept entries (METHOD §5), stored with the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from clusterjax import config, datatypes, errors, herding, shuffling
from clusterjax import plan as plans
from clusterjax.allocation import exchange, membership


def with_order(
    plan: plans.SelectionPlan,
    cfg: config.AllocationConfig,
    feats: datatypes.GradientFeatures | None,
    herd: Callable[..., np.ndarray] | None,
) -> plans.SelectionPlan:
    """The plan with a herded order for these settings, made now if it lacks one.

    Args:
      plan: the selection plan.
      cfg: allocation settings.
      feats: gradient features of the plan.
      herd: `herd(vectors_MD, cluster_id_M, counts_SK, pool=, seed=) -> int [M]`.

    Raises:
      errors.PlanError: no order is stored and there are no features to make one.
    """
    made_for = {
        "batch_size": cfg.batch_size,
        "seed": cfg.seed,
        "pool": cfg.herding_pool,
        "exchanges": cfg.herding_exchanges,
    }
    if len(plan.herded_order) and plan.herded_for == made_for:
        return plan
    if int(plan.copies.max()) > 1:
        raise errors.ConfigError(
            "allocation.order='herded' can't be used with repeated examples"
            f" (selection.method={plan.method!r}); use order='shuffled'"
        )
    if feats is None:
        raise errors.PlanError(
            "allocation.order='herded' needs gradient features: the plan holds no order"
            f" for {made_for}; run the features stage, or use order='shuffled'"
        )
    members_SB = membership.epoch_members(
        plan.cluster_id, plan.quota, plan.example_id, cfg.batch_size, cfg.seed, 0
    )
    counts_SK = _counts(members_SB, plan)
    vectors_MD = _vectors(plan, feats)
    order_M = (herd or numpy_order)(
        vectors_MD, plan.cluster_id, counts_SK, pool=cfg.herding_pool, seed=cfg.seed
    )
    order_M = exchange.improve(
        order_M,
        vectors_MD,
        plan.cluster_id,
        counts_SK,
        cfg.herding_exchanges,
        cfg.seed,
    )
    return dataclasses.replace(
        plan, herded_order=np.asarray(order_M, np.int64), herded_for=made_for
    )


def rearrange(members_SB: np.ndarray, plan: plans.SelectionPlan) -> np.ndarray:
    """Fills the slots of a shuffled epoch in the stored order, cluster by cluster."""
    used = members_SB >= 0
    slots = plan.cluster_id[members_SB[used]]
    result_SB = members_SB.copy()
    order_cluster = plan.cluster_id[plan.herded_order]
    filled = np.empty(len(slots), members_SB.dtype)
    # The q-th slot of a cluster takes the q-th entry of that cluster in the order.
    filled[np.argsort(slots, kind="stable")] = plan.herded_order[
        np.argsort(order_cluster, kind="stable")
    ]
    result_SB[used] = filled
    return result_SB


def numpy_order(
    vectors_MD: np.ndarray,
    cluster_id_M: np.ndarray,
    counts_SK: np.ndarray,
    *,
    pool: int = 0,
    seed: int = 0,
) -> np.ndarray:
    """Greedy herding under the coverage of each step, plain NumPy.

    Step by step, the next example is the one, among clusters that the step still
    expects, that leaves the prefix sum of the vectors nearest to zero.

    Args:
      vectors_MD: herding vectors; those of a cluster sum to zero.
      cluster_id_M: int [M].
      counts_SK: int [S, K], examples of each cluster in each step.
      pool: candidates looked at per pick, drawn at random; 0 = all.
      seed: seed of the candidates.

    Returns:
      int64 [M], entries in order, step after step.
    """
    vectors_MD = np.asarray(vectors_MD, np.float64)
    square_M = (vectors_MD**2).sum(1)
    waiting = shuffling.random_order(np.arange(len(vectors_MD)), seed, _POOL)
    prefix_D = np.zeros(vectors_MD.shape[1])
    order: list[int] = []
    for counts_K in np.array(counts_SK):
        for _ in range(int(counts_K.sum())):
            allowed = np.flatnonzero(counts_K[cluster_id_M[waiting]] > 0)
            allowed = allowed[:pool] if pool else allowed
            rows = waiting[allowed]
            cost = 2 * vectors_MD[rows] @ prefix_D + square_M[rows]
            best = int(np.argmin(cost))
            entry = int(rows[best])
            prefix_D += vectors_MD[entry]
            counts_K[cluster_id_M[entry]] -= 1
            order.append(entry)
            waiting = np.delete(waiting, allowed[best])
    return np.array(order, np.int64)


def _counts(members_SB: np.ndarray, plan: plans.SelectionPlan) -> np.ndarray:
    counts_SK = np.zeros((len(members_SB), plan.num_clusters), np.int64)
    step, slot = np.nonzero(members_SB >= 0)
    np.add.at(counts_SK, (step, plan.cluster_id[members_SB[step, slot]]), 1)
    return counts_SK


def _vectors(
    plan: plans.SelectionPlan, feats: datatypes.GradientFeatures
) -> np.ndarray:
    row = np.searchsorted(feats.example_id, plan.example_id)
    row = np.minimum(row, len(feats.example_id) - 1)
    if (feats.example_id[row] != plan.example_id).any():
        missing = str(plan.uid[feats.example_id[row] != plan.example_id][0])
        raise errors.PlanError(
            f"example {missing!r} of the plan has no gradient feature; order='herded'"
            " needs one for every kept example"
        )
    return herding.vectors(
        feats.values[row],
        feats.norm[row],
        feats.num_labels[row],
        plan.user_weight[plan.entry],
        plan.cluster_id,
        plan.cluster_share,
        plan.normalise,
    )


_POOL = 0x9001

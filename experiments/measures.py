"""What a selection is worth, measured apart from training.

Coverage and purity against ground-truth groups, and the mechanism of the method itself:
how noisy the planned steps are, and how far the kept set's weighted mean gradient lies
from that of all data. Gradients are whole-model sketches whose projections are other
ones than those that chose: a plan always looks good on the numbers it was made from.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from clusterjax import allocation, datatypes, errors
from clusterjax import plan as plan_lib

_RANDOM_EPOCHS = 4
_RANDOM_SUBSETS = 20


def coverage(group_N: np.ndarray, kept_N: np.ndarray) -> float:
    """Share of the known groups of which at least one example is kept.

    Args:
      group_N: int [N], −1 = unknown.
      kept_N: bool [N].
    """
    known = np.unique(group_N[group_N >= 0])
    kept = np.unique(group_N[kept_N & (group_N >= 0)])
    return len(kept) / len(known) if len(known) else float("nan")


def purity(cluster_n: np.ndarray, group_n: np.ndarray) -> float:
    """Share of examples that belong to the commonest group of their cluster.

    Args:
      cluster_n: int [n], clusters.
      group_n: int [n], ground truth, −1 = unknown (left out).
    """
    known = group_n >= 0
    if not known.any():
        return float("nan")
    table = np.zeros((cluster_n.max() + 1, group_n.max() + 1), np.int64)
    np.add.at(table, (cluster_n[known], group_n[known]), 1)
    return float(table.max(1).sum() / known.sum())


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """Figures on an independent whole-model sketch. Noise is a mean squared distance.

    Attributes:
      noise: of the planned steps around their mean, against plain random steps of the
        same size from all data.
      order_noise: the same, against random steps of the same kept examples with the
        plan's static weights: what order and balance alone bring.
      mean_error: distance of the kept set's weighted mean gradient from that of all
        data, relative to the length of the latter.
      mean_error_random: the same for plain random subsets as large (mean of 20).
      sketch_seed: seed of the sketch that measured.
    """

    noise: float
    order_noise: float
    mean_error: float
    mean_error_random: float
    sketch_seed: int


def mechanism(
    sketch: datatypes.GradientFeatures,
    schedule: allocation.Schedule,
    *,
    sketch_seed: int,
    chosen_by: tuple[str, int],
    rng: np.random.Generator,
) -> Mechanism:
    """Noise of the planned steps, and error of the kept set's mean gradient.

    Args:
      sketch: features of all examples, without centring; values · norm are gradients of
        each example's mean loss.
      schedule: the planned steps.
      sketch_seed: seed of the sketch's projections.
      chosen_by: kind and projection seed of the features that the plan was made from.
      rng: for the random steps and subsets to compare with.

    Raises:
      errors.ConfigError: the sketch is the one that chose.
      errors.PlanError: a kept example has no gradient in the sketch.
    """
    kind, seed = chosen_by
    if kind == sketch.kind and seed == sketch_seed:
        raise errors.ConfigError(
            f"the measuring sketch has the projections that chose (kind {kind}, seed"
            f" {seed}), so it would flatter; give it another seed"
        )
    plan = schedule.plan
    by_token = plan.normalise == "token"
    gradient_nD = sketch.values * sketch.norm[:, None]
    mass_n = sketch.user_weight * (sketch.num_labels if by_token else 1.0)
    row_M = _rows(sketch, plan)
    all_D = _mean(gradient_nD, mass_n)
    planned_SD, is_full_S = _planned_steps(gradient_nD, row_M, schedule)
    # A padded last step holds fewer examples, so it is noisier by its size alone.
    noise = _spread(planned_SD[is_full_S])
    batch = schedule.config.batch_size
    plain = _random_noise(gradient_nD, mass_n, np.arange(len(mass_n)), batch, rng)
    static_M = plan.static_weight * (sketch.num_labels[row_M] if by_token else 1.0)
    same_set = _random_noise(gradient_nD, static_M, row_M, batch, rng)
    kept_D = planned_SD.mean(0)
    subsets = [
        _relative_error(_mean(gradient_nD[rows], mass_n[rows]), all_D)
        for rows in (
            rng.permutation(len(mass_n))[: plan.num_kept]
            for _ in range(_RANDOM_SUBSETS)
        )
    ]
    return Mechanism(
        noise / plain,
        noise / same_set,
        _relative_error(kept_D, all_D),
        float(np.mean(subsets)),
        sketch_seed,
    )


def staleness(
    before: datatypes.GradientFeatures, after: datatypes.GradientFeatures
) -> float:
    """Mean cosine of each example's gradient at two moments of training."""
    both, b, a = np.intersect1d(
        before.example_id, after.example_id, assume_unique=True, return_indices=True
    )
    if not len(both):
        raise errors.PlanError("the two sketches have no example in common")
    return float((before.values[b] * after.values[a]).sum(1).mean())


def _rows(
    sketch: datatypes.GradientFeatures, plan: plan_lib.SelectionPlan
) -> np.ndarray:
    """int [M], the row in the sketch of every kept entry."""
    row_M = np.searchsorted(sketch.example_id, plan.example_id)
    row_M = np.minimum(row_M, len(sketch.example_id) - 1)
    missing = sketch.example_id[row_M] != plan.example_id
    if missing.any():
        raise errors.PlanError(
            f"the sketch has no gradient of example {plan.example_id[missing][0]},"
            " which the plan keeps"
        )
    return row_M


def _planned_steps(
    gradient_nD: np.ndarray, row_M: np.ndarray, schedule: allocation.Schedule
) -> tuple[np.ndarray, np.ndarray]:
    """Σ_i u_i |𝒯_i| g_i of every step, [S, D], and whether it holds B examples."""
    step_SD, is_full_S = [], []
    for step in schedule:
        weight = step.weight * schedule.num_labels[step.entry]
        step_SD.append(weight.astype(np.float32) @ gradient_nD[row_M[step.entry]])
        is_full_S.append(len(step.entry) == schedule.config.batch_size)
    return np.stack(step_SD), np.array(is_full_S)


def _mean(gradient_nD: np.ndarray, mass_n: np.ndarray) -> np.ndarray:
    return (mass_n.astype(np.float64) @ gradient_nD) / mass_n.sum(dtype=np.float64)


def _spread(step_SD: np.ndarray) -> float:
    """Unbiased mean squared distance of the steps from their mean."""
    if len(step_SD) < 2:
        return float("nan")
    centered = step_SD - step_SD.mean(0)
    return float((centered**2).sum(dtype=np.float64) / (len(step_SD) - 1))


def _random_noise(
    gradient_nD: np.ndarray,
    mass: np.ndarray,
    row: np.ndarray,
    batch: int,
    rng: np.random.Generator,
) -> float:
    """Spread of random steps: `row` in random order, weighted means by `mass`."""
    steps = len(row) // batch
    found = []
    for _ in range(_RANDOM_EPOCHS):
        order = rng.permutation(len(row))[: steps * batch].reshape(steps, batch)
        step_SD = np.stack([_mean(gradient_nD[row[o]], mass[o]) for o in order])
        found.append(_spread(step_SD))
    return float(np.mean(found))


def _relative_error(value_D: np.ndarray, true_D: np.ndarray) -> float:
    return float(np.linalg.norm(value_D - true_D) / np.linalg.norm(true_D))

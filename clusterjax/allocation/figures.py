"""What a schedule will do, in numbers: printed before training."""

from __future__ import annotations

import dataclasses

import numpy as np

from clusterjax import datatypes
from clusterjax import plan as plans
from clusterjax.allocation import layout, membership, schedule, weights

_NOISE_STEPS = 200


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of a schedule on R data shards.

    Attributes:
      num_steps: optimiser steps of the run.
      steps_per_epoch: S.
      num_clusters: K.
      batch_size: B.
      covering_steps: share of an epoch's steps that hold every cluster.
      fewest_clusters: clusters in the step that holds the fewest.
      effective_size: (Σω)²/Σω² over the kept label tokens (`normalise = token`) or
        examples, with ω their weight in an epoch; as a share of their number. 1 is
        equal weights; lower means that few of them carry the gradient.
      token_imbalance: tokens of the fullest shard over the mean shard, worst step.
      mean_token_imbalance: the same, mean over steps.
      row_fill: tokens over positions of the rows in use.
      empty_rows: share of rows that hold nothing.
      fill: tokens over all positions, [A, R·L, T].
      shape: (A, R·L, T) of every batch.
      noise: mean squared distance of a step's gradient from the epoch's, as a ratio to
        random steps of the same examples and weights; None without features of all.
      noise_kind: kind of the features that `noise` is measured on.
      noise_steps: steps that `noise` is measured on.
    """

    num_steps: int
    steps_per_epoch: int
    num_clusters: int
    batch_size: int
    covering_steps: float
    fewest_clusters: int
    effective_size: float
    token_imbalance: float
    mean_token_imbalance: float
    row_fill: float
    empty_rows: float
    fill: float
    shape: tuple[int, int, int]
    noise: float | None = None
    noise_kind: str = ""
    noise_steps: int = 0

    def lines(self) -> list[str]:
        """Sentences for people."""
        micro_steps, rows, row_length = self.shape
        lines = [
            f"{self.num_steps:,} steps of {self.batch_size} examples,"
            f" {self.steps_per_epoch:,} an epoch",
            f"{self.covering_steps:.1%} of the steps hold all {self.num_clusters}"
            f" clusters; the fewest in a step are {self.fewest_clusters}",
            f"effective sample size {self.effective_size:.1%} of what is kept",
            f"fullest shard {self.mean_token_imbalance - 1:.1%} above the mean in"
            f" tokens, {self.token_imbalance - 1:.1%} in the worst step",
            f"batches of {micro_steps} × {rows} rows × {row_length} positions;"
            f" {self.fill:.1%} hold tokens: rows in use are {self.row_fill:.1%} full,"
            f" {self.empty_rows:.1%} of the rows are empty",
        ]
        if self.batch_size < self.num_clusters:
            lines.append(
                f"a step of {self.batch_size} examples can't hold {self.num_clusters}"
                " clusters; they are scaled up by S/S_c where they appear"
            )
        if self.noise is not None:
            lines.append(
                f"noise of a step {self.noise:.2f} of random steps', on the"
                f" {self.noise_kind} features that also chose (it flatters);"
                f" {self.noise_steps} steps"
            )
        return lines


def measure(
    plan_schedule: schedule.Schedule,
    num_shards: int,
    num_micro_steps: int | None = None,
    feats: datatypes.GradientFeatures | None = None,
) -> Figures:
    """Figures of the first epoch of a schedule; tokens and rows, of its first steps.

    Args:
      plan_schedule: the schedule.
      num_shards: R.
      num_micro_steps: A; the config's by default.
      feats: gradient features, for `noise`.
    """
    plan, cfg = plan_schedule.plan, plan_schedule.config
    members_SB = plan_schedule.members(0)
    used_SB = members_SB >= 0
    clusters_S = _clusters_per_step(members_SB, plan.cluster_id)
    placed = plan_schedule.layout(num_shards, num_micro_steps)
    row_fill, empty, fill, imbalance_S = _rows(plan_schedule, placed)
    noise, steps = None, 0
    row_M = None if feats is None else _feature_rows(plan, feats)
    if feats is not None and row_M is not None and len(members_SB) > 1:
        noise, steps = _noise(plan_schedule, feats, row_M)
    return Figures(
        num_steps=plan_schedule.num_steps,
        steps_per_epoch=plan_schedule.steps_per_epoch,
        num_clusters=plan.num_clusters,
        batch_size=cfg.batch_size,
        covering_steps=float((clusters_S == plan.num_clusters).mean()),
        fewest_clusters=int(clusters_S.min()),
        effective_size=_effective_size(
            plan_schedule.epoch_weights(0)[used_SB],
            plan_schedule.num_labels[members_SB[used_SB]],
            plan.normalise,
        ),
        token_imbalance=float(imbalance_S.max()),
        mean_token_imbalance=float(imbalance_S.mean()),
        row_fill=row_fill,
        empty_rows=empty,
        fill=fill,
        shape=placed.shape,
        noise=noise,
        noise_kind="" if feats is None else feats.kind,
        noise_steps=steps,
    )


def _clusters_per_step(members_SB: np.ndarray, cluster_id_M: np.ndarray) -> np.ndarray:
    """int [S]; the entries of a cluster lie side by side."""
    cluster_SB = np.where(members_SB >= 0, cluster_id_M[members_SB], -1)
    change = np.ones(cluster_SB.shape, bool)
    change[:, 1:] = cluster_SB[:, 1:] != cluster_SB[:, :-1]
    return (change & (cluster_SB >= 0)).sum(1)


def _effective_size(
    weight: np.ndarray, num_labels: np.ndarray, normalise: str
) -> float:
    if normalise == "token":
        total, square = weight @ num_labels, weight**2 @ num_labels
        return float(total**2 / square / num_labels.sum())
    mass = weight * num_labels
    return float(mass.sum() ** 2 / (mass @ mass) / len(mass))


def _rows(
    plan_schedule: schedule.Schedule, placed: layout.Layout
) -> tuple[float, float, float, np.ndarray]:
    """(fill of rows in use, share of empty rows, fill, imbalance [S])."""
    shard_SB, row_SB = placed.first_steps()
    members_SB = plan_schedule.members(0)[: len(shard_SB)]
    num_shards = placed.num_shards
    step, slot = np.nonzero(members_SB >= 0)
    length = plan_schedule.length[members_SB[step, slot]]
    cell = step * num_shards + shard_SB[step, slot]
    load = np.bincount(cell, length, minlength=len(members_SB) * num_shards)
    load_SR = load.reshape(len(members_SB), num_shards)
    most = int(row_SB.max()) + 1
    rows = len(np.unique(cell * most + row_SB[step, slot]))
    micro_steps, step_rows, width = placed.shape
    all_rows = len(members_SB) * micro_steps * step_rows
    tokens = int(length.sum())
    return (
        tokens / (rows * width),
        1 - rows / all_rows,
        tokens / (all_rows * width),
        load_SR.max(1) / load_SR.mean(1),
    )


def _feature_rows(
    plan: plans.SelectionPlan, feats: datatypes.GradientFeatures
) -> np.ndarray | None:
    """int [M], the feature of each kept entry; None if some have none."""
    row_M = np.searchsorted(feats.example_id, plan.example_id)
    row_M = np.minimum(row_M, len(feats.example_id) - 1)
    found = (feats.example_id[row_M] == plan.example_id).all()
    return row_M if found else None


def _noise(
    plan_schedule: schedule.Schedule,
    feats: datatypes.GradientFeatures,
    row_M: np.ndarray,
) -> tuple[float, int]:
    """Noise of the steps as a ratio to random ones, and how many steps were looked at.

    Random steps draw the kept examples without regard to clusters and give each the
    weight that it has in the whole epoch, normalised inside the step.
    """
    plan = plan_schedule.plan
    members_SB, weight_SB = plan_schedule.members(0), plan_schedule.epoch_weights(0)
    labels_M = plan_schedule.num_labels.astype(np.float64)
    mass_M = np.zeros(plan.num_kept)
    used = members_SB >= 0
    mass_M[members_SB[used]] = weight_SB[used]
    random_SB = membership.epoch_members(
        np.zeros(plan.num_kept, np.int32),
        np.array([plan.num_kept]),
        np.arange(plan.num_kept),
        plan_schedule.config.batch_size,
        plan_schedule.config.seed,
        _RANDOM_EPOCH,
    )
    random_weight_SB = weights.epoch_weights(
        random_SB,
        np.zeros(plan.num_kept, np.int32),
        labels_M,
        np.maximum(mass_M, 1e-30),
        np.ones(1),
        "none",
        "token",
    )
    full = plan.num_kept // plan_schedule.config.batch_size
    steps = min(max(full, 1), _NOISE_STEPS, len(members_SB))

    def step_gradients(rows_SB: np.ndarray, weight_SB: np.ndarray) -> np.ndarray:
        chosen = np.linspace(0, max(full, 1) - 1, steps).astype(int)
        result = np.empty((steps, feats.values.shape[1]))
        for i, step in enumerate(chosen):
            entry = rows_SB[step][rows_SB[step] >= 0]
            scale = weight_SB[step][: len(entry)] * labels_M[entry]
            rows = row_M[entry]
            result[i] = (scale * feats.norm[rows]) @ feats.values[rows]
        return result

    mean_D = _weighted_mean(feats, row_M, mass_M * labels_M)
    own, random = (
        ((step_gradients(*pair) - mean_D) ** 2).sum(1).mean()
        for pair in ((members_SB, weight_SB), (random_SB, random_weight_SB))
    )
    return float(own / max(random, 1e-300)), steps


def _weighted_mean(
    feats: datatypes.GradientFeatures, row_M: np.ndarray, mass_M: np.ndarray
) -> np.ndarray:
    """float64 [D], in blocks so that no copy of all features is made."""
    scale_M = mass_M / mass_M.sum() * feats.norm[row_M]
    total = np.zeros(feats.values.shape[1])
    for begin in range(0, len(row_M), 65536):
        part = slice(begin, begin + 65536)
        total += scale_M[part] @ feats.values[row_M[part]]
    return total


_RANDOM_EPOCH = 1 << 40

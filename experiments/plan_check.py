"""`plan verify`: the promises of METHOD §3–5, checked on a saved plan and its run."""

from __future__ import annotations

import numpy as np

from clusterjax import allocation, errors
from clusterjax import plan as plan_lib
from experiments import saved_run, weight_check

_CHECKED_STEPS = 5


class Violation(AssertionError):
    """A plan or schedule does not hold what METHOD promises."""


def verify(run: saved_run.SavedRun) -> list[str]:
    """Checks everything; returns what was found right.

    Loading has already compared checksums and fingerprints.

    Raises:
      Violation: with the first promise that does not hold.
      errors.PlanError: the run has no plan, or it belongs to other data.
    """
    plan, schedule = run.plan, run.schedule
    if plan is None or schedule is None:
        raise errors.PlanError(f"{run.folder} holds no plan; run the select stage")
    if plan.corpus_fingerprint != run.corpus.fingerprint:
        raise errors.PlanError(
            f"the plan was made from data {plan.corpus_fingerprint} and the run has"
            f" {run.corpus.fingerprint}"
        )
    lines = ["ok: checksums and fingerprints"]
    lines += _plan(plan, run)
    for epoch in range(schedule.num_epochs):
        _membership(schedule, epoch)
        _weights(schedule, epoch)
    lines.append(f"ok: membership and Σu of all {schedule.num_epochs} epochs")
    lines.append(_second_derivation(run, schedule))
    figures = allocation.measure(schedule, run.num_shards, feats=run.feats)
    return lines + figures.lines()


def _require(holds: bool, promise: str) -> None:
    if not holds:
        raise Violation(promise)


def _plan(plan: plan_lib.SelectionPlan, run: saved_run.SavedRun) -> list[str]:
    kept = np.bincount(plan.cluster_id, minlength=plan.num_clusters)
    _require((kept == plan.quota).all(), "clusters keep what their quotas say")
    sizes = np.bincount(plan.candidate_cluster, minlength=plan.num_clusters)
    _require((sizes == plan.cluster_size).all(), "cluster sizes count the candidates")
    _require(abs(plan.cluster_share.sum() - 1) < 1e-12, "shares sum to 1")
    _require(
        (run.corpus.uid[plan.candidate_id] == plan.candidate_uid).all(),
        "ids of the plan are those of the corpus",
    )
    forced = [("must_keep", True), ("never_keep", False)]
    for name, kept_or_not in forced:
        uids = plan.settings.get(name, [])
        mine = np.isin(plan.candidate_uid, np.array(uids, dtype=str))
        _require(
            ((plan.copies[mine] > 0) == kept_or_not).all(), f"selection.{name} holds"
        )
    return [f"ok: {plan.num_kept:,} kept examples, quotas, sizes and shares"]


def _membership(schedule: allocation.Schedule, epoch: int) -> None:
    """Every entry once, and counts of each step rounded from B·q_c/M."""
    plan = schedule.plan
    members_SB = schedule.members(epoch)
    entries = members_SB[members_SB >= 0]
    _require(len(np.unique(entries)) == len(entries), f"epoch {epoch}: no entry twice")
    if schedule.config.last_step == "pad":
        _require(len(entries) == plan.num_kept, f"epoch {epoch}: every entry once")
    step, slot = np.nonzero(members_SB >= 0)
    cell = step * plan.num_clusters + plan.cluster_id[members_SB[step, slot]]
    count_SK = np.bincount(cell, minlength=len(members_SB) * plan.num_clusters)
    count_SK = count_SK.reshape(len(members_SB), plan.num_clusters)
    product_SK = count_SK.sum(1)[:, None] * plan.quota
    low, high = product_SK // plan.num_kept, -(-product_SK // plan.num_kept)
    _require(
        bool(((count_SK >= low) & (count_SK <= high)).all()),
        f"epoch {epoch}: every step holds ⌊B·q_c/M⌋ or ⌈B·q_c/M⌉ of every cluster",
    )


def _weights(schedule: allocation.Schedule, epoch: int) -> None:
    members_SB = schedule.members(epoch)
    labels_SB = np.where(members_SB >= 0, schedule.num_labels[members_SB], 0)
    total_S = (schedule.epoch_weights(epoch) * labels_SB).sum(1)
    _require(abs(total_S.mean() - 1) < 1e-9, f"epoch {epoch}: the mean of Σu is 1")


def _second_derivation(run: saved_run.SavedRun, schedule: allocation.Schedule) -> str:
    """Weights of some steps, derived a second time and compared with the batches."""
    last = schedule.num_steps - 1
    steps = sorted(set(np.linspace(0, last, _CHECKED_STEPS).astype(int).tolist()))
    try:
        checks = [weight_check.check_step(run, step) for step in steps]
    except weight_check.WeightError as error:
        raise Violation(str(error)) from error
    worst = max(check.worst for check in checks)
    return (
        f"ok: token weights of steps {steps} derived a second time, relative difference"
        f" at most {worst:.1e}"
    )

"""Loss weights of a step, derived a second time and compared with its batch."""

from __future__ import annotations

import dataclasses

import numpy as np

from clusterjax import batching, datatypes
from experiments import saved_run

# The batch holds float32; the derivation is float64.
TOLERANCE = 1e-6


class WeightError(AssertionError):
    """A weight in a batch is not what METHOD §4 says."""


@dataclasses.dataclass(frozen=True)
class Check:
    """Weights of one step, derived and assembled.

    Attributes:
      step: optimiser step.
      num_tokens: label tokens compared (all of the step, not this example's alone).
      worst: largest difference relative to the derived weight.
      total: sum of the derived weights (1 when the step holds every cluster).
    """

    step: int
    num_tokens: int
    worst: float
    total: float


def derive_weights(run: saved_run.SavedRun, step: int) -> dict[tuple[int, int], float]:
    """u_it of every label token of a step, from METHOD §4 and raw facts alone.

    Uses the label masks of the corpus, the cluster of every candidate and which
    examples each step of the epoch holds; none of the stored label counts, shares,
    quotas or weights.

    Returns:
      (row of the corpus, position of the label token) → weight, summed over the copies
      of an example.
    """
    assert run.schedule is not None and run.plan is not None
    plan, members = run.plan, run.schedule.step(step)
    grouped = plan.weighting != "none"
    share = _shares(run) if grouped else {0: 1.0}
    scale = _epoch_scale(run, members.epoch, share) if grouped else {0: 1.0}
    cluster = dict(zip(plan.candidate_id.tolist(), plan.candidate_cluster.tolist()))
    positions, group, user = {}, {}, {}
    for i in set(members.example_id.tolist()):
        positions[i] = _label_positions(run.corpus, i)
        group[i] = cluster[i] if grouped else 0
        user[i] = float(run.corpus.user_weight[i])
    by_token = plan.normalise == "token"
    below: dict[int, float] = {}
    for i in members.example_id.tolist():
        mass = user[i] * (len(positions[i]) if by_token else 1)
        below[group[i]] = below.get(group[i], 0.0) + mass
    weights: dict[tuple[int, int], float] = {}
    for i in members.example_id.tolist():
        weight = scale[group[i]] * user[i] / below[group[i]]
        weight /= 1 if by_token else len(positions[i])
        for position in positions[i]:
            weights[i, position] = weights.get((i, position), 0.0) + weight
    return weights


def _label_positions(corpus: datatypes.Corpus, i: int) -> list[int]:
    """Positions of the label tokens: those that another token comes before."""
    _, is_label = corpus.example(i)
    return [position for position in range(1, len(is_label)) if is_label[position]]


def _shares(run: saved_run.SavedRun) -> dict[int, float]:
    """π_c from the sizes of the clusters, weighted by the user's weights."""
    plan = run.plan
    assert plan is not None
    size: dict[int, float] = {}
    for i, c in zip(plan.candidate_id.tolist(), plan.candidate_cluster.tolist()):
        mass = float(run.corpus.user_weight[i])
        if plan.settings["share"] == "tokens":
            mass *= len(_label_positions(run.corpus, i))
        size[c] = size.get(c, 0.0) + mass
    shape = {"share": lambda n: n, "sqrt": np.sqrt, "uniform": lambda n: 1.0}
    shaped = {c: float(shape[plan.weighting](n)) for c, n in size.items()}
    total = sum(shaped.values())
    return {c: n / total for c, n in shaped.items()}


def _epoch_scale(
    run: saved_run.SavedRun, epoch: int, share: dict[int, float]
) -> dict[int, float]:
    """π_c·S/S_c: a cluster that some steps lack counts more in the others."""
    plan, schedule = run.plan, run.schedule
    assert plan is not None and schedule is not None
    cluster = dict(zip(plan.candidate_id.tolist(), plan.candidate_cluster.tolist()))
    count: dict[int, int] = {}
    members_SB = schedule.members(epoch)
    for row in members_SB:
        held = {cluster[int(plan.example_id[entry])] for entry in row if entry >= 0}
        for c in held:
            count[c] = count.get(c, 0) + 1
    # Clusters without an example in the epoch leave their share to the others.
    present = sum(share[c] for c in count)
    num_steps = len(members_SB)
    return {c: share[c] / present * num_steps / n for c, n in count.items()}


def check_step(run: saved_run.SavedRun, step: int) -> Check:
    """Compares derived weights with those of the batch that training would see.

    Raises:
      WeightError: a weight differs, is missing, or stands where no label follows.
    """
    assert run.schedule is not None
    micro_steps = run.config.allocation.accumulation_steps
    placed = run.schedule.place(step, run.num_shards, micro_steps)
    batch = batching.fill(run.corpus, placed)
    found = _assembled_weights(batch)
    derived = derive_weights(run, step)
    different = derived.keys() ^ found.keys()
    if different:
        raise WeightError(
            f"step {step}: {len(different):,} weights stand in only one of batch and"
            f" derivation, for example (example, position) {min(different)}"
        )
    worst_at = max(derived, key=lambda at: abs(found[at] / derived[at] - 1))
    worst = abs(found[worst_at] / derived[worst_at] - 1)
    if worst > TOLERANCE:
        raise WeightError(
            f"step {step}: the weight of (example, position) {worst_at} is"
            f" {found[worst_at]:.9e} in the batch and {derived[worst_at]:.9e} by METHOD"
            f" §4, {worst:.1e} apart; {TOLERANCE:.0e} is allowed"
        )
    return Check(step, len(derived), worst, sum(derived.values()))


def _assembled_weights(batch: datatypes.Batch) -> dict[tuple[int, int], float]:
    """(row of the corpus, position of the label token) → weight in the batch."""
    found: dict[tuple[int, int], float] = {}
    for index in np.argwhere(batch.loss_weights != 0):
        at = tuple(index)
        # The weight stands at the input before the label that it belongs to.
        label = int(batch.example_id[at]), int(batch.positions[at]) + 1
        found[label] = found.get(label, 0.0) + float(batch.loss_weights[at])
    return found

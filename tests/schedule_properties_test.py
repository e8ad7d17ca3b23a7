"""Properties of schedules over random plans (METHOD §5); statistics shown with -s."""

import collections
import fractions
import math

import hypothesis
import numpy as np
import planning_cases
import pytest
from hypothesis import strategies as st

from clusterjax import allocation, config

NUM_PLANS = 600
SEEN = collections.Counter()


@st.composite
def cases(draw):
    """(sizes, settings, allocation config, R, A), with all regimes well represented."""
    num_clusters = draw(st.integers(1, 9))
    sizes = draw(
        st.lists(st.integers(1, 40), min_size=num_clusters, max_size=num_clusters)
    )
    settings = {
        "weighting": draw(st.sampled_from(["share", "sqrt", "uniform", "none"])),
        "normalise": draw(st.sampled_from(["token", "example"])),
        "share": draw(st.sampled_from(["examples", "tokens"])),
    }
    if draw(st.booleans()):
        settings |= {"keep": "nearest", "quota": "min", "ratio": 1.0}
        settings["min_kept_fraction"] = 0.0
    cfg = config.AllocationConfig(
        batch_size=draw(st.integers(1, 24)),
        num_epochs=float(draw(st.integers(1, 3))),
        last_step=draw(st.sampled_from(["pad", "pad", "drop"])),
        packing=draw(st.booleans()),
        even_steps=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32)),
    )
    return sizes, settings, cfg, draw(st.integers(1, 12)), draw(st.integers(1, 4))


def _schedule(sizes, settings, cfg):
    plan = planning_cases.plan(sizes, seed=len(sizes), **settings)
    rng = np.random.default_rng(sum(sizes))
    labels = plan.num_labels
    lengths = labels + rng.integers(1, 40, len(labels))
    if cfg.last_step == "drop" and plan.num_kept < cfg.batch_size:
        hypothesis.reject()
    return plan, allocation.allocate(plan, lengths, labels, cfg)


def _count(plan, schedule, num_shards):
    batch = schedule.config.batch_size
    SEEN["plans"] += 1
    SEEN["unequal quotas"] += len(set(plan.quota.tolist())) > 1
    SEEN["K > R"] += plan.num_clusters > num_shards
    SEEN["K < R"] += plan.num_clusters < num_shards
    SEEN["B < K"] += batch < plan.num_clusters
    SEEN["q_c < S"] += bool((plan.quota < schedule.steps_per_epoch).any())
    SEEN["incomplete last step"] += plan.num_kept % batch > 0


@hypothesis.settings(
    max_examples=NUM_PLANS,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    derandomize=True,
    database=None,
)
@hypothesis.given(cases())
def _check_random_plans(case):
    sizes, settings, cfg, num_shards, num_micro_steps = case
    plan, schedule = _schedule(sizes, settings, cfg)
    _count(plan, schedule, num_shards)
    for epoch in range(schedule.num_epochs):
        _check_membership(plan, schedule, epoch)
        _check_epoch_weights(plan, schedule, epoch)
    for step in range(schedule.num_steps):
        _check_placement(schedule, step, num_shards, num_micro_steps)


@pytest.fixture(scope="module", autouse=True)
def statistics():
    yield
    print("\n", dict(SEEN))


def test_random_plans():
    SEEN.clear()
    _check_random_plans()
    assert SEEN["plans"] >= 500
    for regime in ("unequal quotas", "K > R", "K < R", "B < K", "q_c < S"):
        assert SEEN[regime] >= 0.2 * SEEN["plans"], dict(SEEN)


def _check_membership(plan, schedule, epoch):
    cfg, total = schedule.config, plan.num_kept
    members = schedule.members(epoch)
    entries = members[members >= 0]
    assert len(np.unique(entries)) == len(entries)  # none twice in an epoch
    full, rest = divmod(total, cfg.batch_size)
    if cfg.last_step == "pad":
        assert len(entries) == total
        quota = np.bincount(plan.cluster_id[entries], minlength=plan.num_clusters)
        np.testing.assert_array_equal(quota, plan.quota)
        assert len(members) == full + (rest > 0)
    else:
        assert len(members) == full and len(entries) == full * cfg.batch_size
    for row in members:
        used = row[row >= 0]
        assert len(used) in (cfg.batch_size, rest)
        counts = np.bincount(plan.cluster_id[used], minlength=plan.num_clusters)
        for count, quota in zip(counts.tolist(), plan.quota.tolist()):
            exact = fractions.Fraction(len(used) * quota, total)
            assert math.floor(exact) <= count <= math.ceil(exact)
    if len(set(plan.quota.tolist())) == 1 and cfg.batch_size >= plan.num_clusters:
        for row in members[:full]:
            counts = np.bincount(plan.cluster_id[row], minlength=plan.num_clusters)
            assert counts.min() >= 1 and np.ptp(counts) <= 1  # coverage


def _check_epoch_weights(plan, schedule, epoch):
    members, weight = schedule.members(epoch), schedule.epoch_weights(epoch)
    labels = np.where(members >= 0, schedule.num_labels[members], 0)
    per_step = (weight * labels).sum(1)
    assert per_step.mean() == pytest.approx(1.0, abs=1e-12)
    assert (weight[members < 0] == 0).all() and (weight[members >= 0] > 0).all()
    if plan.weighting == "none":
        np.testing.assert_allclose(per_step, 1.0, atol=1e-12)
        return
    cluster = plan.cluster_id[members]
    holds = np.array(
        [((cluster == c) & (members >= 0)).any(1) for c in range(plan.num_clusters)]
    )
    if holds.all():
        np.testing.assert_allclose(per_step, 1.0, atol=1e-12)
    share = np.where(holds.any(1), plan.cluster_share, 0)
    for c in range(plan.num_clusters):
        mine = (cluster == c) & (members >= 0)
        total = (weight * labels)[mine].sum() / len(members)
        assert total == pytest.approx(share[c] / share.sum(), abs=1e-12)


def _check_placement(schedule, step, num_shards, num_micro_steps):
    placed = schedule.place(step, num_shards, num_micro_steps)
    size = len(placed.step.entry)
    assert placed.shard.min() >= 0 and placed.shard.max() < num_shards
    assert placed.micro_step.max() < num_micro_steps
    assert placed.row.min() >= 0 and placed.row.max() < placed.num_rows
    rows_per_shard = np.bincount(placed.shard, minlength=num_shards)
    assert rows_per_shard.max() == -(-size // num_shards)
    assert np.ptp(rows_per_shard) <= 1
    for cluster in np.unique(placed.step.cluster_id):
        mine = placed.shard[placed.step.cluster_id == cluster]
        assert np.ptp(np.bincount(mine, minlength=num_shards)) <= 1
    filled = np.zeros(placed.shape, np.int32)
    row = placed.shard * placed.num_rows + placed.row
    for a, r, start, length in zip(placed.micro_step, row, placed.start, placed.length):
        filled[a, r, start : start + length] += 1
    assert filled.max() == 1  # nothing overlaps, nothing is cut off
    assert filled.sum() == placed.length.sum()
    order = np.lexsort((placed.start, row, placed.micro_step))
    key = list(zip(placed.micro_step[order], row[order]))
    expected = [key[: i + 1].count(k) for i, k in enumerate(key)]
    np.testing.assert_array_equal(placed.segment[order], expected)
    if not schedule.config.packing:
        assert (placed.start == 0).all() and (placed.segment == 1).all()

"""Figures of a schedule: by hand where possible, against brute force elsewhere."""

import dataclasses

import numpy as np
import planning_cases
import pytest

from clusterjax import allocation, config


def _schedule(sizes, labels, *, plan_settings=None, **settings):
    plan = planning_cases.plan(sizes, num_labels=labels, **(plan_settings or {}))
    cfg = config.AllocationConfig(**settings)
    return allocation.allocate(plan, labels + 3, labels, cfg)


def test_coverage_of_small_batches():
    labels = np.full(24, 5)
    whole = allocation.measure(_schedule([8, 8, 8], labels, batch_size=6), 2)
    assert whole.covering_steps == 1.0 and whole.fewest_clusters == 3
    small = allocation.measure(_schedule([8, 8, 8], labels, batch_size=2), 2)
    assert small.covering_steps == 0.0 and small.fewest_clusters in (1, 2)
    assert "scaled up by S/S_c" in " ".join(small.lines())


def test_effective_size_by_hand():
    labels = np.full(24, 5)
    equal = _schedule([12, 12], labels, batch_size=6)
    assert allocation.measure(equal, 1).effective_size == pytest.approx(1)
    # Two clusters of equal quota with shares 3/4 and 1/4: weights 1.5 and 0.5, and
    # (Σω)²/(n Σω²) = 1 / ((1.5² + 0.5²) / 2) = 0.8.
    uneven = _schedule(
        [36, 12],
        np.full(48, 5),
        plan_settings={"keep": "nearest", "ratio": 1.0},
        batch_size=6,
    )
    assert allocation.measure(uneven, 1).effective_size == pytest.approx(0.8)


def test_fill_counts_every_position():
    labels = np.random.default_rng(0).integers(1, 30, 60)
    for packing in (True, False):
        schedule = _schedule([35, 25], labels, batch_size=12, packing=packing)
        figures = allocation.measure(schedule, 2, 3)
        filled = rows_in_use = rows = 0
        for step in range(schedule.steps_per_epoch):
            placed = schedule.place(step, 2, 3)
            filled += placed.length.sum()
            used = zip(placed.shard, placed.micro_step, placed.row)
            rows_in_use += len(set(used))
            rows += placed.shape[0] * placed.shape[1]
        width = placed.row_length
        assert figures.shape == placed.shape
        assert figures.fill == pytest.approx(filled / (rows * width))
        assert figures.row_fill == pytest.approx(filled / (rows_in_use * width))
        assert figures.empty_rows == pytest.approx(1 - rows_in_use / rows)


def _blobs(spread, normalise="token"):
    rng = np.random.default_rng(1)
    label = planning_cases.sized([240, 120, 120])
    centers = 3 * np.eye(8)[:3]
    values = centers[label] + spread * rng.normal(size=(480, 8))
    labels = np.full(480, 7)
    feats = planning_cases.features(
        480, values=values, norm=np.ones(480), num_labels=labels
    )
    plan = planning_cases.plan([240, 120, 120], num_labels=labels, normalise=normalise)
    return feats, plan, labels


@pytest.mark.parametrize("normalise", ["token", "example"])
def test_noise_is_what_lies_inside_the_clusters(normalise):
    feats, plan, labels = _blobs(0.3, normalise)
    cfg = config.AllocationConfig(batch_size=16)
    schedule = allocation.allocate(plan, labels + 3, labels, cfg)
    found = allocation.measure(schedule, 1, feats=feats)
    total = ((feats.values - feats.values.mean(0)) ** 2).sum(1).mean()
    inside = sum(
        ((x - x.mean(0)) ** 2).sum()
        for x in (feats.values[plan.candidate_cluster == c] for c in range(3))
    ) / len(feats.values)
    # Stratified steps keep the variance inside clusters and lose that between them.
    assert inside / total < 0.15
    assert found.noise == pytest.approx(inside / total, rel=0.5)
    assert "flatters" in " ".join(found.lines())


def test_noise_without_clusters_is_that_of_random_steps():
    feats, _, labels = _blobs(0.3)
    cfg = config.AllocationConfig(batch_size=16)
    one = planning_cases.plan([480], num_labels=labels)
    schedule = allocation.allocate(one, labels + 3, labels, cfg)
    assert allocation.measure(schedule, 1, feats=feats).noise == pytest.approx(
        1, abs=0.4
    )


def test_noise_needs_features_of_all_kept_examples():
    feats, plan, labels = _blobs(0.3)
    some = dataclasses.replace(feats, example_id=feats.example_id + 1)
    cfg = config.AllocationConfig(batch_size=16)
    schedule = allocation.allocate(plan, labels + 3, labels, cfg)
    assert allocation.measure(schedule, 1, feats=some).noise is None

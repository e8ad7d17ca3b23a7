"""Capacity assignment against golden labels and the plain greedy over all pairs."""

import itertools
import pathlib

import numpy as np
import pytest

from clusterjax import clustering, errors
from clusterjax.clustering import capacity as capacity_lib

GOLDEN = pathlib.Path(__file__).parent / "golden" / "selection"


def greedy(values, centers, capacity):
    """All (point, centre) pairs in order of (distance, point, centre)."""
    difference = values.astype(np.float64)[:, None] - centers.astype(np.float64)[None]
    distance = (difference**2).sum(-1)
    point, center = np.indices(distance.shape)
    label = np.full(len(values), -1)
    room = np.full(len(centers), capacity)
    for i in np.lexsort((center.ravel(), point.ravel(), distance.ravel())):
        p, c = point.ravel()[i], center.ravel()[i]
        if label[p] < 0 and room[c] > 0:
            label[p] = c
            room[c] -= 1
    return label


@pytest.mark.parametrize(
    "name", ["even_k4", "skewed_k4", "skewed_k8", "tiny_cluster_k3"]
)
def test_golden_labels(name):
    golden = np.load(GOLDEN / f"{name}.npz")
    label = clustering.assign_with_capacity(
        golden["features"], golden["centroids"], int(golden["capacity"])
    )
    np.testing.assert_array_equal(label, golden["capped_label"])


@pytest.mark.parametrize("seed", range(6))
def test_equals_the_plain_greedy(seed):
    rng = np.random.default_rng(seed)
    count, clusters = int(rng.integers(20, 700)), int(rng.integers(2, 12))
    values = rng.normal(size=(count, 4)).astype(np.float32)
    values[: count // 2] *= 0.05
    centers = rng.normal(size=(clusters, 4)).astype(np.float32)
    capacity = -(-count // clusters) + int(rng.integers(0, 5))
    label = clustering.assign_with_capacity(values, centers, capacity)
    np.testing.assert_array_equal(label, greedy(values, centers, capacity))


def test_equal_distances_go_by_point_then_centre():
    # Integers: all distances are exact, most of them tied.
    rng = np.random.default_rng(0)
    values = rng.integers(-2, 3, (120, 2)).astype(np.float32)
    centers = np.array([[-2, 0], [2, 0], [0, 2], [0, -2]], np.float32)
    for capacity in (30, 33, 120):
        label = clustering.assign_with_capacity(values, centers, capacity)
        np.testing.assert_array_equal(label, greedy(values, centers, capacity))


def test_nine_tenths_of_the_points_in_one_cluster(monkeypatch):
    # CASES 20; small blocks, so that no N × K matrix can exist.
    monkeypatch.setattr(capacity_lib, "BLOCK_ROWS", 256)
    rng = np.random.default_rng(1)
    centers = 3 * rng.normal(size=(8, 5)).astype(np.float32)
    near = np.where(rng.random(4000) < 0.9, 0, rng.integers(0, 8, 4000))
    values = (centers[near] + rng.normal(size=(4000, 5))).astype(np.float32)
    label = clustering.assign_with_capacity(values, centers, 750)
    assert np.bincount(label, minlength=8).max() == 750
    np.testing.assert_array_equal(label, greedy(values, centers, 750))


def test_no_pair_would_rather_be_together():
    """Stability, the property that defines the matching, without the greedy."""
    rng = np.random.default_rng(2)
    values = rng.normal(size=(500, 3)).astype(np.float32)
    centers = rng.normal(size=(6, 3)).astype(np.float32)
    label = clustering.assign_with_capacity(values, centers, 90)
    distance = ((values[:, None] - centers[None]) ** 2).sum(-1)
    own = distance[np.arange(500), label]
    sizes = np.bincount(label, minlength=6)
    worst = np.array([own[label == c].max(initial=-1) for c in range(6)])
    for c in range(6):
        wants = distance[:, c] < own - 1e-5
        takes = (sizes[c] < 90) | (distance[:, c] < worst[c] - 1e-5)
        assert not (wants & takes).any()


def test_optimal_has_the_least_cost():
    rng = np.random.default_rng(3)
    values = rng.normal(size=(6, 2))
    centers = rng.normal(size=(3, 2))
    distance = ((values[:, None] - centers[None]) ** 2).sum(-1)

    def cost(label):
        return distance[np.arange(6), label].sum()

    fair = [
        label
        for label in itertools.product(range(3), repeat=6)
        if np.bincount(label, minlength=3).max() <= 2
    ]
    optimal = clustering.assign_with_capacity(values, centers, 2, method="optimal")
    assert np.bincount(optimal).max() <= 2
    assert cost(optimal) == pytest.approx(min(cost(np.array(f)) for f in fair))
    assert cost(optimal) <= cost(clustering.assign_with_capacity(values, centers, 2))


def test_too_little_room_is_refused():
    with pytest.raises(errors.UserError, match="must be at least 5"):
        clustering.assign_with_capacity(np.zeros((10, 2)), np.zeros((2, 2)), 4)

"""Jitted subset rules against plain float64 loops."""

import numpy as np
import pytest

from clusterjax import subset
from clusterjax.selection import keep


def numpy_order(vectors, cluster, quota):
    """Exact greedy herding under the quotas of the steps."""
    vectors = vectors.astype(np.float64)
    total, used, order = np.zeros(vectors.shape[1]), np.zeros(len(vectors), bool), []
    for places in quota:
        left = places.copy()
        while left.any():
            cost = 2 * vectors @ total + (vectors**2).sum(1)
            cost[used | (left[cluster] == 0)] = np.inf
            row = int(np.argmin(cost))
            order.append(row)
            used[row] = True
            left[cluster[row]] -= 1
            total += vectors[row]
    return np.array(order)


def steps(rng, cluster, batch):
    """A table of random steps that holds every row once: int [S, K]."""
    step = np.argsort(np.argsort(rng.random(len(cluster)))) // batch
    quota = np.zeros((step.max() + 1, cluster.max() + 1), int)
    np.add.at(quota, (step, cluster), 1)
    return quota


@pytest.mark.parametrize(("rows", "dim", "count"), [(400, 6, 200), (300, 80, 300)])
def test_k_center_equals_the_plain_loop(rng, rows, dim, count):
    values = rng.normal(size=(rows, dim)).astype(np.float32)
    chosen = subset.k_center(values, count, 3)
    np.testing.assert_array_equal(chosen, keep.NumpyRules().k_center(values, count, 3))


def test_k_center_with_zero_rows_and_copies(rng):
    # A zero row made everything NaN in the published code; copies must come last.
    values = rng.normal(size=(60, 5)).astype(np.float32)
    values[7] = 0
    values[40:] = values[:20]
    chosen = subset.k_center(values, 60, 0)
    np.testing.assert_array_equal(np.sort(chosen[:40] % 40), np.arange(40))
    np.testing.assert_array_equal(np.sort(chosen), np.arange(60))
    np.testing.assert_array_equal(chosen[40:], np.sort(chosen[40:]))


def test_k_center_on_a_line_by_hand():
    # From 0: 10 is farthest; then 5 (distance 5); then 2 and 8 tie, the lower row wins.
    values = np.array([[0.0], [2.0], [5.0], [8.0], [10.0]], np.float32)
    np.testing.assert_array_equal(subset.k_center(values, 4, 0), [0, 4, 2, 1])
    np.testing.assert_array_equal(subset.k_center(values[:1], 1, 0), [0])


@pytest.mark.parametrize("gram", [True, False])
def test_herding_equals_the_plain_loop(rng, monkeypatch, gram):
    monkeypatch.setattr(subset, "_GRAM_BYTES", 1 << 31 if gram else 0)
    values = rng.normal(size=(300, 7)).astype(np.float32)
    chosen = subset.herding(values, 150)
    np.testing.assert_array_equal(chosen, keep.NumpyRules().herding(values, 150))


def test_herding_keeps_the_mean(rng):
    values = rng.normal(size=(500, 10)).astype(np.float32)
    values -= values.mean(0)
    herded = values[subset.herding(values, 50)].mean(0)
    assert np.linalg.norm(herded) < 0.2 * np.linalg.norm(values[:50].mean(0))


@pytest.mark.parametrize("gram", [True, False])
def test_herded_order_equals_the_plain_loop(rng, monkeypatch, gram):
    monkeypatch.setattr(subset, "_GRAM_BYTES", 1 << 31 if gram else 0)
    cluster = rng.integers(0, 3, 150)
    vectors = rng.normal(size=(150, 5)).astype(np.float32)
    quota = steps(rng, cluster, 12)
    np.testing.assert_array_equal(
        subset.herded_order(vectors, cluster, quota),
        numpy_order(vectors, cluster, quota),
    )


def test_herded_order_in_pools(rng):
    """Quotas are kept whatever the pool; a pool of half the rows is nearly exact."""
    cluster = rng.integers(0, 4, 800)
    vectors = rng.normal(size=(800, 16)).astype(np.float32)
    for c in range(4):
        vectors[cluster == c] -= vectors[cluster == c].mean(0)
    quota = steps(rng, cluster, 20)

    def noise(order):
        return (vectors[order].reshape(-1, 20, 16).mean(1) ** 2).sum(1).mean()

    exact = noise(subset.herded_order(vectors, cluster, quota))
    for pool in (1, 50, 400):
        order = subset.herded_order(vectors, cluster, quota, pool=pool)
        np.testing.assert_array_equal(np.sort(order), np.arange(800))
        found = np.zeros_like(quota)
        step = np.repeat(np.arange(len(quota)), quota.sum(1))
        np.add.at(found, (step, cluster[order]), 1)
        np.testing.assert_array_equal(found, quota)
    assert noise(order) < 1.2 * exact
    assert exact < 0.3 * noise(rng.permutation(800))


def test_herded_order_may_leave_rows_out(rng):
    cluster = np.array([0, 0, 0, 1, 1])
    vectors = rng.normal(size=(5, 2)).astype(np.float32)
    order = subset.herded_order(vectors, cluster, np.array([[1, 1], [0, 0], [1, 0]]))
    np.testing.assert_array_equal(np.bincount(cluster[order]), [2, 1])
    with pytest.raises(ValueError, match="steps want"):
        subset.herded_order(vectors, cluster, np.array([[4, 0]]))

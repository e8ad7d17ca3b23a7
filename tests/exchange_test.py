"""Exchanges between steps against brute force."""

import itertools

import numpy as np
import pytest

from clusterjax.allocation import exchange


def _case(rng, num_steps, batch, num_clusters, last=None):
    """Vectors that sum to zero, in random order under equal counts for each step."""
    share = rng.multinomial(batch, np.full(num_clusters, 1 / num_clusters))
    counts_SK = np.tile(share, (num_steps, 1))
    if last is not None:
        counts_SK[-1] = 0
        counts_SK[-1, 0] = last
    cluster = np.concatenate([np.repeat(np.arange(num_clusters), c) for c in counts_SK])
    vectors = rng.standard_normal((len(cluster), 6)).astype(np.float32)
    return vectors - vectors.mean(0), cluster, counts_SK


def _steps(order, counts_SK):
    return np.split(order, np.cumsum(counts_SK.sum(1))[:-1])


def _noise(vectors, steps):
    """Squared distances of the steps' means from zero, in units of the largest step."""
    largest = max(map(len, steps))
    means = [vectors[s].mean(0, dtype=np.float64) for s in steps]
    return largest**2 * sum(float((mean**2).sum()) for mean in means)


@pytest.mark.parametrize("num_clusters, last", [(1, None), (3, None), (1, 2), (2, 3)])
def test_no_exchange_is_left_that_gains(rng, num_clusters, last):
    vectors, cluster, counts_SK = _case(rng, 5, 6, num_clusters, last)
    order = np.arange(len(vectors))
    found = exchange.improve(order, vectors, cluster, counts_SK, 60, 0)
    steps, before = _steps(found, counts_SK), _steps(order, counts_SK)
    assert sorted(found) == order.tolist()
    for s in range(5):
        held = np.bincount(cluster[steps[s]], minlength=num_clusters)
        np.testing.assert_array_equal(held, counts_SK[s])
    noise = _noise(vectors, steps)
    assert noise < 0.6 * _noise(vectors, before)
    for a, b in itertools.combinations(range(5), 2):
        for i, j in itertools.product(range(len(steps[a])), range(len(steps[b]))):
            if cluster[steps[a][i]] != cluster[steps[b][j]]:
                continue
            other = [s.copy() for s in steps]
            other[a][i], other[b][j] = steps[b][j], steps[a][i]
            assert _noise(vectors, other) > noise - 1e-4


def test_two_steps_come_near_the_best_of_all_splits(rng):
    found_share = []
    for _ in range(20):
        vectors, cluster, counts_SK = _case(rng, 2, 5, 1)
        found = exchange.improve(np.arange(10), vectors, cluster, counts_SK, 1, 0)
        splits = [
            _noise(vectors, [list(s), list(set(range(10)) - set(s))])
            for s in itertools.combinations(range(10), 5)
        ]
        noise = _noise(vectors, _steps(found, counts_SK))
        assert noise >= min(splits) - 1e-4
        found_share.append(np.mean(np.array(splits) < noise - 1e-4))
    # A local search: few of the 252 splits are better.
    assert np.mean(found_share) < 0.05


def test_with_and_without_all_inner_products(rng, monkeypatch):
    vectors, cluster, counts_SK = _case(rng, 8, 10, 2)
    args = np.arange(80), vectors, cluster, counts_SK, 10, 3
    whole = exchange.improve(*args)
    monkeypatch.setattr(exchange, "_GRAM_BYTES", 0)
    np.testing.assert_array_equal(exchange.improve(*args), whole)


def test_no_rounds_and_single_steps_stay_as_they_are(rng):
    vectors, cluster, counts_SK = _case(rng, 4, 6, 2)
    order = rng.permutation(24)
    same = exchange.improve(order, vectors, cluster, counts_SK, 0, 0)
    np.testing.assert_array_equal(same, order)
    alone = exchange.improve(order, vectors, cluster, counts_SK.sum(0)[None], 5, 0)
    np.testing.assert_array_equal(alone, order)


def test_an_incomplete_step_counts_by_its_mean(rng):
    """Two examples of a step of two weigh nine times what they do in one of six."""
    for _ in range(20):
        vectors, cluster, counts_SK = _case(rng, 3, 6, 1, last=2)
        found = exchange.improve(np.arange(14), vectors, cluster, counts_SK, 40, 0)
        steps = _steps(found, counts_SK)
        noise = _noise(vectors, steps)
        for a, i, j in itertools.product(range(2), range(6), range(2)):
            other = [s.copy() for s in steps]
            other[a][i], other[2][j] = steps[2][j], steps[a][i]
            assert _noise(vectors, other) > noise - 1e-3

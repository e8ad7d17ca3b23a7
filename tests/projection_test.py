"""Random projections: the same entries everywhere, and lengths kept."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clusterjax.features import projection, projection_check

KINDS = ["rademacher", "normal", "sparse"]


def rule(kind, width=100, seed=3, name="test"):
    return projection.Projection(kind, width, seed, name)


@pytest.mark.parametrize("kind", KINDS)
def test_entries_have_the_right_moments(kind):
    matrix = np.asarray(projection.matrix(rule(kind), 1000))
    assert abs(matrix.mean()) < 4 / np.sqrt(matrix.size) * 0.1
    # E‖x R‖² = ‖x‖² for every unit vector: rows have length 1 on average.
    assert abs((matrix**2).sum(axis=1).mean() - 1) < 0.01
    if kind == "rademacher":
        assert set(np.unique(np.abs(matrix * 10).round(5))) == {1.0}
    if kind == "sparse":
        assert set((matrix != 0).sum(axis=1)) == {projection.SPARSE_ENTRIES}
    # Products of different rows and columns: no bias, the right spread.
    products = (matrix @ matrix.T)[np.triu_indices(1000, 1)]
    assert abs(products.mean()) < 5e-4
    assert abs(products.std() * 10 - 1) < 0.02
    if kind != "sparse":  # columns of one group never meet in a row
        columns = (matrix.T @ matrix)[np.triu_indices(100, 1)]
        assert abs(columns.std() / np.sqrt(1000) * 100 - 1) < 0.05


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [1, 7, 64, 333, 5000])
def test_every_block_size_gives_the_same(rng, kind, block_size):
    # CASES 16: blocks smaller than the vector, and blocks that do not divide it.
    values = jnp.asarray(rng.normal(size=(2, 333)), jnp.float32)
    expected = np.asarray(values) @ np.asarray(projection.matrix(rule(kind, 20), 333))
    found = jax.jit(
        lambda v: projection.project(v, rule(kind, 20), block_size=block_size)
    )(values)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_add_up(rng, kind):
    values = jnp.asarray(rng.normal(size=(2, 100)), jnp.float32)
    whole = projection.project(values, rule(kind, 12), 32)
    pieces = sum(
        projection.project(values[:, a:b], rule(kind, 12), 32, first_row=a)
        for a, b in ((0, 5), (5, 37), (37, 100))
    )
    np.testing.assert_allclose(pieces, whole, atol=1e-5)


def test_seeds_and_names_are_independent():
    one = projection.matrix(rule("rademacher", 64), 64)
    for other in (rule("rademacher", 64, seed=4), rule("rademacher", 64, name="x")):
        agreement = np.mean(np.asarray(one) == np.asarray(projection.matrix(other, 64)))
        assert abs(agreement - 0.5) < 4 * 0.5 / 64
    again = projection.matrix(rule("rademacher", 64), 64)
    np.testing.assert_array_equal(one, again)


def test_normal_entries_are_normal():
    entries = np.sort(
        np.asarray(projection.matrix(rule("normal", 100), 1000)) * 10, None
    )
    # Kolmogorov–Smirnov distance from N(0, 1): 1.95/√n has a chance of 0.1 %.
    chance = [0.5 * (1 + math.erf(x / math.sqrt(2))) for x in entries[::100]]
    rank = np.arange(len(entries))[::100] / len(entries)
    assert np.abs(np.array(chance) - rank).max() < 1.95 / np.sqrt(len(entries))


@pytest.mark.parametrize("kind", KINDS)
def test_self_test_passes_real_projections(kind):
    projection_check.check(rule(kind, 256), 5000, 1024)


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
def test_self_test_finds_broken_projections(monkeypatch, factor):
    # CASES 18: a projector that returns zeros.
    honest = projection.project

    def broken(values, **settings):
        return factor * honest(values, **settings)

    monkeypatch.setattr(projection, "project", broken)
    with pytest.raises(RuntimeError, match="self-test"):
        projection_check.check(rule("rademacher", 512), 2000, 1024)


def test_large_gradients_fit_under_two_gigabytes():
    # CASES 15: 1e8 entries; the compiler's figure, nothing is run.
    shape = jax.ShapeDtypeStruct((1, 100_000_000), jnp.float32)
    for kind in ("rademacher", "sparse"):
        program = jax.jit(
            lambda v, k=kind: projection.project(v, rule(k, 1024), 65_536)
        )
        memory = program.lower(shape).compile().memory_analysis()
        total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        assert total < 2 * 10**9, kind

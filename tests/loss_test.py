"""Token losses against plain logits, and what they must never do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from clusterjax import loss


def plain_nll(hidden_PH, targets_P, matrix_VH):
    logits_PV = hidden_PH @ matrix_VH.T
    picked = jnp.take_along_axis(logits_PV, targets_P[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits_PV, axis=1) - picked


def random_case(rng, positions=23, vocab=101, width=16, dtype=np.float32):
    hidden = rng.normal(size=(positions, width)).astype(dtype)
    matrix = rng.normal(size=(vocab, width)).astype(dtype)
    targets = rng.integers(0, vocab, positions).astype(np.int32)
    targets[:2] = 0, vocab - 1
    return jnp.asarray(hidden), jnp.asarray(targets), jnp.asarray(matrix)


def relative(found, expected):
    found, expected = np.asarray(found), np.asarray(expected)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("chunk", [1, 7, 50, 64, 100, 101, 5000])
def test_equals_full_logits_for_every_chunk_size(rng, chunk):
    hidden, targets, matrix = random_case(rng)
    weights = jnp.asarray(rng.normal(size=len(targets)).astype(np.float32))

    def found(h, m):
        return jnp.sum(weights * loss.token_nll(h, targets, m, chunk))

    def expected(h, m):
        return jnp.sum(weights * plain_nll(h, targets, m))

    nll = loss.token_nll(hidden, targets, matrix, chunk)
    assert relative(nll, plain_nll(hidden, targets, matrix)) < 1e-6
    for a, b in zip(
        jax.grad(found, (0, 1))(hidden, matrix),
        jax.grad(expected, (0, 1))(hidden, matrix),
    ):
        assert relative(a, b) < 2e-6


def test_float64_is_kept():
    with jax.enable_x64():
        hidden, targets, matrix = random_case(
            np.random.default_rng(1), dtype=np.float64
        )
        found = loss.token_nll(hidden, targets, matrix, 32)
        assert found.dtype == jnp.float64
        assert relative(found, plain_nll(hidden, targets, matrix)) < 1e-14
        grads = jax.grad(lambda m: loss.token_nll(hidden, targets, m, 32).sum())(matrix)
        plain = jax.grad(lambda m: plain_nll(hidden, targets, m).sum())(matrix)
        assert relative(grads, plain) < 1e-13


def test_certain_labels_keep_their_digits():
    # p_y = 1 − 1e-4·k: by subtraction in float32 this is off by up to 1 %.
    miss = np.array([1e-4, 3e-7, 1e-9, 0.5, 1 - 1e-9])
    odds = np.log(miss) - np.log1p(-miss)
    hidden = jnp.asarray(-odds[:, None].astype(np.float32))
    matrix = jnp.asarray([[1.0], [0.0]])
    targets = jnp.zeros(len(miss), jnp.int32)
    margin, _ = loss.log_odds(hidden, targets, matrix, 1)
    np.testing.assert_allclose(jax.nn.sigmoid(margin), miss, rtol=3e-6)
    nll = loss.token_nll(hidden, targets, matrix, 1)
    np.testing.assert_allclose(nll, -np.log1p(-miss), rtol=3e-6)
    grad = jax.grad(lambda h: loss.token_nll(h, targets, matrix, 1).sum())(hidden)
    np.testing.assert_allclose(grad[:, 0], -miss, rtol=3e-6)


def test_large_logits_stay_finite(rng):
    hidden, targets, matrix = random_case(rng)
    value, grads = jax.value_and_grad(
        lambda h: loss.token_nll(h, targets, matrix, 10).sum()
    )(hidden * 1e5)
    assert np.isfinite(value)
    assert np.isfinite(grads).all()


def test_vmap_of_grad_equals_loop(rng):
    hidden, targets, matrix = random_case(rng, positions=24)
    hidden, targets = hidden.reshape(4, 6, -1), targets.reshape(4, 6)

    def grad(h, t):
        return jax.grad(lambda m: loss.token_nll(h, t, m, 40).mean())(matrix)

    together = jax.vmap(grad)(hidden, targets)
    for i in range(4):
        assert relative(together[i], grad(hidden[i], targets[i])) < 1e-6


def test_labels_are_packed_shard_by_shard():
    mask = jnp.asarray(
        [[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]], dtype=bool
    )
    one = loss.find_labels(mask, 8)
    assert one.index_P[one.valid_P].tolist() == [1, 3, 8, 9, 10, 15]
    two = loss.find_labels(mask, 4, num_shards=2)
    assert two.valid_P.tolist() == [True, True, False, False] + [True] * 4
    assert two.index_P[two.valid_P].tolist() == [1, 3, 8, 9, 10, 15]
    values = jnp.arange(16.0).reshape(4, 4)
    assert two.take(values)[two.valid_P].tolist() == [1, 3, 8, 9, 10, 15]
    assert loss.find_labels(mask, 3, num_shards=2).overflow.tolist() == [False, True]


def test_too_few_slots_are_loud(rng):
    hidden = jnp.asarray(rng.normal(size=(2, 4, 8)), jnp.float32)
    matrix = jnp.asarray(rng.normal(size=(11, 8)), jnp.float32)
    targets = jnp.zeros((2, 4), jnp.int32)
    weights = jnp.ones((2, 4))
    enough, plain = loss.weighted_nll(hidden, targets, weights, matrix, size=8)
    expected = plain_nll(hidden.reshape(8, 8), targets.reshape(8), matrix).sum()
    assert abs(enough - expected) < 1e-5
    assert abs(plain - expected) < 1e-5
    short, _ = loss.weighted_nll(hidden, targets, weights, matrix, size=7)
    assert np.isnan(short)


@pytest.mark.parametrize("spec", [P("fsdp", None), P(None, "fsdp"), P("tensor", None)])
def test_sharded_matrix_gives_the_same_gradients(make_mesh, rng, spec):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    hidden = jnp.asarray(rng.normal(size=(8, 6, 16)), jnp.float32)
    matrix = jnp.asarray(rng.normal(size=(96, 16)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 96, (8, 6)), jnp.int32)
    weights = jnp.asarray(rng.uniform(size=(8, 6)) * (rng.uniform(size=(8, 6)) < 0.5))

    def value(h, m, num_shards, vocab_shards):
        return loss.weighted_nll(
            h,
            targets,
            weights.astype(jnp.float32),
            m,
            size=12,
            num_shards=num_shards,
            vocab_chunk=40,
            vocab_shards=vocab_shards,
        )[0]

    expected = jax.jit(jax.grad(value, (0, 1)), static_argnums=(2, 3))(
        hidden, matrix, 4, 1
    )
    placed = (
        jax.device_put(hidden, NamedSharding(mesh, P(("data", "fsdp")))),
        jax.device_put(matrix, NamedSharding(mesh, spec)),
    )
    vocab_shards = 2 if spec[0] is not None else 1
    found = jax.jit(jax.grad(value, (0, 1)), static_argnums=(2, 3))(
        *placed, 4, vocab_shards
    )
    for a, b in zip(found, expected):
        assert relative(a, b) < 1e-6


def temporaries(vocab, wrt):
    hidden = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    targets = jax.ShapeDtypeStruct((256,), jnp.int32)
    matrix = jax.ShapeDtypeStruct((vocab, 64), jnp.float32)

    def value(h, m, t):
        return loss.token_nll(h, t, m, 8192).sum()

    compiled = jax.jit(jax.grad(value, wrt)).lower(hidden, matrix, targets).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_temporaries_do_not_grow_with_the_vocabulary():
    # With the matrix frozen: also shows that its gradient is not computed at all.
    small, large = temporaries(32_768, 0), temporaries(151_936, 0)
    assert large < 1.1 * small
    # A [P, V] array would be 4.7 times as large at 152k.
    assert large < 256 * 151_936 * 4

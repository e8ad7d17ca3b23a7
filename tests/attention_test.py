"""Attention against NumPy, the fused kernels (interpreted) against the masked form."""

import contextlib
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clusterjax.models import attention, fused_attention

SEGMENTS = np.array(
    [[1] * 5 + [2] * 9 + [3] * 4 + [0] * 2, [0] * 3 + [1] * 17], np.int32
)


def draw(batch, length, heads, kv_heads, head_dim, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = [(batch, length, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]


def by_hand(q, k, v, segment_ids, window):
    """Query by query, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    result = np.zeros_like(q)
    for b, t, h in np.ndindex(*q.shape[:3]):
        group = h // (q.shape[2] // k.shape[2])
        seen = [
            s
            for s in range(t + 1)
            if segment_ids[b, s] == segment_ids[b, t]
            and (window is None or t - s < window)
        ]
        scores = k[b, seen, group] @ q[b, t, h] / np.sqrt(q.shape[3])
        weights = np.exp(scores - scores.max())
        result[b, t, h] = weights @ v[b, seen, group] / weights.sum()
    return result


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_masked_attention_by_hand(kv_heads, window):
    q, k, v = draw(2, 20, 6, kv_heads, 8)
    found = attention.attend(q, k, v, SEGMENTS, window)
    want = by_hand(q, k, v, SEGMENTS, window)
    np.testing.assert_allclose(found, want, atol=2e-6)


def test_one_segment_a_row_needs_no_ids():
    q, k, v = draw(2, 20, 2, 2, 8)
    found = attention.attend(q, k, v)
    np.testing.assert_allclose(
        found, by_hand(q, k, v, np.ones((2, 20)), None), atol=2e-6
    )


@pytest.mark.parametrize("window", [None, 50, 129])
@pytest.mark.parametrize("length", [129, 300, 1300])
def test_blocks_of_queries_change_nothing(length, window):
    """Long rows are worked through in blocks: values and gradients stay."""
    q, k, v = draw(1, length, 2, 1, 4)
    segment_ids = jnp.asarray(np.repeat([1, 2, 0], [length - 60, 50, 10])[None])
    mask = attention.visible(length, segment_ids, window)
    pull = jax.random.normal(jax.random.key(7), q.shape)

    def both(attend):
        value, back = jax.vjp(attend, q, k, v)
        return value, *back(pull)

    found = jax.jit(lambda: both(lambda *x: attention.attend(*x, segment_ids, window)))
    want = jax.jit(lambda: both(lambda *x: attention._masked(*x, mask)))
    for a, b in zip(found(), want(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max())


def test_positions_restart_in_every_segment():
    found = attention.positions_from_segments(jnp.asarray(SEGMENTS))
    want = [
        [*range(5), *range(9), *range(4), *range(2)],
        [*range(3), *range(17)],
    ]
    np.testing.assert_array_equal(found, want)


KERNELS = {
    "splash": lambda q, k, v, ids: fused_attention.splash(
        q, k, v, ids, None, interpret=True
    ),
    "splash_window": lambda q, k, v, ids: fused_attention.splash(
        q, k, v, ids, 33, interpret=True
    ),
    "triton": lambda q, k, v, ids: fused_attention.triton(q, k, v, ids, interpret=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("length", [128, 200])
def test_fused_kernels_and_their_gradients(name, length):
    """The kernels' own programs, run step by step on the CPU (no TPU or GPU here)."""
    _need(name.removesuffix("_window"))
    head_dim = 64
    q, k, v = draw(2, length, 4, 2, head_dim)
    index = np.arange(length)
    ids = np.stack(
        [
            np.select([index < 50, index < 120], [1, 2], 0),
            np.select([index < 90, index < 110], [1, 2], 3),
        ]
    ).astype(np.int32)
    real = jnp.asarray(ids > 0)[:, :, None, None]
    target = jax.random.normal(jax.random.key(9), q.shape)

    def loss(compute, q, k, v):
        return jnp.sum(jnp.where(real, compute(q, k, v) * target, 0))

    window = 33 if name == "splash_window" else None
    masked = functools.partial(
        attention.attend, segment_ids_BT=ids, window=window, kernel="masked"
    )

    def fused(q, k, v):
        return KERNELS[name](q, k, v, jnp.asarray(ids))

    def error(found, want):
        return float(jnp.linalg.norm(found - want) / jnp.linalg.norm(want))

    found, want = fused(q, k, v), masked(q, k, v)
    assert found.shape == want.shape
    assert error(jnp.where(real, found, 0), jnp.where(real, want, 0)) < 1e-5
    grad = jax.grad(loss, argnums=(1, 2, 3))
    for found, want in zip(grad(fused, q, k, v), grad(masked, q, k, v), strict=True):
        assert error(found, want) < 1e-5


class Device:
    def __init__(self, platform):
        self.platform = platform


class Mesh:
    def __init__(self, platform):
        self.devices = np.array([Device(platform)])


def test_the_kernel_follows_the_devices_of_the_mesh(make_mesh, monkeypatch):
    monkeypatch.setattr(fused_attention, "is_installed", lambda kernel: True)
    assert attention.choose(None, 128, None) == "masked"
    assert attention.choose(make_mesh(), 128, None) == "masked"
    assert attention.choose(Mesh("tpu"), 128, 8) == "splash"
    assert attention.choose(Mesh("gpu"), 128, None) == "triton"
    assert attention.choose(Mesh("gpu"), 128, 128) == "triton"
    assert attention.choose(Mesh("gpu"), 128, 8) == "masked"


@pytest.mark.parametrize(("platform", "kernel"), [("tpu", "splash"), ("gpu", "triton")])
@pytest.mark.parametrize("missing", ["no_such_parent.attention", "jax.no_attention"])
def test_a_kernel_that_jax_no_longer_has_is_replaced(
    platform, kernel, missing, monkeypatch
):
    """Experimental modules of JAX go away between releases: the model still runs."""
    monkeypatch.setitem(fused_attention._MODULES, kernel, missing)
    fused_attention.is_installed.cache_clear()
    try:
        with pytest.warns(UserWarning, match=rf"no {kernel} attention.*clusterjax\["):
            assert attention.choose(Mesh(platform), 128, None) == "masked"
    finally:
        fused_attention.is_installed.cache_clear()


def test_rows_and_heads_of_a_fused_kernel_stay_on_their_devices(make_mesh, monkeypatch):
    """The kernel sees one shard's rows and heads, and nothing crosses the network."""
    shapes = []

    def stand_in(q, k, v, segment_ids_BT):
        shapes.append((q.shape, k.shape, segment_ids_BT.shape))
        return attention.attend(q, k, v, segment_ids_BT, kernel="masked")

    monkeypatch.setattr(fused_attention, "triton", stand_in)
    mesh = make_mesh(data=2, fsdp=1, tensor=2)
    q, k, v = draw(2, 20, 4, 2, 8)
    compute = jax.jit(functools.partial(attention.attend, mesh=mesh, kernel="triton"))
    found = compute(q, k, v, SEGMENTS)
    want = attention.attend(q, k, v, SEGMENTS, kernel="masked")
    np.testing.assert_allclose(found, want, atol=1e-6)
    assert shapes == [((1, 20, 2, 8), (1, 20, 1, 8), (1, 20))]
    # Inside a shard_map by the caller the rows are local already.
    rows = jax.sharding.PartitionSpec("data")
    local = jax.shard_map(
        functools.partial(attention.attend, mesh=mesh, kernel="triton"),
        mesh=mesh,
        in_specs=(rows,) * 4,
        out_specs=rows,
        check_vma=False,
    )
    np.testing.assert_allclose(local(q, k, v, SEGMENTS), want, atol=1e-6)
    assert shapes[-1][0] == (1, 20, 4, 8)


def _need(kernel):
    """JAX 0.12.1 left Triton's kernel out; the extra `cuda` asks for an older one."""
    if not fused_attention.is_installed(kernel):
        pytest.skip(f"JAX {jax.__version__} has no {kernel} attention kernel")


def _as_if_on(platform):
    """Newer JAX asks which GPU a Triton kernel is lowered for."""
    parameters = inspect.signature(jax.sharding.AbstractDevice).parameters
    if platform != "cuda" or "platform" not in parameters:
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


@pytest.mark.parametrize(
    ("platform", "window", "call"),
    [
        ("tpu", None, "tpu_custom_call"),
        ("tpu", 100, "tpu_custom_call"),
        ("cuda", None, "triton"),
    ],
)
def test_fused_kernels_lower_for_their_devices(platform, window, call):
    """Forward and backward become kernel calls; no [T, T] array is left around them."""
    _need("splash" if platform == "tpu" else "triton")
    length = 384
    shapes = [jax.ShapeDtypeStruct((2, length, n, 64), jnp.bfloat16) for n in (4, 2, 2)]
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32)

    def loss(q, k, v, ids):
        if platform == "tpu":
            mixed = fused_attention.splash(q, k, v, ids, window)
        else:
            mixed = fused_attention.triton(q, k, v, ids)
        return mixed.astype(jnp.float32).sum()

    with _as_if_on(platform):
        exported = jax.export.export(
            jax.jit(jax.grad(loss, argnums=(0, 1, 2))),
            platforms=[platform],
            disabled_checks=[
                jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
            ],
        )(*shapes, ids)
    text = exported.mlir_module()
    assert text.count(call) >= 2
    assert f"{length}x{length}x" not in text

"""Learning rates in closed form; Adafactor per layer against an unstacked twin."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from clusterjax import config, optimizer

LAYERS = 3


def _names(**dimensions):
    return {name: optimizer.Names(value) for name, value in dimensions.items()}


def test_linear_schedule_in_closed_form():
    cfg = config.OptimizerConfig(
        learning_rate=0.1, schedule="linear", warmup_steps=4, final_scale=0.2
    )
    rate = optimizer.learning_rate(cfg, 14)
    found = [float(rate(s)) for s in range(15)]
    rise = [0.1 * (s + 1) / 4 for s in range(4)]
    fall = [0.1 - (0.1 - 0.02) * s / 10 for s in range(11)]
    np.testing.assert_allclose(found, rise + fall, rtol=1e-5)


def test_cosine_schedule_in_closed_form():
    cfg = config.OptimizerConfig(learning_rate=0.1, schedule="cosine", warmup_steps=0)
    rate = optimizer.learning_rate(cfg, 8)
    expected = [0.05 * (1 + math.cos(math.pi * s / 8)) for s in range(9)]
    np.testing.assert_allclose([float(rate(s)) for s in range(9)], expected, atol=1e-8)


def test_constant_schedule_and_a_warmup_longer_than_the_run():
    cfg = config.OptimizerConfig(
        learning_rate=0.1, schedule="constant", warmup_steps=10
    )
    rate = optimizer.learning_rate(cfg, 5)
    expected = [0.02, 0.04, 0.06, 0.08, 0.1]
    np.testing.assert_allclose([float(rate(s)) for s in range(5)], expected, rtol=1e-5)
    constant = config.OptimizerConfig("sgd", 0.1, "constant", warmup_steps=0)
    assert float(optimizer.learning_rate(constant, 5)(1000)) == pytest.approx(0.1)


def _problem(rng):
    """Stacked parameters, gradients of very different size by layer, and names."""
    shapes = {"w": (LAYERS, 130, 140), "scale": (LAYERS, 140), "head": (150, 140)}
    names = _names(
        w=("layer", "embed", "mlp"), scale=("layer", "norm"), head=("vocab", "embed")
    )
    size = np.array([1e-3, 1.0, 1e3], np.float32)

    def draw(name, shape, jump=1.0):
        x = rng.normal(size=shape).astype(np.float32)
        if names[name].is_stacked:
            x *= size.reshape((-1,) + (1,) * (len(shape) - 1))
            x[1] *= jump  # one layer alone meets a gradient it must clip
        return jnp.asarray(x)

    params = {name: draw(name, shape) for name, shape in shapes.items()}
    grads = [{n: draw(n, s, j) for n, s in shapes.items()} for j in (1, 100, 1)]
    return params, grads, names


def _unstack(tree, names):
    result = {}
    for name, x in tree.items():
        if names[name].is_stacked:
            result |= {f"{name}{i}": x[i] for i in range(LAYERS)}
        else:
            result[name] = x
    return result


def _run(tx, params, grads):
    state = tx.init(params)
    for g in grads:
        updates, state = jax.jit(tx.update)(g, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("parameter_scale", [False, True])
def test_adafactor_treats_every_layer_by_itself(rng, parameter_scale):
    """METHOD §6 item 8: the update equals that of a model with unstacked layers."""
    params, grads, names = _problem(rng)
    cfg = config.OptimizerConfig(
        name="adafactor",
        learning_rate=0.1,
        schedule="constant",
        warmup_steps=0,
        clip_norm=None,
        adafactor_parameter_scale=parameter_scale,
    )
    found = _run(optimizer.build(cfg, 10, names), params, grads)
    twin_params = _unstack(params, names)
    twin = optax.adafactor(
        0.1,
        multiply_by_parameter_scale=parameter_scale,
        clipping_threshold=1.0,
        momentum=None,
        weight_decay_rate=None,
    )
    expected = _run(twin, twin_params, [_unstack(g, names) for g in grads])
    for name, x in _unstack(found, names).items():
        scale = float(jnp.abs(expected[name]).max())
        np.testing.assert_allclose(x, expected[name], rtol=0, atol=1e-6 * scale)
    # The warning of METHOD is real: optax on the stacked leaves gives something else.
    stacked = _run(twin, params, grads)
    gap = jnp.linalg.norm(stacked["w"] - found["w"]) / jnp.linalg.norm(
        found["w"] - params["w"]
    )
    assert gap > 0.01


def test_adafactor_state_is_factored(rng):
    params, _, names = _problem(rng)
    cfg = config.OptimizerConfig(name="adafactor")
    state = optimizer.build(cfg, 10, names).init(params)
    held = sum(x.size for x in jax.tree.leaves(state))
    assert held < 0.05 * sum(x.size for x in params.values())


def test_adamw_equals_optax_and_decays_matrices_only(rng):
    params, grads, names = _problem(rng)
    cfg = config.OptimizerConfig(
        learning_rate=0.01,
        schedule="constant",
        warmup_steps=0,
        clip_norm=None,
        weight_decay=0.1,
    )
    found = _run(optimizer.build(cfg, 10, names), params, grads)
    mask = {"w": True, "scale": False, "head": True}
    twin = optax.adamw(0.01, weight_decay=0.1, mask=mask)
    expected = _run(twin, params, grads)
    for name in params:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)


def test_clips_the_norm_of_the_whole_gradient():
    names = _names(a=("vocab", "embed"), b=("norm",))
    cfg = config.OptimizerConfig(
        name="sgd",
        learning_rate=1.0,
        schedule="constant",
        warmup_steps=0,
        clip_norm=5.0,
    )
    params = {"a": jnp.zeros((1, 2)), "b": jnp.zeros(1)}
    grads = {"a": jnp.array([[6.0, 0.0]]), "b": jnp.array([8.0])}
    assert float(optimizer.global_norm(grads)) == pytest.approx(10.0)
    found = _run(optimizer.build(cfg, 10, names), params, [grads])
    np.testing.assert_allclose(found["a"], [[-3.0, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(found["b"], [-4.0], rtol=1e-6)


def test_moments_lie_with_their_parameters():
    names = _names(w=("layer", "embed", "mlp"), scale=("layer", "norm"))
    shapes = {"w": (2, 130, 140), "scale": (2, 140)}
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    places = {"w": "split", "scale": "scale's"}
    for name, full in (("adamw", 2), ("adafactor", 0)):
        tx = optimizer.build(config.OptimizerConfig(name=name), 10, names)
        state = jax.eval_shape(tx.init, params)
        found = optimizer.state_shardings(state, places, shapes, "whole")
        assert jax.tree.structure(found) == jax.tree.structure(state)
        assert jax.tree.leaves(found).count("split") == full

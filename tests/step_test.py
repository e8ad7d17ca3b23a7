"""The contract of METHOD §4: the gradient of a step is the same for every placement."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import training_cases

from clusterjax import datatypes, distributed, optimizer
from clusterjax import input as input_lib
from clusterjax import mesh as mesh_lib
from clusterjax import step as step_lib

# (data, fsdp, tensor), micro-steps, packing: meshes that split parameters. Data
# parallelism alone, and float64, are in contract_test.
PLACEMENTS = [
    ((1, 1, 1), 3, False),
    ((2, 2, 2), 2, False),
    ((1, 8, 1), 1, True),
    ((1, 1, 2), 1, True),
]


def _sizes(layout):
    return step_lib.Sizes(layout.label_slots, vocab_chunk=25)


def _gradient(mesh, schedule, corpus, model, step=0):
    """(ℒ, gradient) of one step as the trainer computes it, on the host."""
    tmpl, params = step_lib.split(model)
    tx = optax.sgd(1.0)
    places = step_lib.shardings(tmpl, tx, params, {}, mesh, allow_replication=True)
    params = jax.device_put(params, places.state.params)
    layout = input_lib.Layout(schedule, corpus, mesh)
    shards = mesh_lib.local_shards(mesh)
    batch = input_lib.put(layout.rows(step, shards).batch, mesh, shards)
    function = jax.jit(step_lib.make_gradient(tmpl, mesh, _sizes(layout)))
    loss, grads, _, _ = function(params, {}, batch)
    return float(loss), jax.tree.map(np.asarray, grads)


def _reference(schedule, corpus, model, step=0):
    """ℒ = Σ_c π_c (mean loss of cluster c) and its gradient, one example at a time."""
    tmpl, params = step_lib.split(model)
    plan = schedule.plan
    members = schedule.step(step)

    @jax.jit
    def total(params, tokens, is_label, weight):
        model, _ = tmpl.merge(params, {})
        logp = jax.nn.log_softmax(model.logits(model.hidden(tokens[None, :-1])))
        picked = jnp.take_along_axis(logp[0], tokens[1:, None], axis=1)[:, 0]
        return -weight * jnp.sum(jnp.where(is_label[1:], picked, 0))

    loss, grads = 0.0, jax.tree.map(np.zeros_like, params)
    for cluster, share in enumerate(plan.cluster_share):
        ids = members.example_id[members.cluster_id == cluster]
        labels = corpus.num_labels[ids].sum()
        for i in ids:
            # Padded to one length, so that one program serves all examples.
            tokens, is_label = (
                np.pad(x, (0, training_cases.ROW_LENGTH - len(x)))
                for x in corpus.example(i)
            )
            value, grad = jax.value_and_grad(total)(
                params, tokens, is_label, share / labels
            )
            loss += float(value)
            grads = jax.tree.map(lambda a, b: a + np.asarray(b), grads, grad)
    return loss, grads


def _gap(found, expected):
    """Whole-tree relative L2 distance."""
    difference = sum(np.sum((found[n] - expected[n]) ** 2) for n in expected)
    return np.sqrt(difference / sum(np.sum(x**2) for x in expected.values()))


@functools.cache
def _cases(dtype):
    corpus = training_cases.corpus()
    model = training_cases.model(dtype=dtype)
    schedule = functools.partial(training_cases.schedule, corpus)
    return corpus, model, schedule, _reference(schedule(), corpus, model)


@pytest.mark.parametrize(("shape", "micro_steps", "packing"), PLACEMENTS)
def test_gradient_is_the_same_for_every_placement(
    make_mesh, shape, micro_steps, packing
):
    corpus, model, schedule, (loss, grads) = _cases("float32")
    plan = schedule(accumulation_steps=micro_steps, packing=packing)
    found = _gradient(make_mesh(*shape), plan, corpus, model)
    assert found[0] == pytest.approx(loss, rel=1e-6)
    assert _gap(found[1], grads) <= 1e-6


def test_full_set_in_one_step_is_the_plain_mean_token_loss(make_mesh):
    """keep = all, share = tokens, normalise = token: Σ u ℓ is the mean over tokens."""
    corpus, model, _, _ = _cases("float32")
    schedule = training_cases.schedule(corpus, batch_size=40, weighting="none")
    loss, _ = _gradient(make_mesh(2), schedule, corpus, model)
    total = 0.0
    for i in range(corpus.num_examples):
        tokens, is_label = corpus.example(i)
        logp = jax.nn.log_softmax(model(jnp.asarray(tokens)[None, :-1]))[0]
        picked = np.asarray(logp)[np.arange(len(tokens) - 1), tokens[1:]]
        total -= picked[is_label[1:]].sum()
    assert loss == pytest.approx(total / corpus.num_labels.sum(), rel=1e-5)


def test_last_padded_step_counts_real_examples_only(make_mesh):
    """A batch that does not divide is padded with weight 0."""
    corpus, model, schedule, _ = _cases("float32")
    last = schedule().num_steps - 1
    expected = _reference(schedule(), corpus, model, last)
    found = _gradient(make_mesh(8), schedule(), corpus, model, last)
    assert len(schedule().step(last).example_id) < 16
    assert _gap(found[1], expected[1]) <= 1e-6


@pytest.mark.parametrize("mesh_shape", [(1, 1, 1), (4, 2, 1)])
def test_one_sgd_update_equals_the_reference(make_mesh, mesh_shape):
    corpus, model, schedule, (_, grads) = _cases("float32")
    mesh = make_mesh(*mesh_shape)
    tmpl, params = step_lib.split(model)
    before = jax.tree.map(np.asarray, params)
    tx = optax.sgd(0.5)
    places = step_lib.shardings(tmpl, tx, params, {}, mesh)
    layout = input_lib.Layout(schedule(), corpus, mesh)
    shards = mesh_lib.local_shards(mesh)
    batch = input_lib.put(layout.rows(0, shards).batch, mesh, shards)
    state = datatypes.TrainState(jnp.int32(0), params, tx.init(params))
    state = distributed.place(state, places.state, copy=True)
    run = step_lib.jit(step_lib.make_step(tmpl, tx, mesh, _sizes(layout)), places, mesh)
    state, metrics = run(state, {}, batch)
    update = {n: (before[n] - np.asarray(state.params[n])) / 0.5 for n in before}
    # Float32 parameters round the update: 1e-6 of the parameters, not of the update.
    scale = optimizer.global_norm(before) / optimizer.global_norm(grads)
    assert _gap(update, grads) <= 1e-6 * float(scale)
    assert float(metrics.grad_norm) == pytest.approx(
        float(optimizer.global_norm(grads)), rel=1e-5
    )
    assert int(state.step) == 1


def test_too_few_label_slots_are_loud(make_mesh):
    corpus, model, schedule, _ = _cases("float32")
    mesh = make_mesh(1)
    tmpl, params = step_lib.split(model)
    batch = input_lib.put(
        input_lib.Layout(schedule(), corpus, mesh).rows(0, (0,)).batch, mesh, (0,)
    )
    function = jax.jit(step_lib.make_gradient(tmpl, mesh, step_lib.Sizes(8, 25)))
    assert np.isnan(float(function(params, {}, batch)[0]))


def test_weighted_step_costs_the_flops_of_the_plain_mean(make_mesh):
    """Weights from outside cost no more than a mean taken inside."""
    corpus, model, schedule, _ = _cases("float32")
    mesh = make_mesh(2)
    tmpl, params = step_lib.split(model, mesh=mesh)
    tx = optax.sgd(1.0)
    layout = input_lib.Layout(schedule(), corpus, mesh)
    batch = input_lib.put(layout.rows(0, (0, 1)).batch, mesh, (0, 1))
    step = step_lib.make_step(tmpl, tx, mesh, _sizes(layout))

    def plain_mean(state, frozen, batch):
        mask = (batch.loss_weights != 0).astype(jnp.float32)
        return step(state, frozen, batch._replace(loss_weights=mask / jnp.sum(mask)))

    places = step_lib.shardings(tmpl, tx, params, {}, mesh)
    state = datatypes.TrainState(jnp.int32(0), params, tx.init(params))
    weighted, plain = (
        step_lib.jit(f, places, mesh).lower(state, {}, batch).compile()
        for f in (step, plain_mean)
    )
    ratio = weighted.cost_analysis()["flops"] / plain.cost_analysis()["flops"]
    # The compiler counts the count and the division that only the plain mean needs.
    assert 0.99 < ratio <= 1.0

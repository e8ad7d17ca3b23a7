"""The contract of METHOD §4, on a real decoder and the real train step.

The gradient of a step, and one plain SGD update, are the same for every placement of
the step's examples, and equal to the mixture Σ_c π_c ∇L_c computed cluster by cluster
on one device from logits, without any of the planner's or the trainer's code.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import planning_cases
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from clusterjax import allocation, batching, config, datatypes, distributed
from clusterjax import input as input_lib
from clusterjax import mesh as mesh_lib
from clusterjax import step as step_lib
from clusterjax.models import decoder

FLOAT32_LIMIT, FLOAT64_LIMIT = 1e-6, 1e-10
SIZES = [14, 14, 14, 14]  # K = 4
LABELS = np.random.default_rng(7).integers(1, 14, sum(SIZES))
LENGTHS = LABELS + np.random.default_rng(8).integers(2, 9, len(LABELS))
USER_WEIGHT = np.random.default_rng(9).uniform(0.5, 2, len(LABELS))
LABEL_SLOTS = step_lib.Sizes(labels=160, vocab_chunk=61)
CORPUS = planning_cases.corpus(LENGTHS, LABELS, vocab=61)

# (R, A, packing, placement): per-device batches of 1, 2, 4, 8 and 16 among them.
LAYOUTS = [
    (1, 1, True, "spread"),
    (1, 4, False, "spread"),
    (2, 1, True, "dedicated"),
    (2, 2, False, "spread"),
    (4, 1, False, "dedicated"),
    (4, 2, True, "spread"),
    (8, 1, True, "spread"),
    (8, 2, False, "dedicated"),
]


def _config(dtype):
    return decoder.DecoderConfig(
        vocab_size=61,
        hidden_size=12,
        intermediate_size=20,
        num_layers=2,
        num_heads=3,
        num_kv_heads=1,
        head_dim=4,
        initializer_range=0.1,
        param_dtype=dtype,
        compute_dtype=dtype,
    )


@functools.cache
def _model(dtype):
    """The same parameters in both types."""
    template, params = step_lib.split(decoder.Decoder(_config("float32"), nnx.Rngs(3)))
    if dtype == "float32":
        return template, params
    template = step_lib.template(_config(dtype))
    return template, {name: jnp.asarray(x, dtype) for name, x in params.items()}


def _plan(settings, sizes=tuple(SIZES)):
    return planning_cases.plan(
        list(sizes), num_labels=LABELS, user_weight=USER_WEIGHT, **dict(settings)
    )


def _schedule(settings, batch_size=16, packing=True, placement="spread"):
    cfg = config.AllocationConfig(
        batch_size=batch_size, packing=packing, placement=placement, row_length=40
    )
    return allocation.allocate(_plan(settings), LENGTHS, LABELS, cfg)


def _batch(placed, mesh, dtype):
    rows = batching.fill(CORPUS, placed, weight_dtype=np.dtype(dtype))
    return input_lib.put(rows, mesh, tuple(range(placed.num_shards)))


@functools.cache
def _compiled_gradient(mesh, dtype):
    """One compilation for all batches of one shape."""
    template, params = _model(dtype)
    places = step_lib.shardings(template, optax.sgd(1.0), params, {}, mesh)
    own = jax.device_put(params, places.state.params)
    gradient = jax.jit(step_lib.make_gradient(template, mesh, LABEL_SLOTS))
    return lambda batch: gradient(own, {}, batch)


def _gradients(schedule, mesh, micro_steps, dtype, steps=(0,)):
    """The gradients of the trainer's step, as flat float64 vectors."""
    num_shards = mesh_lib.num_shards(mesh)
    placed = [schedule.place(step, num_shards, micro_steps) for step in steps]
    gradient = _compiled_gradient(mesh, dtype)
    found = [gradient(_batch(place, mesh, dtype)) for place in placed]
    return [_flat(grads) for _, grads, *_ in found]


def _updated(schedule, mesh, micro_steps, dtype):
    """The parameters after one step of plain SGD at rate 1."""
    template, params = _model(dtype)
    tx = optax.sgd(1.0)
    places = step_lib.shardings(template, tx, params, {}, mesh)
    step = step_lib.make_step(template, tx, mesh, LABEL_SLOTS)
    state = datatypes.TrainState(jnp.int32(0), params, tx.init(params))
    placed = schedule.place(0, mesh_lib.num_shards(mesh), micro_steps)
    new, metrics = step_lib.jit(step, places, mesh)(
        distributed.place(state, places.state, copy=True),
        {},
        _batch(placed, mesh, dtype),
    )
    assert bool(metrics.is_finite)
    return _flat(new.params)


def _flat(tree):
    return np.concatenate(
        [np.asarray(tree[name], np.float64).ravel() for name in sorted(tree)]
    )


def _relative(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@functools.cache
def _example_gradients():
    """float64 [N, parameters]: ∇ Σ_t ℓ_it of every example alone, from full logits."""
    longest = int(LENGTHS.max())
    tokens = np.zeros((len(LENGTHS), longest), np.int32)
    is_label = np.zeros((len(LENGTHS), longest), bool)
    for i, length in enumerate(LENGTHS):
        tokens[i, :length], is_label[i, :length] = CORPUS.example(i)

    def loss(params, tokens_T, is_label_T):
        model, _ = template.merge(params, {})
        hidden = model.hidden(tokens_T[None])[0]
        logp = jax.nn.log_softmax(hidden @ model.output_matrix().T)
        nll = -jnp.take_along_axis(logp[:-1], tokens_T[1:, None], axis=1)[:, 0]
        return jnp.sum(jnp.where(is_label_T[1:], nll, 0))

    with jax.enable_x64():
        template, params = _model("float64")
        each = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))
        grads = jax.jit(each)(params, tokens, is_label)
        rows = [grads[name].reshape(len(tokens), -1) for name in sorted(grads)]
        return np.concatenate([np.asarray(row) for row in rows], axis=1)


def _mixture(schedule, step):
    """Σ_c π_c (S/S_c) ∇L_c, and for `none` ∇ of the global mean, by its definition."""
    plan = schedule.plan
    members = schedule.step(step)
    total = 0.0
    groups = (
        [np.arange(len(members.example_id))]
        if plan.weighting == "none"
        else [np.flatnonzero(members.cluster_id == c) for c in range(plan.num_clusters)]
    )
    for cluster, group in enumerate(groups):
        if not len(group):
            continue
        ids = members.example_id[group]
        user = plan.user_weight[ids].astype(np.float64)
        labels = LABELS[ids]
        sums = _example_gradients()[ids]
        if plan.normalise == "token":
            mean = user @ sums / (user @ labels)
        else:
            mean = (user / labels) @ sums / user.sum()
        total = total + _epoch_factor(schedule, cluster) * mean
    return total


def _epoch_factor(schedule, cluster):
    plan = schedule.plan
    if plan.weighting == "none":
        return 1.0
    steps = [schedule.step(i) for i in range(schedule.steps_per_epoch)]
    holding = sum(bool((s.cluster_id == cluster).any()) for s in steps)
    return plan.cluster_share[cluster] * len(steps) / holding


TOKEN = (("normalise", "token"), ("share", "examples"))
SETTINGS = [
    TOKEN,
    (("normalise", "example"), ("share", "tokens"), ("weighting", "sqrt")),
    (("normalise", "token"), ("weighting", "none")),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_placement_gives_the_mixture_gradient(make_mesh, layout):
    num_shards, micro_steps, packing, placement = layout
    schedule = _schedule(TOKEN, packing=packing, placement=placement)
    steps = (0, schedule.num_steps - 1)  # the last one is incomplete
    found = _gradients(schedule, make_mesh(num_shards), micro_steps, "float32", steps)
    for step, gradient in zip(steps, found):
        assert _relative(gradient, _mixture(schedule, step)) <= FLOAT32_LIMIT


@pytest.mark.parametrize("layout", LAYOUTS[::5], ids=str)
def test_every_placement_gives_one_sgd_update(make_mesh, layout):
    num_shards, micro_steps, packing, placement = layout
    schedule = _schedule(TOKEN, packing=packing, placement=placement)
    found = _updated(schedule, make_mesh(num_shards), micro_steps, "float32")
    expected = _flat(_model("float32")[1]) - _mixture(schedule, 0)
    assert _relative(found, expected) <= FLOAT32_LIMIT


@pytest.mark.parametrize("settings", SETTINGS[1:], ids=["example-sqrt", "none"])
def test_other_weights_and_shards_that_divide_nothing(make_mesh, settings):
    schedule = _schedule(settings)
    # K = 4, R = 3: neither divides the other; B = 16 does not divide by 3 · 2.
    (found,) = _gradients(schedule, make_mesh(3), 2, "float32")
    assert _relative(found, _mixture(schedule, 0)) <= FLOAT32_LIMIT


def test_steps_that_miss_clusters(make_mesh):
    # B = 3 < K = 4: S_c < S, the factor S/S_c is at work.
    schedule = _schedule(TOKEN, batch_size=3)
    for step in (0, 1):
        assert len(set(schedule.step(step).cluster_id)) < 4
    found = _gradients(schedule, make_mesh(2), 1, "float32", (0, 1))
    for step, gradient in enumerate(found):
        assert _relative(gradient, _mixture(schedule, step)) <= FLOAT32_LIMIT


def test_sharded_parameters(make_mesh):
    schedule = _schedule(TOKEN)
    (found,) = _gradients(schedule, make_mesh(2, 2), 2, "float32")
    assert _relative(found, _mixture(schedule, 0)) <= FLOAT32_LIMIT


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[5]], ids=str)
def test_the_contract_holds_to_ten_digits_under_x64(make_mesh, layout):
    num_shards, micro_steps, packing, placement = layout
    with jax.enable_x64():
        schedule = _schedule(TOKEN, packing=packing, placement=placement)
        mesh, expected = make_mesh(num_shards), _mixture(schedule, 0)
        (found,) = _gradients(schedule, mesh, micro_steps, "float64")
        assert _relative(found, expected) <= FLOAT64_LIMIT
        update = _flat(_model("float64")[1]) - _updated(
            schedule, mesh, micro_steps, "float64"
        )
        assert _relative(update, expected) <= FLOAT64_LIMIT


# Planted faults.


def _on_shards(function, mesh, *in_specs):
    # Without check_vma=False the gradients would come back already summed.
    return jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=P("data"), check_vma=False
        )
    )


@functools.cache
def _gradients_apart(mesh, micro_steps):
    """The loss differentiated on each shard and micro-step alone, [R, A, …]."""
    template, params = _model("float32")
    one = mesh_lib.build(config.MeshConfig(data=1), jax.devices()[:1])
    loss = step_lib.make_loss(template, one, LABEL_SLOTS)
    placed = _schedule(TOKEN).place(0, mesh_lib.num_shards(mesh), micro_steps)
    batch = _batch(placed, mesh, "float32")

    def shard(params, batch):
        gradient = jax.grad(lambda p, micro: loss(p, {}, micro, 0)[0])
        parts = jax.lax.map(lambda micro: gradient(params, micro), batch)
        return jax.tree.map(lambda g: g[None], parts)

    return _on_shards(shard, mesh, P(), P(None, "data"))(params, batch)


def _by_hand(mesh, micro_steps, combine, accumulate):
    """The step's sums spelled out, so that they can be replaced by faults."""

    def shard(parts):
        return jax.tree.map(lambda g: combine(accumulate(g[0]), "data")[None], parts)

    parts = _gradients_apart(mesh, micro_steps)
    whole = _on_shards(shard, mesh, P("data"))(parts)
    return _flat({name: g[0] for name, g in whole.items()})


def _sum(x):
    return x.sum(0)


def _mean(x):
    return x.mean(0)


@pytest.mark.parametrize(
    ("combine", "accumulate", "is_right"),
    [
        (jax.lax.psum, _sum, True),
        (jax.lax.pmean, _sum, False),
        (jax.lax.psum, _mean, False),
    ],
    ids=["right", "pmean for psum", "1/A"],
)
def test_planted_faults_break_the_contract(make_mesh, combine, accumulate, is_right):
    schedule = _schedule(TOKEN)
    found = _by_hand(make_mesh(4), 2, combine, accumulate)
    difference = _relative(found, _mixture(schedule, 0))
    assert (difference <= FLOAT32_LIMIT) == is_right
    assert is_right or difference > 0.1


# The paper's formulas.


@pytest.mark.parametrize("normalise", ["token", "example"])
def test_equals_the_papers_scaling_with_one_cluster_per_worker(make_mesh, normalise):
    """K = R: worker r's mean loss times K·n_r/N, averaged over the workers."""
    counts = (20, 16, 12, 8)
    plan = planning_cases.plan(
        list(counts),
        num_labels=LABELS,
        keep="nearest",
        quota="min",
        ratio=1.0,
        normalise=normalise,
        min_kept_fraction=0.0,
    )
    cfg = config.AllocationConfig(batch_size=16, placement="dedicated")
    schedule = allocation.allocate(plan, LENGTHS, LABELS, cfg)
    placed = schedule.place(0, 4)
    expected = 0.0
    for worker, size in enumerate(counts):
        ids = placed.step.example_id[placed.shard == worker]
        assert set(plan.cluster_id[np.isin(plan.example_id, ids)]) == {worker}
        sums = _example_gradients()[ids]
        if normalise == "token":  # by all label tokens of the accumulated step
            mean = sums.sum(0) / LABELS[ids].sum()
        else:  # the mean of micro-steps of one example
            mean = (sums / LABELS[ids, None]).mean(0)
        expected = expected + (4 * size / sum(counts)) * mean / 4
    (found,) = _gradients(schedule, make_mesh(4), 1, "float32")
    assert _relative(found, expected) <= FLOAT32_LIMIT
    # METHOD §6.9: the plain mean of the workers' means is something else.
    wrong = sum(
        _example_gradients()[ids].sum(0) / LABELS[ids].sum() / 4
        for ids in (placed.step.example_id[placed.shard == r] for r in range(4))
    )
    assert _relative(wrong, expected) > 0.01


def test_the_published_scaling_is_wrong_beyond_one_example_per_device():
    """METHOD §6.1: a device holds all clusters but has one weight for all of them."""
    schedule = _schedule(TOKEN)
    placed = schedule.place(0, 4)
    share = schedule.plan.cluster_share
    published = 0.0
    for worker in range(4):
        ids = placed.step.example_id[placed.shard == worker]
        assert len(set(placed.step.cluster_id[placed.shard == worker])) == 4
        sums = _example_gradients()[ids]
        published = published + share[worker] * sums.sum(0) / LABELS[ids].sum()
    assert _relative(published, _mixture(schedule, 0)) > 0.05


def test_full_data_as_one_step_is_the_plain_mean_token_loss(make_mesh):
    count = len(LABELS)
    plan = planning_cases.plan(SIZES, num_labels=LABELS, share="tokens")
    cfg = config.AllocationConfig(batch_size=count)
    schedule = allocation.allocate(plan, LENGTHS, LABELS, cfg)
    expected = _example_gradients().sum(0) / LABELS.sum()
    (found,) = _gradients(schedule, make_mesh(2), 2, "float32")
    assert _relative(found, expected) <= FLOAT32_LIMIT


def test_two_devices_two_micro_steps_unequal_lengths_and_weights(make_mesh):
    # CASES 14: lengths 5 and 200, weights 2.4 and 0.4; the update of one device.
    data = planning_cases.corpus(np.array([5, 200]), np.array([4, 199]), vocab=61)
    plan = planning_cases.plan([1, 1], num_labels=np.array([4, 199]))
    plan = dataclasses.replace(plan, cluster_share=np.array([2.4, 0.4]) / 2.8)
    cfg = config.AllocationConfig(batch_size=2)
    schedule = allocation.allocate(plan, data.lengths, data.num_labels, cfg)
    template, params = _model("float32")
    found = []
    for num_shards, micro_steps in [(1, 1), (2, 2)]:
        mesh = make_mesh(num_shards)
        rows = batching.fill(data, schedule.place(0, num_shards, micro_steps))
        batch = input_lib.put(rows, mesh, tuple(range(num_shards)))
        gradient = step_lib.make_gradient(template, mesh, step_lib.Sizes(256, 61))
        found.append(_flat(jax.jit(gradient)(params, {}, batch)[1]))
    assert _relative(found[1], found[0]) <= FLOAT32_LIMIT

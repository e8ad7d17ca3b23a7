"""The decoder against the golden checkpoints of the reference framework."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from clusterjax.models import attention, checkpoints, decoder, parameters, rope

GOLDEN = pathlib.Path(__file__).parent / "golden" / "models"
NAMES = sorted(path.name for path in GOLDEN.iterdir())


def load(name, **keys):
    model = checkpoints.load_decoder(GOLDEN / name, **keys)
    return model, dict(np.load(GOLDEN / name / "expected.npz"))


@functools.partial(jax.jit, static_argnums=0)
def _call(graph, params, args, keys):
    return nnx.merge(graph, params)(*args, **keys)


def call(model, *args, **keys):
    """Logits, compiled (op by op would take most of the time of these tests)."""
    return _call(*nnx.split(model), args, keys)


@functools.partial(jax.jit, static_argnums=0, static_argnames="num_layers")
def _hidden(graph, params, args, keys, *, num_layers):
    return nnx.merge(graph, params).hidden(*args, num_layers=num_layers, **keys)


def hidden_states(model, *args, num_layers=None, **keys):
    return _hidden(*nnx.split(model), args, keys, num_layers=num_layers)


def mean_nll(model, tokens_BT, labels_BT, **keys):
    """Mean over the label positions (label != −100) of each row; labels unshifted."""
    logits_BTV = model(tokens_BT, **keys)[:, :-1]
    labels_BT = labels_BT[:, 1:]
    is_label = labels_BT != -100
    picked = jnp.take_along_axis(
        logits_BTV, jnp.where(is_label, labels_BT, 0)[..., None], axis=-1
    )[..., 0]
    nll_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - picked
    return jnp.sum(jnp.where(is_label, nll_BT, 0), 1) / jnp.sum(is_label, 1)


@functools.cache
def gradients(name, remat="none"):
    """Gradient of each golden example's mean loss, path → [B, ...]."""
    model, expected = load(name, remat=remat)
    tokens_BT = expected["input_ids"].astype(np.int32)
    labels_BT = expected["labels"].astype(np.int32)
    graph, params = nnx.split(model)

    def one(params, tokens_T, labels_T):
        model = nnx.merge(graph, params)
        return mean_nll(model, tokens_T[None], labels_T[None])[0]

    batched = jax.jit(jax.vmap(jax.grad(one), in_axes=(None, 0, 0)))
    state = batched(params, tokens_BT, labels_BT)
    return {
        path: np.asarray(value[...], np.float64)
        for path, value in nnx.to_flat_state(state)
    }


@pytest.fixture(scope="module", params=NAMES)
def golden(request):
    return request.param, *load(request.param)


def test_all_six_checkpoints_are_there():
    assert len(NAMES) == 6


def test_logits_and_hidden_states(golden):
    _, model, expected = golden
    tokens_BT = expected["input_ids"].astype(np.int32)
    real = expected["attention_mask"].astype(bool)
    logits = np.asarray(call(model, tokens_BT))
    hidden = np.asarray(hidden_states(model, tokens_BT))
    assert np.abs(logits - expected["logits"])[real].max() <= 1e-5
    assert np.abs(hidden - expected["last_hidden"])[real].max() <= 1e-5
    assert logits.dtype == hidden.dtype == np.float32


def test_loss_and_gradients_of_single_examples(golden):
    name, model, expected = golden
    tokens_BT = expected["input_ids"].astype(np.int32)
    labels_BT = expected["labels"].astype(np.int32)
    nll = np.asarray(jax.jit(mean_nll)(model, tokens_BT, labels_BT))
    np.testing.assert_allclose(nll, expected["example_nll"], rtol=1e-5)

    grads = gradients(name)
    norms = {}
    for path, item in parameters.table(model.config).items():
        layers = grads[path] if item.stacked else grads[path][:, None]
        for i, tensor in enumerate(item.tensor_names()):
            norms[tensor] = np.sqrt(np.sum(layers[:, i].reshape(5, -1) ** 2, axis=1))
    names = [str(name) for name in expected["grad_names"]]
    assert sorted(norms) == sorted(names)
    found = np.stack([norms[name] for name in names], axis=1)
    np.testing.assert_allclose(found, expected["grad_norms"], rtol=1e-5)

    # Whole gradients, in the reference's [out, in].
    q_grad = grads["blocks", "q", "kernel"][:, 1].swapaxes(1, 2)
    head = ("embedding",) if model.config.tie_embeddings else ("head",)
    for value, want in (
        (q_grad, expected["grad_layer1_q_proj"]),
        (grads[head], expected["grad_output_embedding"]),
    ):
        error = np.linalg.norm(value - want) / np.linalg.norm(want)
        assert error <= 1e-5


def test_left_padding_gives_the_same_numbers(golden):
    _, model, expected = golden
    tokens_BT = expected["input_ids"].astype(np.int32)
    lengths = expected["attention_mask"].sum(axis=1)
    width = tokens_BT.shape[1] + 3
    left = np.full((len(lengths), width), 7, np.int32)
    segments = np.zeros_like(left)
    for i, n in enumerate(lengths):
        left[i, width - n :] = tokens_BT[i, :n]
        segments[i, width - n :] = 1
    logits = np.asarray(call(model, left, segments))
    assert np.isfinite(logits).all()
    for i, n in enumerate(lengths):
        want = expected["logits"][i, :n]
        assert np.abs(logits[i, width - n :] - want).max() <= 1e-5


def test_packed_rows_give_the_same_numbers(golden):
    _, model, expected = golden
    lengths = expected["attention_mask"].sum(axis=1)
    examples = [expected["input_ids"][i, :n] for i, n in enumerate(lengths)]
    tokens = np.concatenate([*examples, [3, 3]]).astype(np.int32)[None]
    ids = [np.full(n, i + 1) for i, n in enumerate(lengths)]
    segments = np.concatenate([*ids, [0, 0]]).astype(np.int32)[None]
    start, logits = 0, np.asarray(call(model, tokens, segments))[0]
    for i, n in enumerate(lengths):
        want = expected["logits"][i, :n]
        assert np.abs(logits[start : start + n] - want).max() <= 1e-5
        start += n


def test_positions_may_be_given(golden):
    _, model, expected = golden
    tokens_BT = expected["input_ids"].astype(np.int32)[:1]
    same = hidden_states(model, tokens_BT, positions=jnp.arange(24)[None])
    np.testing.assert_allclose(same, expected["last_hidden"][:1], atol=1e-5)
    moved = np.asarray(
        hidden_states(model, tokens_BT, positions=2 * jnp.arange(24)[None])
    )
    assert np.abs(moved - expected["last_hidden"][:1]).max() > 1e-3


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_remat_changes_no_gradient(remat):
    want, found = gradients("qwen3_qknorm"), gradients("qwen3_qknorm", remat)
    for path, value in want.items():
        error = np.linalg.norm(found[path] - value) / np.linalg.norm(value)
        assert error <= 2e-6, path


def test_bfloat16_compute_keeps_float32_parameters_and_logits():
    model, expected = load("llama_tied", compute_dtype="bfloat16")
    tokens_BT = expected["input_ids"].astype(np.int32)
    assert hidden_states(model, tokens_BT).dtype == jnp.bfloat16
    assert model.output_matrix().dtype == jnp.float32
    logits = call(model, tokens_BT)
    assert logits.dtype == jnp.float32
    real = expected["attention_mask"].astype(bool)
    spread = expected["logits"][real].std()
    error = np.abs(np.asarray(logits) - expected["logits"])[real]
    assert 1e-5 < error.mean() < 0.02 * spread


def add_product(x, y, value, shared):
    p_in, p_out = shared
    return y + jnp.einsum("btk,bkm->btm", x @ p_in, value) @ p_out


@pytest.mark.parametrize("remat", ["none", "full"])
def test_probe_gradients_are_projected_weight_gradients(remat):
    """METHOD §1: ∂loss_i/∂Z_i = P_inᵀ (∂loss_i/∂W) P_outᵀ, all examples at once."""
    model, expected = load("llama3_rope", remat=remat)
    tokens_BT = expected["input_ids"].astype(np.int32)
    labels_BT = expected["labels"].astype(np.int32)
    key, k, shared, zeros = jax.random.key(0), 4, {}, {}
    for i, (name, (size_in, size_out)) in enumerate(
        model.config.linear_shapes().items()
    ):
        key_in, key_out = jax.random.split(jax.random.fold_in(key, i))
        shared[name] = (
            jax.random.normal(key_in, (size_in, k)),
            jax.random.normal(key_out, (k, size_out)),
        )
        zeros[name] = jnp.zeros((model.config.num_layers, 5, k, k))

    def total(values):
        adapters = decoder.Adapters(values, add_product, shared)
        return mean_nll(model, tokens_BT, labels_BT, adapters=adapters).sum()

    found = jax.jit(jax.grad(total))(zeros)
    weights = gradients("llama3_rope")
    for name, (p_in, p_out) in shared.items():
        want = np.einsum(
            "ik,blio,mo->lbkm", p_in, weights["blocks", name, "kernel"], p_out
        )
        error = np.linalg.norm(found[name] - want) / np.linalg.norm(want)
        assert error <= 1e-5, name


def test_adapter_on_one_layer_equals_a_changed_kernel():
    model, expected = load("qwen2_bias")
    tokens_BT = expected["input_ids"].astype(np.int32)
    rng = np.random.default_rng(0)
    change = np.zeros((3, 80, 48), np.float32)
    change[1] = 0.1 * rng.standard_normal((80, 48))
    adapters = decoder.Adapters(
        {"down": jnp.asarray(change)}, lambda x, y, value, _: y + x @ value
    )
    found = call(model, tokens_BT, adapters=adapters)
    changed, _ = load("qwen2_bias")
    changed.blocks.down.kernel[...] += change
    np.testing.assert_allclose(found, call(changed, tokens_BT), atol=1e-5)
    assert np.abs(np.asarray(found) - expected["logits"]).max() > 1e-2


def test_first_layers_only_equal_a_shallower_model():
    model, expected = load("mistral_window")
    tokens_BT = expected["input_ids"].astype(np.int32)
    arrays = {}
    for path, value in nnx.to_flat_state(nnx.state(model)):
        arrays[path] = value[...][:2] if path[0] == "blocks" else value[...]
    shallow = checkpoints.assemble(
        dataclasses.replace(model.config, num_layers=2), arrays
    )
    np.testing.assert_array_equal(
        hidden_states(model, tokens_BT, num_layers=2), hidden_states(shallow, tokens_BT)
    )


def test_window_in_some_layers_only():
    model, expected = load("mistral_window")
    tokens_BT = expected["input_ids"].astype(np.int32)

    def hidden(**changes):
        config = dataclasses.replace(model.config, **changes)
        flat = nnx.to_flat_state(nnx.state(model))
        arrays = {path: value[...] for path, value in flat}
        return np.asarray(
            hidden_states(checkpoints.assemble(config, arrays), tokens_BT)
        )

    everywhere, nowhere = hidden(), hidden(sliding_window=None)
    assert np.abs(everywhere - nowhere).max() > 1e-2
    np.testing.assert_allclose(
        hidden(windowed_layers=(True,) * 3), everywhere, atol=1e-6
    )
    np.testing.assert_allclose(hidden(windowed_layers=(False,) * 3), nowhere, atol=1e-6)
    # By hand, block by block.
    windows = (8, None, 8)
    cos_sin = rope.rotation(jnp.arange(24)[None], model.config.rope, 8)
    graph, state = nnx.split(model.blocks)
    x = model.embedding[...][tokens_BT]
    for i, window in enumerate(windows):
        block = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))
        x, _ = block(
            x,
            cos_sin,
            lambda q, k, v, w=window: (attention.attend(q, k, v, None, w), None),
            lambda name: None,
        )
    found = hidden(windowed_layers=(True, False, True))
    np.testing.assert_allclose(found, model.norm(x), atol=1e-5)


def test_compiles_once_for_any_values():
    model, expected = load("llama_untied")
    graph, params = nnx.split(model)
    count = 0

    @jax.jit
    def hidden(params, tokens_BT, segment_ids):
        nonlocal count
        count += 1
        return nnx.merge(graph, params).hidden(tokens_BT, segment_ids)

    tokens_BT = expected["input_ids"].astype(np.int32)
    for segment in (1, 2):
        hidden(params, tokens_BT, np.full(tokens_BT.shape, segment, np.int32))
    assert count == 1


def test_fresh_parameters_have_the_asked_spread_and_dtype():
    config = decoder.DecoderConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        initializer_range=0.05,
        param_dtype="bfloat16",
    )
    model = decoder.Decoder(config, nnx.Rngs(0))
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    assert {path: value.shape for path, value in flat.items()} == {
        path: item.shape for path, item in parameters.table(config).items()
    }
    assert {value.dtype for value in flat.values()} == {jnp.dtype("bfloat16")}
    spread = float(jnp.std(flat["embedding",][...].astype(jnp.float32)))
    assert abs(spread - 0.05) < 0.002


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_kv_heads": 4}, "num_heads=6 is not a multiple of num_kv_heads=4"),
        ({"remat": "some"}, "remat='some' is not one of none, dots, full"),
        ({"windowed_layers": (True,)}, "windowed_layers has 1 entries for 3 layers"),
    ],
)
def test_impossible_configs_are_refused(change, text):
    model, _ = load("llama_tied")
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(model.config, **change)

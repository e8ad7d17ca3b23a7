"""LoRA: its formula, its gradients, its file form."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from clusterjax import config as config_lib
from clusterjax import errors
from clusterjax.models import checkpoints, decoder, lora, parameters

GOLDEN = pathlib.Path(__file__).parent / "golden" / "models"
ALL = decoder.LINEAR_NAMES


def configure(**keys):
    return config_lib.LoraConfig(**{"rank": 4, "alpha": 6.0, "targets": ALL, **keys})


@pytest.fixture(scope="module")
def model():
    return checkpoints.load_decoder(GOLDEN / "qwen2_bias")


@pytest.fixture(scope="module")
def tokens_BT():
    return np.load(GOLDEN / "qwen2_bias" / "expected.npz")["input_ids"].astype(np.int32)


def trained(config, cfg, seed=0):
    """Factors as after some training: B is no longer zero where A is not."""
    factors = lora.initialize(config, cfg, jax.random.key(seed))
    for i, pair in enumerate(factors.values()):
        noise = jax.random.normal(jax.random.key(seed + i + 1), pair["b"].shape)
        chosen = jnp.any(pair["a"] != 0, axis=(1, 2), keepdims=True)
        pair["b"] = jnp.where(chosen, 0.1 * noise, 0)
    return factors


@jax.jit
def logits(model, tokens_BT, adapters):
    return model(tokens_BT, adapters=adapters)


def test_untrained_adapters_change_nothing(model, tokens_BT):
    cfg = configure()
    factors = lora.initialize(model.config, cfg, jax.random.key(0))
    found = logits(model, tokens_BT, lora.adapters(factors, cfg))
    np.testing.assert_array_equal(found, logits(model, tokens_BT, None))
    for name, (size_in, size_out) in model.config.linear_shapes().items():
        a, b = factors[name]["a"], factors[name]["b"]
        assert a.shape == (3, size_in, 4) and b.shape == (3, 4, size_out)
        # Uniform in ±1/√in has a standard deviation of 1/√(3 in).
        assert abs(float(jnp.std(a)) * (3 * size_in) ** 0.5 - 1) < 0.1
        assert float(jnp.abs(a).max()) <= size_in**-0.5


def test_merged_matrices_equal_the_adapters(model, tokens_BT):
    cfg = configure()
    factors = trained(model.config, cfg)
    before = np.asarray(model.blocks.q.kernel[...])
    merged = lora.merge(model, factors, cfg)
    want = logits(model, tokens_BT, lora.adapters(factors, cfg))
    np.testing.assert_allclose(logits(merged, tokens_BT, None), want, atol=2e-5)
    assert np.abs(want - logits(model, tokens_BT, None)).max() > 0.1
    np.testing.assert_array_equal(model.blocks.q.kernel[...], before)
    # By hand, layer by layer.
    for i in range(3):
        a, b = factors["q"]["a"][i], factors["q"]["b"][i]
        by_hand = before[i] + 6.0 / 4 * np.asarray(a) @ np.asarray(b)
        np.testing.assert_allclose(merged.blocks.q.kernel[i], by_hand, atol=1e-6)


def test_targets_choose_matrices_and_layers(model):
    cfg = configure(targets=("v", "up_proj", r"model\.layers\.(0|2)\..*\.o_proj"))
    chosen = lora.chosen_layers(model.config, cfg.targets)
    assert {name: layers.tolist() for name, layers in chosen.items()} == {
        "v": [True] * 3,
        "o": [True, False, True],
        "up": [True] * 3,
    }
    with pytest.raises(errors.ConfigError, match="'w' matches no matrix"):
        lora.chosen_layers(model.config, ("q", "w"))
    with pytest.raises(errors.ConfigError, match="no regular expression"):
        lora.chosen_layers(model.config, ("(",))
    with pytest.raises(errors.ConfigError, match=r"model\.lora\.rank=0"):
        lora.initialize(model.config, configure(rank=0), jax.random.key(0))
    with pytest.raises(errors.ConfigError, match=r"model\.lora\.dropout=1"):
        lora.initialize(model.config, configure(dropout=1.0), jax.random.key(0))


def test_layers_without_adapter_stay_without(model, tokens_BT):
    cfg = configure(targets=(r"model\.layers\.1\..*",))
    factors = trained(model.config, cfg)

    @jax.jit
    @jax.grad
    def gradient(factors):
        return jnp.sum(model(tokens_BT, adapters=lora.adapters(factors, cfg)) ** 2)

    for pair in gradient(factors).values():
        for grad in pair.values():
            assert np.abs(grad[1]).max() > 0
            assert np.abs(grad[::2]).max() == 0


def test_file_form_comes_back(model, tmp_path):
    targets = ("q", "down", r"model\.layers\.1\.self_attn\.k_proj")
    cfg = configure(targets=targets, dropout=0.1)
    factors = trained(model.config, cfg)
    lora.save(factors, cfg, model.config, tmp_path, "some/base")
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (raw["peft_type"], raw["r"], raw["lora_alpha"]) == ("LORA", 4, 6.0)
    assert "model.layers.1.self_attn.k_proj" in raw["target_modules"]
    tensors = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    assert len(tensors) == 2 * (3 + 3 + 1)
    name = "base_model.model.model.layers.2.mlp.down_proj.lora_A.weight"
    np.testing.assert_array_equal(tensors[name], factors["down"]["a"][2].T)
    again, cfg_again = lora.load(tmp_path, model.config)
    jax.tree.map(np.testing.assert_array_equal, again, factors)
    assert (cfg_again.rank, cfg_again.alpha, cfg_again.dropout) == (4, 6.0, 0.1)
    want = lora.chosen_layers(model.config, cfg.targets)
    found = lora.chosen_layers(model.config, cfg_again.targets)
    jax.tree.map(np.testing.assert_array_equal, found, want)
    # The short form when every layer has adapters, as PEFT writes it.
    cfg = configure(targets=("q", "v"))
    lora.save(trained(model.config, cfg), cfg, model.config, tmp_path, "some/base")
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    assert raw["target_modules"] == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"use_dora": True}, "set: use_dora"),
        ({"bias": "all"}, "bias='all'"),
        ({"r": 5}, "expected shape \\(5, 48\\), found \\(4, 48\\)"),
        ({"r": "4"}, "r='4'"),
    ],
)
def test_other_kinds_of_adapters_are_named(model, tmp_path, changes, text):
    cfg = configure(targets=("q",))
    lora.save(trained(model.config, cfg), cfg, model.config, tmp_path, "some/base")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(errors.CheckpointError, match=text):
        lora.load(tmp_path, model.config)


def test_damaged_adapters_are_named(model, tmp_path):
    with pytest.raises(errors.CheckpointError, match="does not exist"):
        lora.load(tmp_path, model.config)
    cfg = configure(targets=("q",))
    lora.save(trained(model.config, cfg), cfg, model.config, tmp_path, "some/base")
    weights = tmp_path / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(weights)
    tensors["base_model.model.lm_head.lora_A.weight"] = np.zeros((4, 48), np.float32)
    safetensors.numpy.save_file(tensors, weights)
    with pytest.raises(errors.CheckpointError, match=r"fit no matrix .*lm_head"):
        lora.load(tmp_path, model.config)
    weights.write_bytes(b"x")
    with pytest.raises(errors.CheckpointError, match="cannot be read"):
        lora.load(tmp_path, model.config)


def test_dropout_depends_on_example_and_position_only(model, tokens_BT):
    """The same example gets the same mask in any row and any column (METHOD §5)."""
    cfg = configure(dropout=0.5, targets=("q", "down"))
    factors = trained(model.config, cfg)
    key = jax.random.key(3)

    @jax.jit
    def hidden(tokens_BT, segment_ids, example_id, positions):
        adapters = lora.adapters(
            factors, cfg, dropout_key=key, example_id=example_id, positions=positions
        )
        return model.hidden(tokens_BT, segment_ids, positions, adapters=adapters)

    index = np.arange(24)
    first, second = tokens_BT[0, :10], tokens_BT[3, :14]
    packed = hidden(
        np.concatenate([first, second])[None],
        np.where(index < 10, 1, 2)[None],
        np.where(index < 10, 70, 90)[None],
        np.where(index < 10, index, index - 10)[None],
    )[0]
    rows = np.zeros((2, 14), np.int32)
    rows[0], rows[1, :10] = second, first
    ids = np.stack([np.full(14, 90), np.where(index[:14] < 10, 70, -1)])
    positions = np.stack([index[:14], index[:14]])
    padded = hidden(rows, (ids >= 0).astype(np.int32), ids, positions)
    np.testing.assert_allclose(packed[:10], padded[1, :10], atol=2e-5)
    np.testing.assert_allclose(packed[10:], padded[0], atol=2e-5)
    other = hidden(rows, (ids >= 0).astype(np.int32), ids + 1, positions)
    assert np.abs(other - padded).max() > 1e-2


def test_dropout_keeps_the_mean():
    rate, width = 0.25, 64
    apply = lora.adapters(
        {"q": {"a": jnp.eye(width)[None], "b": jnp.eye(width)[None]}},
        configure(rank=1, alpha=1.0, dropout=rate),
        dropout_key=jax.random.key(0),
        example_id=jnp.arange(50)[:, None] + jnp.zeros((50, 20), jnp.int32),
        positions=jnp.arange(20)[None] + jnp.zeros((50, 20), jnp.int32),
    )
    ones = jnp.ones((50, 20, width))
    value = jax.tree.map(lambda leaf: leaf[0], apply.values["q"])
    found = np.asarray(apply.apply(ones, 0 * ones, value, apply.shared["q"]))
    assert set(np.unique(found).round(4)) == {0.0, np.float32(1 / 0.75).round(4)}
    # 64,000 draws: one standard error of the mean is 0.0023.
    assert abs(found.mean() - 1) < 0.01
    with pytest.raises(ValueError, match="needs example_id"):
        lora.adapters({}, configure(dropout=rate), dropout_key=jax.random.key(0))


def test_dimension_names_follow_the_kernels(model):
    factors = lora.initialize(model.config, configure(), jax.random.key(0))
    names = lora.dimension_names(model.config, factors)
    assert names["down", "a"] == ("layer", "mlp", "rank")
    assert names["down", "b"] == ("layer", "rank", "embed")
    assert len(names) == 2 * len(ALL)
    table = parameters.table(model.config)
    for name in ALL:
        kernel = table["blocks", name, "kernel"].dimensions
        assert (names[name, "a"][1], names[name, "b"][2]) == kernel[1:]


def test_merging_keeps_the_dtype_of_the_parameters():
    model = checkpoints.load_decoder(GOLDEN / "llama_tied", param_dtype="bfloat16")
    cfg = configure()
    merged = lora.merge(model, trained(model.config, cfg), cfg)
    dtypes = {value.dtype for _, value in nnx.to_flat_state(nnx.state(merged))}
    assert dtypes == {jnp.dtype("bfloat16")}

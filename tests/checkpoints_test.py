"""Reading and writing Hugging Face directories: to the bit, or a named fault."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from clusterjax import errors, models
from clusterjax.data import tokenizer as tokenizer_lib
from clusterjax.models import checkpoints, decoder, hf_config, parameters

GOLDEN = pathlib.Path(__file__).parent / "golden" / "models"
NAMES = sorted(path.name for path in GOLDEN.iterdir())


def read_tensors(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path):
    """A copy of a golden checkpoint that a test may damage."""
    target = tmp_path / "model"
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "qwen3_qknorm" / name, target)
    return target


def change_config(folder, **changes):
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw.update(changes)
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))


def change_tensors(folder, change):
    tensors = read_tensors(folder)
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def flat(model):
    return {
        path: np.asarray(value[...])
        for path, value in nnx.to_flat_state(nnx.state(model))
    }


@pytest.mark.parametrize("name", NAMES)
def test_tensors_and_config_come_back_to_the_bit(name, tmp_path):
    model = checkpoints.load_decoder(GOLDEN / name)
    checkpoints.save_decoder(model, tmp_path / "out")
    before, after = read_tensors(GOLDEN / name), read_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for tensor, value in before.items():
        assert value.dtype == after[tensor].dtype
        np.testing.assert_array_equal(value, after[tensor])
    source = json.loads((GOLDEN / name / "config.json").read_text())
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    again = checkpoints.read_config(tmp_path / "out")
    for key in ("initializer_range", "bos_token_id", "attention_dropout"):
        assert written[key] == source[key]
    assert again == _without_source(model.config, again.source_json)
    assert [p.name for p in (tmp_path / "out").iterdir() if "tmp" in p.name] == []


def _without_source(config, source_json):
    return decoder.dataclasses.replace(config, source_json=source_json)


def test_shards_of_an_index_equal_the_single_file(folder):
    want = flat(checkpoints.load_decoder(folder))
    tensors = read_tensors(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        chosen = {name: tensors[name] for name in part}
        safetensors.numpy.save_file(chosen, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    found = flat(checkpoints.load_decoder(folder))
    for path, value in want.items():
        np.testing.assert_array_equal(found[path], value)

    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(errors.CheckpointError, match="model-00002-of-00002"):
        checkpoints.load_decoder(folder)
    index.write_text("{}")
    with pytest.raises(errors.CheckpointError, match=r"index\.json is damaged"):
        checkpoints.load_decoder(folder)


def test_large_models_are_saved_in_several_files(folder, tmp_path):
    model = checkpoints.load_decoder(folder)
    out = tmp_path / "out"
    checkpoints.save_decoder(model, out)
    checkpoints.save_decoder(model, out, max_file_bytes=100_000)
    names = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    want, found = flat(model), flat(checkpoints.load_decoder(out))
    for path, value in want.items():
        np.testing.assert_array_equal(found[path], value)
    # Back to one file: the index of before must not be read any more.
    zeros = {path: 0 * value for path, value in want.items()}
    checkpoints.save_decoder(checkpoints.assemble(model.config, zeros), out)
    assert not np.any(flat(checkpoints.load_decoder(out))["embedding",])


@pytest.mark.parametrize("name", ["llama3_rope", "qwen2_bias"])
def test_both_dialects_of_config_json_mean_the_same(name):
    old = json.loads((GOLDEN / name / "config.json").read_text())
    new = dict(old)
    scaling = new.pop("rope_scaling") or {"rope_type": "default"}
    new["rope_parameters"] = {**scaling, "rope_theta": new.pop("rope_theta")}
    old["torch_dtype"] = old.pop("dtype")
    parsed = [hf_config.parse(json.dumps(item), "config.json") for item in (old, new)]
    assert parsed[0].rope == parsed[1].rope
    assert _without_source(parsed[0], "") == _without_source(parsed[1], "")
    # What we write has both, so that either generation of readers sees the same.
    for config in parsed:
        written = json.loads(hf_config.dump(config, "float32", {}))
        assert written["rope_theta"] == written["rope_parameters"]["rope_theta"]
        for dialect in (("rope_parameters", "dtype"), ("rope_theta", "rope_scaling")):
            kept = {k: v for k, v in written.items() if k not in dialect}
            again = hf_config.parse(json.dumps(kept), "config.json")
            assert again.rope == config.rope


def test_linear_scaling_and_old_keys_are_read():
    """DeepSeek-Coder's config: transformers 4.3x, `type` instead of `rope_type`."""
    raw = json.loads((GOLDEN / "llama_untied" / "config.json").read_text())
    raw |= {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 100000}
    del raw["head_dim"], raw["num_key_value_heads"], raw["tie_word_embeddings"]
    config = hf_config.parse(json.dumps(raw), "config.json")
    assert (config.rope.kind, config.rope.factor) == ("linear", 4.0)
    assert (config.num_kv_heads, config.head_dim) == (6, 8)
    assert not config.tie_embeddings


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({"use_sliding_window": False, "sliding_window": 8}, None),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": None}, None),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
                "layer_types": None,
            },
            (False, True, True),
        ),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 1
                + ["sliding_attention"],
            },
            (True, False, True),
        ),
    ],
)
def test_windows_of_qwen(changes, windowed):
    raw = json.loads((GOLDEN / "qwen2_bias" / "config.json").read_text()) | changes
    config = hf_config.parse(json.dumps(raw), "config.json")
    assert config.sliding_window == (None if windowed is None else 8)
    assert config.windowed_layers == (windowed or ())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is not supported; supported are"),
        ({"model_type": ...}, "model_type=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"hidden_size": "48"}, "hidden_size='48'; expected a positive integer"),
        ({"num_key_value_heads": 4}, "num_heads=6 is not a multiple"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq"),
        ({"hidden_size": 50}, "has shape"),
        ({"num_hidden_layers": 4}, r"missing tensors: model\.layers\.3\."),
        ({"num_hidden_layers": 2}, r"unexpected tensors: model\.layers\.2\."),
        ({"attention_bias": True}, r"missing tensors: .*\.bias"),
    ],
)
def test_configs_that_do_not_fit_are_named(folder, changes, text):
    change_config(folder, **changes)
    with pytest.raises(errors.CheckpointError, match=text):
        checkpoints.load_decoder(folder)


def test_tensors_that_do_not_fit_are_named(folder):
    def transpose(tensors):
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name] = np.ascontiguousarray(tensors[name].T)
        del tensors["model.norm.weight"]
        tensors["model.layers.0.extra"] = np.zeros(2, np.float32)

    change_tensors(folder, transpose)
    with pytest.raises(errors.CheckpointError) as caught:
        checkpoints.load_decoder(folder)
    for text in (
        "missing tensors: model.norm.weight",
        "unexpected tensors: model.layers.0.extra",
        "model.layers.1.mlp.up_proj.weight has shape (48, 80), config.json calls for"
        " (80, 48)",
    ):
        assert text in str(caught.value)


def test_integer_tensors_are_refused(folder):
    def to_int(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)

    change_tensors(folder, to_int)
    with pytest.raises(errors.CheckpointError, match=r"model\.norm\.weight has dtype"):
        checkpoints.load_decoder(folder)


def test_damaged_and_missing_files_are_named(folder):
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(errors.CheckpointError, match=r"model\.safetensors cannot be"):
        checkpoints.load_decoder(folder)
    weights.unlink()
    with pytest.raises(errors.CheckpointError, match=r"neither model\.safetensors nor"):
        checkpoints.load_decoder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(errors.CheckpointError, match=r"config\.json is not JSON"):
        checkpoints.load_decoder(folder)
    with pytest.raises(errors.CheckpointError, match="does not exist"):
        checkpoints.load_decoder(folder / "nowhere")


def test_tied_models_may_carry_a_second_copy_of_the_output_matrix(tmp_path):
    target = tmp_path / "tied"
    shutil.copytree(GOLDEN / "llama_tied", target)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    change_tensors(target, add)
    found = flat(checkpoints.load_decoder(target))
    assert ("head",) not in found


def test_bfloat16_files_and_parameters(folder):
    import ml_dtypes

    want = flat(checkpoints.load_decoder(folder))

    def to_bfloat16(tensors):
        for name, value in tensors.items():
            tensors[name] = value.astype(ml_dtypes.bfloat16)

    change_tensors(folder, to_bfloat16)
    for dtype in ("float32", "bfloat16"):
        found = flat(checkpoints.load_decoder(folder, param_dtype=dtype))
        for path, value in want.items():
            rounded = value.astype(ml_dtypes.bfloat16).astype(dtype)
            assert found[path].dtype == np.dtype(dtype)
            np.testing.assert_array_equal(found[path], rounded)


def test_loading_onto_a_mesh_reads_only_what_each_device_holds(folder, make_mesh):
    tokenizer_file = _tiny_tokenizer()
    tokenizer_file.save(folder)
    mesh = make_mesh(data=1, fsdp=2, tensor=2)
    want = flat(checkpoints.load_decoder(folder))
    # The check on size is for real models: place this small one by hand.
    table = parameters.table(checkpoints.read_config(folder))
    spec = {"embed": "fsdp", "heads": "tensor", "kv": "tensor", "mlp": "tensor"}
    shardings = {
        path: jax.sharding.NamedSharding(
            mesh,
            jax.sharding.PartitionSpec(*(spec.get(name) for name in item.dimensions)),
        )
        for path, item in table.items()
    }
    model = checkpoints.load_decoder(folder, shardings=shardings)
    for path, value in nnx.to_flat_state(nnx.state(model)):
        assert value[...].sharding == shardings[path]
        np.testing.assert_array_equal(np.asarray(value[...]), want[path])
    kernel = model.blocks.gate.kernel[...]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(3, 24, 40)}

    tokenizer, model = models.load(folder, mesh=mesh, allow_replication=True)
    assert tokenizer.vocab_size == tokenizer_file.vocab_size
    assert model.blocks.gate.kernel[...].sharding.mesh == mesh


def _tiny_tokenizer(size=50):
    import tokenizers

    vocab = {"<s>": 0, "</s>": 1} | {f"w{i}": i + 2 for i in range(size - 2)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<s>"))
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    return tokenizer_lib.Tokenizer(backend, settings)


def test_save_writes_tokenizer_and_its_ids(folder, tmp_path):
    tokenizer = _tiny_tokenizer()
    change_config(folder, eos_token_id=..., bos_token_id=...)
    model = checkpoints.load_decoder(folder)
    models.save(model, tokenizer, tmp_path / "out")
    again, _ = models.load(tmp_path / "out")
    assert again.fingerprint == tokenizer.fingerprint
    for name in ("config.json", "generation_config.json"):
        raw = json.loads((tmp_path / "out" / name).read_text())
        assert (raw["bos_token_id"], raw["eos_token_id"]) == (0, 1)


def test_a_tokenizer_larger_than_the_model_is_refused(folder):
    _tiny_tokenizer(size=300).save(folder)
    with pytest.raises(errors.CheckpointError, match=r"300 tokens, but config\.json"):
        models.load(folder)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "llama"),
        ({"qkv_bias": True}, "qwen2"),
        ({"qk_norm": True}, "qwen3"),
        ({"sliding_window": 8}, "mistral"),
        ({"qkv_bias": True, "o_bias": True, "mlp_bias": True}, "llama"),
    ],
)
def test_new_models_get_the_architecture_that_computes_them(fields, kind, tmp_path):
    config = decoder.DecoderConfig(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=12,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        **fields,
    )
    model = decoder.Decoder(config, nnx.Rngs(0))
    checkpoints.save_decoder(model, tmp_path)
    again = checkpoints.load_decoder(tmp_path)
    assert json.loads(again.config.source_json)["model_type"] == kind
    assert _without_source(again.config, "") == config
    for path, value in flat(model).items():
        np.testing.assert_array_equal(flat(again)[path], value)


def test_a_mix_that_no_architecture_has_is_not_saved(tmp_path):
    config = decoder.DecoderConfig(20, 8, 12, 1, 2, 1, 4, o_bias=True)
    model = decoder.Decoder(config, nnx.Rngs(0))
    with pytest.raises(errors.CheckpointError, match="no Hugging Face architecture"):
        checkpoints.save_decoder(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()

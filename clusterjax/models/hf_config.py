"""Hugging Face config.json to `DecoderConfig` and back, in both dialects.

transformers 4 writes `rope_theta`, `rope_scaling` and `torch_dtype`; transformers 5
writes `rope_parameters` and `dtype`. We read both, and write every name so that
either generation reads the same model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from clusterjax import errors
from clusterjax.models import decoder, rope

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")

# What transformers assumes when config.json leaves a key out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def parse(text: str, where: str, **overrides: Any) -> decoder.DecoderConfig:
    """Returns the decoder config that a config.json describes.

    Args:
      text: content of config.json.
      where: its path, for error messages.
      **overrides: fields of `DecoderConfig` that the file does not decide
        (param_dtype, compute_dtype, remat).

    Raises:
      errors.CheckpointError: not JSON, a model we cannot compute exactly, a missing or
        impossible value; the message names the key.
    """
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise errors.CheckpointError(f"{where} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise errors.CheckpointError(f"{where}: expected a JSON object")
    kind = raw.get("model_type")
    if kind not in SUPPORTED:
        raise errors.CheckpointError(
            f"{where}: model_type={kind!r} is not supported; supported are "
            f"{', '.join(SUPPORTED)} (CodeLlama, DeepSeek-Coder and SmolLM are llama)"
        )
    values = {**_DEFAULTS[kind], **raw}
    _refuse_unknown_mathematics(values, where)
    for name in _SIZES:
        if not isinstance(values.get(name), int) or values[name] < 1:
            raise errors.CheckpointError(
                f"{where}: {name}={values.get(name)!r}; expected a positive integer"
            )
    heads = values["num_attention_heads"]
    attention_bias = bool(values.get("attention_bias"))
    window, windowed_layers = _window(values, kind)
    try:
        return decoder.DecoderConfig(
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            max_positions=values.get("max_position_embeddings", 2048),
            rms_norm_eps=values.get("rms_norm_eps", 1e-6),
            rope=_rope(values, where),
            tie_embeddings=bool(values.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or kind == "qwen2",
            o_bias=attention_bias and kind != "qwen2",
            mlp_bias=bool(values.get("mlp_bias")),
            qk_norm=kind == "qwen3",
            sliding_window=window,
            windowed_layers=windowed_layers,
            initializer_range=values.get("initializer_range", 0.02),
            source_json=text,
            **overrides,
        )
    except ValueError as error:
        raise errors.CheckpointError(f"{where}: {error}") from None


def dump(
    config: decoder.DecoderConfig,
    param_dtype: str,
    token_ids: Mapping[str, int | None],
) -> str:
    """Returns the text of the config.json that describes `config`.

    Keys of the file that the model came from and that we do not use are kept; where it
    had no ids of special tokens, `token_ids` gives them.
    """
    raw = json.loads(config.source_json) if config.source_json else {}
    raw = {**token_ids, **raw}
    kind = raw.get("model_type") or _model_type(config)
    rope_parameters = _rope_parameters(config.rope)
    raw |= {
        "model_type": kind,
        "architectures": raw.get("architectures") or [_ARCHITECTURES[kind]],
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": None if config.rope.kind == "default" else rope_parameters,
        "rope_parameters": {**rope_parameters, "rope_theta": config.rope.theta},
        "torch_dtype": param_dtype,
        "dtype": param_dtype,
    }
    if kind == "llama":
        raw |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    elif kind == "qwen3":
        raw["attention_bias"] = config.qkv_bias
    if kind != "llama":
        raw.setdefault("sliding_window", config.sliding_window)
    return json.dumps(raw, indent=2) + "\n"


def _model_type(config: decoder.DecoderConfig) -> str:
    """The Hugging Face family of a decoder that was not read from a file."""
    biases = (config.qkv_bias, config.o_bias, config.mlp_bias)
    windowed = config.sliding_window is not None
    if config.windowed_layers:
        kind = None
    elif config.qk_norm:
        fits = biases in ((False,) * 3, (True, True, False)) and not windowed
        kind = "qwen3" if fits else None
    elif windowed:
        kind = None if any(biases) else "mistral"
    elif biases == (True, False, False):
        kind = "qwen2"
    else:
        kind = "llama" if config.qkv_bias == config.o_bias else None
    if kind is None:
        raise errors.CheckpointError(
            "no Hugging Face architecture has this mix of biases, head norms and "
            f"windows, so the model cannot be saved: {config}"
        )
    return kind


def _refuse_unknown_mathematics(values: dict[str, Any], where: str) -> None:
    """Stops at settings that would give other numbers than the original model."""
    expected = {
        "hidden_act": (None, "silu", "swish"),
        "partial_rotary_factor": (None, 1, 1.0),
        "quantization_config": (None,),
    }
    for name, allowed in expected.items():
        if values.get(name) not in allowed:
            raise errors.CheckpointError(
                f"{where}: {name}={values[name]!r} is not supported; expected "
                f"{' or '.join(map(repr, allowed[1:])) or 'no such key'}"
            )


def _window(values: dict[str, Any], kind: str) -> tuple[int | None, tuple[bool, ...]]:
    """Returns the sliding window and the layers it holds in (() for all)."""
    window = values.get("sliding_window")
    if kind == "llama" or window is None:
        return None, ()
    if kind == "mistral":
        return window, ()
    if not values.get("use_sliding_window", False):
        return None, ()
    layers = values["num_hidden_layers"]
    if values.get("layer_types"):
        windowed = [item == "sliding_attention" for item in values["layer_types"]]
    else:
        first = values.get("max_window_layers", 28)
        windowed = [i >= first for i in range(layers)]
    if not any(windowed):
        return None, ()
    return window, () if all(windowed) else tuple(windowed)


def _rope(values: dict[str, Any], where: str) -> rope.RopeConfig:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`."""
    found = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if any(isinstance(item, dict) for item in found.values()):
        raise errors.CheckpointError(
            f"{where}: rope_parameters differ between kinds of layers; expected one set"
        )
    theta = found.get("rope_theta") or values.get("rope_theta") or 10000.0
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind == "default":
        return rope.RopeConfig(theta=float(theta))
    needed = {
        "linear": {"factor": "factor"},
        "llama3": {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position_embeddings": "original_max_positions",
        },
    }.get(kind)
    if needed is None:
        raise errors.CheckpointError(
            f"{where}: rope scaling {kind!r} is not supported; supported are default, "
            "linear and llama3"
        )
    missing = [name for name in needed if found.get(name) is None]
    if missing:
        raise errors.CheckpointError(
            f"{where}: rope scaling {kind!r} lacks {', '.join(missing)}"
        )
    scaling = {ours: found[theirs] for theirs, ours in needed.items()}
    return rope.RopeConfig(theta=float(theta), kind=kind, **scaling)


def _rope_parameters(config: rope.RopeConfig) -> dict[str, Any]:
    """The scaling in the words of Hugging Face, without the base frequency."""
    result: dict[str, Any] = {"rope_type": config.kind}
    if config.kind != "default":
        result["factor"] = config.factor
    if config.kind == "llama3":
        result |= {
            "low_freq_factor": config.low_freq_factor,
            "high_freq_factor": config.high_freq_factor,
            "original_max_position_embeddings": config.original_max_positions,
        }
    return result

"""Low-rank adapters (LoRA, arXiv 2106.09685), functional and over stacked layers.

The factors are a plain pytree beside the frozen model: `initialize` draws them,
`adapters` makes what the decoder adds to its linear layers, `merge` folds them into
the matrices, `save` and `load` use the file form of PEFT.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from clusterjax import config as config_lib
from clusterjax import errors, files
from clusterjax.models import checkpoints, decoder, parameters

# Linear name → {"a": [layers, in, rank], "b": [layers, rank, out]}, float32. A layer
# that gets no adapter has zeros in both: their gradients are zero, so they stay so.
Factors = dict[str, dict[str, jax.Array]]

_CONFIG_FILE = "adapter_config.json"
_WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Keys of adapter_config.json that make it more than y = W x + alpha/r · B A x.
_OTHER_KINDS = (
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "fan_in_fan_out",
    "lora_bias",
)


@dataclasses.dataclass(frozen=True)
class _Apply:
    """y + scaling · (dropout(x) A) B."""

    scaling: float
    dropout: float

    def __call__(self, x: jax.Array, y: jax.Array, value: Any, shared: Any):
        if self.dropout > 0:
            example_id_BT, positions_BT = shared
            keep = _keep(value["key"], example_id_BT, positions_BT, x.shape, self)
            x = jnp.where(keep, x / (1 - self.dropout), 0)
        a, b = value["a"].astype(x.dtype), value["b"].astype(x.dtype)
        return y + self.scaling * ((x @ a) @ b)


def _keep(
    key: jax.Array,
    example_id_BT: jax.Array,
    positions_BT: jax.Array,
    shape: tuple[int, ...],
    apply: _Apply,
) -> jax.Array:
    """Draws the dropout mask of one layer from (key, example, position) alone."""

    def token(example_id, position):
        token_key = jax.random.fold_in(jax.random.fold_in(key, example_id), position)
        return jax.random.bernoulli(token_key, 1 - apply.dropout, shape[-1:])

    return jax.vmap(jax.vmap(token))(
        example_id_BT.astype(jnp.uint32), positions_BT.astype(jnp.uint32)
    )


def scaling(cfg: config_lib.LoraConfig) -> float:
    """Returns alpha / rank, the factor before B A x."""
    return cfg.alpha / cfg.rank


def chosen_layers(
    config: decoder.DecoderConfig, targets: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Returns which layers get an adapter, linear name → bool [layers].

    Args:
      config: of the decoder.
      targets: each a linear name ("q", for all layers), its Hugging Face name
        ("q_proj"), or a regular expression that fully matches a Hugging Face module
        path such as "model.layers.3.self_attn.q_proj".

    Raises:
      errors.ConfigError: a target that matches nothing or is no regular expression.
    """
    paths = {
        name: [
            f"model.layers.{i}.{parameters.MODULE_NAMES[name]}"
            for i in range(config.num_layers)
        ]
        for name in decoder.LINEAR_NAMES
    }
    chosen = {name: np.zeros(config.num_layers, bool) for name in paths}
    for target in targets:
        try:
            pattern = re.compile(target)
        except re.error as error:
            raise errors.ConfigError(
                f"model.lora.targets: {target!r} is no regular expression: {error}"
            ) from None
        found = False
        for name, layer_paths in paths.items():
            hf_name = parameters.MODULE_NAMES[name].rpartition(".")[2]
            hits = np.array(
                [
                    target in (name, hf_name) or bool(pattern.fullmatch(path))
                    for path in layer_paths
                ]
            )
            chosen[name] |= hits
            found = found or bool(hits.any())
        if not found:
            raise errors.ConfigError(
                f"model.lora.targets: {target!r} matches no matrix; names are "
                f"{', '.join(decoder.LINEAR_NAMES)}, paths look like {paths['q'][0]}"
            )
    return {name: layers for name, layers in chosen.items() if layers.any()}


def initialize(
    config: decoder.DecoderConfig, cfg: config_lib.LoraConfig, key: jax.Array
) -> Factors:
    """Draws A uniformly in ±1/√in, as PEFT does; B is zero, so training starts at 0.

    Raises:
      errors.ConfigError: rank below 1, or a target that matches nothing.
    """
    if cfg.rank < 1:
        raise errors.ConfigError(f"model.lora.rank={cfg.rank}; expected at least 1")
    if not 0 <= cfg.dropout < 1:
        raise errors.ConfigError(f"model.lora.dropout={cfg.dropout}; expected [0, 1)")
    shapes = config.linear_shapes()
    result: Factors = {}
    for name, layers in chosen_layers(config, cfg.targets).items():
        size_in, size_out = shapes[name]
        name_key = jax.random.fold_in(key, decoder.LINEAR_NAMES.index(name))
        bound = size_in**-0.5
        a = jax.random.uniform(
            name_key,
            (config.num_layers, size_in, cfg.rank),
            minval=-bound,
            maxval=bound,
        )
        result[name] = {
            "a": jnp.where(layers[:, None, None], a, 0),
            "b": jnp.zeros((config.num_layers, cfg.rank, size_out)),
        }
    return result


def dimension_names(
    config: decoder.DecoderConfig, factors: Factors
) -> dict[parameters.Path, tuple[str, ...]]:
    """Returns the name of every axis of every factor, by path, for sharding."""
    kernels = parameters.dimension_names(config)
    result: dict[parameters.Path, tuple[str, ...]] = {}
    for name in factors:
        _, dim_in, dim_out = kernels["blocks", name, "kernel"]
        result[name, "a"] = ("layer", dim_in, "rank")
        result[name, "b"] = ("layer", "rank", dim_out)
    return result


def adapters(
    factors: Factors,
    cfg: config_lib.LoraConfig,
    *,
    dropout_key: jax.Array | None = None,
    example_id: jax.Array | None = None,
    positions: jax.Array | None = None,
) -> decoder.Adapters:
    """Returns what the decoder adds to its linear layers.

    Args:
      factors: the trained factors.
      cfg: rank, alpha and dropout.
      dropout_key: key of this step; None: no dropout (evaluation).
      example_id: int32 [B, T], the example that each token belongs to. The dropout
        mask depends on (key, example, position) only, so an example is treated alike
        wherever the schedule puts it (METHOD §5).
      positions: int32 [B, T], position of each token in its example.

    Raises:
      ValueError: dropout without example ids or positions.
    """
    if dropout_key is None or cfg.dropout == 0:
        return decoder.Adapters(dict(factors), _Apply(scaling(cfg), 0.0))
    if example_id is None or positions is None:
        raise ValueError("dropout needs example_id and positions")
    values: dict[str, Any] = {}
    for name, pair in factors.items():
        index = decoder.LINEAR_NAMES.index(name)
        name_key = jax.random.fold_in(dropout_key, index)
        layer_keys = jax.random.split(name_key, pair["a"].shape[0])
        values[name] = {**pair, "key": layer_keys}
    shared = dict.fromkeys(factors, (example_id, positions))
    return decoder.Adapters(values, _Apply(scaling(cfg), cfg.dropout), shared)


def merge(
    model: decoder.Decoder, factors: Factors, cfg: config_lib.LoraConfig
) -> decoder.Decoder:
    """Returns a decoder of its own whose matrices hold W + alpha/rank · A B."""
    graph, params = nnx.split(model)
    flat = dict(nnx.to_flat_state(params))
    for name, pair in factors.items():
        path = ("blocks", name, "kernel")
        kernel = flat[path][...]
        # In float32, and rounded once, whatever the kernel is kept in.
        product = jnp.einsum("lir,lro->lio", pair["a"], pair["b"])
        merged = kernel.astype(jnp.float32) + scaling(cfg) * product
        flat[path] = flat[path].replace(merged.astype(kernel.dtype))
    return nnx.merge(graph, nnx.from_flat_state(list(flat.items())))


def save(
    factors: Factors,
    cfg: config_lib.LoraConfig,
    config: decoder.DecoderConfig,
    path: str | os.PathLike[str],
    base_model: str,
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, which PEFT loads.

    Args:
      factors: the trained factors.
      cfg: rank, alpha, dropout and targets.
      config: of the decoder.
      path: directory to write to.
      base_model: path or name of the model that the adapters belong to.
    """
    chosen = chosen_layers(config, cfg.targets)
    tensors: dict[str, np.ndarray] = {}
    modules: list[str] = []
    everywhere = all(layers.all() for layers in chosen.values())
    for name, layers in chosen.items():
        hf_name = parameters.MODULE_NAMES[name]
        pair = {side: checkpoints.to_host(factors[name][side]) for side in ("a", "b")}
        for i in np.flatnonzero(layers):
            module = f"model.layers.{i}.{hf_name}"
            for side, tensor_name in (("a", "lora_A"), ("b", "lora_B")):
                tensors[f"{_PREFIX}{module}.{tensor_name}.weight"] = (
                    np.ascontiguousarray(pair[side][i].T)
                )
            modules.append(hf_name.rpartition(".")[2] if everywhere else module)
    if jax.process_index() > 0:
        return
    folder = pathlib.Path(path)
    checkpoints.write_tensors(folder / _WEIGHTS_FILE, tensors)
    files.write_json(
        folder / _CONFIG_FILE,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": cfg.rank,
            "lora_alpha": cfg.alpha,
            "lora_dropout": cfg.dropout,
            "target_modules": sorted(set(modules)),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "use_rslora": False,
            "use_dora": False,
        },
    )


def load(
    path: str | os.PathLike[str], config: decoder.DecoderConfig
) -> tuple[Factors, config_lib.LoraConfig]:
    """Reads adapters in PEFT's form, ours or another tool's.

    Raises:
      errors.CheckpointError: a missing or damaged file, a kind of adapter other than
        plain LoRA, or a tensor that does not fit the decoder; the message names it.
    """
    folder = pathlib.Path(path)
    raw = _read_config(folder)
    tensors = _read_tensors(folder)
    rank = raw["r"]
    shapes = config.linear_shapes()
    factors: Factors = {}
    used: set[str] = set()
    targets: list[str] = []
    for name, (size_in, size_out) in shapes.items():
        a = np.zeros((config.num_layers, size_in, rank), np.float32)
        b = np.zeros((config.num_layers, rank, size_out), np.float32)
        hits = []
        for i in range(config.num_layers):
            module = f"model.layers.{i}.{parameters.MODULE_NAMES[name]}"
            keys = [f"{_PREFIX}{module}.lora_{side}.weight" for side in "AB"]
            if not any(item in tensors for item in keys):
                continue
            a[i] = _factor(tensors, keys[0], (rank, size_in), folder).T
            b[i] = _factor(tensors, keys[1], (size_out, rank), folder).T
            used.update(keys)
            hits.append(module)
        if hits:
            factors[name] = {"a": jnp.asarray(a), "b": jnp.asarray(b)}
            whole = len(hits) == config.num_layers
            targets += [name] if whole else [re.escape(item) for item in hits]
    left = sorted(tensors.keys() - used)
    if left or not factors:
        raise errors.CheckpointError(
            f"{folder / _WEIGHTS_FILE}: tensors that fit no matrix of the model: "
            f"{', '.join(left[:6]) or 'all (it is empty)'}"
        )
    return factors, config_lib.LoraConfig(
        rank=rank,
        alpha=float(raw["lora_alpha"]),
        dropout=float(raw.get("lora_dropout", 0.0)),
        targets=tuple(targets),
    )


def _read_config(folder: pathlib.Path) -> dict[str, Any]:
    where = folder / _CONFIG_FILE
    try:
        raw = json.loads(where.read_text(encoding="utf-8"))
        kind, rank, alpha = raw["peft_type"], raw["r"], raw["lora_alpha"]
    except FileNotFoundError:
        raise errors.CheckpointError(f"{where} does not exist") from None
    except (ValueError, KeyError, TypeError) as error:
        raise errors.CheckpointError(f"{where} is damaged: {error!r}") from None
    other = [name for name in _OTHER_KINDS if raw.get(name)]
    if kind != "LORA" or other or raw.get("bias", "none") != "none":
        raise errors.CheckpointError(
            f"{where}: expected plain LoRA without biases; found peft_type={kind!r}, "
            f"bias={raw.get('bias', 'none')!r}, set: {', '.join(other) or 'nothing'}"
        )
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise errors.CheckpointError(f"{where}: r={rank!r}, lora_alpha={alpha!r}")
    return raw


def _read_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    where = folder / _WEIGHTS_FILE
    try:
        return safetensors.numpy.load_file(where)
    except (OSError, safetensors.SafetensorError) as error:
        raise errors.CheckpointError(f"{where} cannot be read: {error}") from None


def _factor(
    tensors: dict[str, np.ndarray],
    name: str,
    shape: tuple[int, int],
    folder: pathlib.Path,
) -> np.ndarray:
    found = tensors[name].shape if name in tensors else "no such tensor"
    if found != shape:
        raise errors.CheckpointError(
            f"{folder / _WEIGHTS_FILE}: {name}: expected shape {shape}, found {found}"
        )
    return tensors[name].astype(np.float32)

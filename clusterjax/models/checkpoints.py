"""Decoders in Hugging Face form: a directory with config.json and safetensors.

Reading is memory-mapped and goes tensor by tensor, in the case of a mesh shard by
shard, so that the host never holds the model a second time.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx
from jax.experimental import multihost_utils

from clusterjax import errors, files
from clusterjax import mesh as mesh_lib
from clusterjax.data import tokenizer as tokenizer_lib
from clusterjax.models import decoder, hf_config, parameters

_BUILTIN = pathlib.Path(__file__).parent / "assets" / "builtin"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def load(
    path: str | os.PathLike[str] = "builtin",
    dtype: str = "float32",
    mesh: jax.sharding.Mesh | None = None,
    *,
    compute_dtype: str = "float32",
    remat: str = "none",
    allow_replication: bool = False,
) -> tuple[tokenizer_lib.Tokenizer, decoder.Decoder]:
    """Reads tokenizer and decoder from a Hugging Face directory.

    Args:
      path: the directory, or "builtin" for the small model that comes along.
      dtype: dtype of the parameters.
      mesh: every parameter goes straight to its place on this mesh; None: the default
        device.
      compute_dtype, remat: as in `DecoderConfig`.
      allow_replication: keep parameters whole that do not divide by the mesh.

    Returns:
      (tokenizer, decoder).

    Raises:
      errors.UserError: a file, key or tensor that is missing, unexpected, of another
        shape or damaged, or a tokenizer with more tokens than the model; it is named.
    """
    folder = directory_of(path)
    config = read_config(folder, dtype, compute_dtype, remat)
    tokenizer = tokenizer_lib.Tokenizer.load(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise errors.CheckpointError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, but"
            f" config.json says vocab_size={config.vocab_size}"
        )
    shardings = None
    if mesh is not None:
        mesh_lib.check_heads(config.num_heads, config.num_kv_heads, mesh)
        table = parameters.table(config)
        shardings = mesh_lib.parameter_shardings(
            parameters.dimension_names(config),  # pyright: ignore[reportArgumentType]
            {item_path: item.shape for item_path, item in table.items()},  # pyright: ignore[reportArgumentType]
            mesh,
            allow_replication,
        )
    return tokenizer, _load(folder, config, shardings, mesh)  # pyright: ignore[reportArgumentType]


def save(
    model: decoder.Decoder,
    tokenizer: tokenizer_lib.Tokenizer,
    path: str | os.PathLike[str],
) -> None:
    """Writes a directory that transformers and vLLM load with the same logits."""
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    save_decoder(model, path, token_ids=ids)
    if jax.process_index() > 0:
        return
    tokenizer.save(path)
    files.write_json(pathlib.Path(path) / "generation_config.json", ids)


def load_decoder(
    path: str | os.PathLike[str],
    *,
    param_dtype: str = "float32",
    compute_dtype: str = "float32",
    remat: str = "none",
    shardings: Mapping[parameters.Path, jax.sharding.Sharding] | None = None,
) -> decoder.Decoder:
    """Reads a decoder alone, as `load` does.

    Args:
      path: directory with config.json and model.safetensors, or an index and shards.
      param_dtype, compute_dtype, remat: as in `DecoderConfig`.
      shardings: where each parameter goes, by path; None: the default device.

    Raises:
      errors.CheckpointError: see `load`.
    """
    folder = directory_of(path)
    config = read_config(folder, param_dtype, compute_dtype, remat)
    return _load(folder, config, shardings)


def read_config(
    path: str | os.PathLike[str],
    param_dtype: str = "float32",
    compute_dtype: str = "float32",
    remat: str = "none",
) -> decoder.DecoderConfig:
    """Reads config.json alone (an estimate of memory needs no weights).

    Raises:
      errors.CheckpointError: missing, damaged, or a model that is not supported.
    """
    where = directory_of(path) / "config.json"
    if not where.is_file():
        raise errors.CheckpointError(
            f"{where} does not exist; expected a Hugging Face model directory"
        )
    return hf_config.parse(
        where.read_text(encoding="utf-8"),
        str(where),
        param_dtype=param_dtype,
        compute_dtype=compute_dtype,
        remat=remat,
    )


def directory_of(path: str | os.PathLike[str]) -> pathlib.Path:
    """The directory that `model.path` means; "builtin" is the one that comes along."""
    return _BUILTIN if path == "builtin" else pathlib.Path(path)


def _load(
    folder: pathlib.Path,
    config: decoder.DecoderConfig,
    shardings: Mapping[parameters.Path, jax.sharding.Sharding] | None,
    mesh: jax.sharding.Mesh | None = None,
) -> decoder.Decoder:
    table = parameters.table(config)
    with _open_tensors(folder) as tensors:
        _check_tensors(tensors, table, config, folder)
        arrays = {}
        for path, item in table.items():
            sharding = None if shardings is None else shardings[path]
            arrays[path] = _read(tensors, item, config.param_dtype, sharding)
    return assemble(config, arrays, mesh)


def assemble(
    config: decoder.DecoderConfig,
    arrays: Mapping[parameters.Path, Any],
    mesh: jax.sharding.Mesh | None = None,
) -> decoder.Decoder:
    """Builds a decoder from its parameters by path, without drawing any first."""
    abstract = nnx.eval_shape(lambda: decoder.Decoder(config, nnx.Rngs(0), mesh))
    graph, state = nnx.split(abstract, nnx.Param)
    filled = [
        (path, variable.replace(arrays[path]))  # pyright: ignore[reportArgumentType]
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def save_decoder(
    model: decoder.Decoder,
    path: str | os.PathLike[str],
    token_ids: Mapping[str, int | None] | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Writes config.json and model.safetensors, or an index and several files.

    Each file appears, or replaces an earlier one, only when it is whole. One file at a
    time is gathered; with several processes all call, and the first one writes.

    Args:
      model: the decoder.
      path: directory to write to.
      token_ids: ids of the special tokens, for a model whose source named none.
      max_file_bytes: a file is closed before it grows beyond this.

    Raises:
      errors.CheckpointError: no Hugging Face architecture describes this decoder.
    """
    table = parameters.table(model.config)
    flat = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    values = {item_path: flat[item_path][...] for item_path in table}
    dtype = str(values["embedding",].dtype)
    config_text = hf_config.dump(model.config, dtype, token_ids or {})
    folder = pathlib.Path(path)
    groups = _file_groups(values, max_file_bytes)
    weight_map: dict[str, str] = {}
    for name, paths in groups.items():
        tensors: dict[str, np.ndarray] = {}
        for item_path in paths:
            tensors |= _tensors(table[item_path], to_host(values[item_path]))
        if jax.process_index() == 0:
            write_tensors(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    if jax.process_index() > 0:
        return
    if len(groups) > 1:
        files.write_json(folder / _INDEX, {"metadata": {}, "weight_map": weight_map})
    # What an earlier save left under the other layout would be read first, or twice.
    (folder / (_SINGLE if len(groups) > 1 else _INDEX)).unlink(missing_ok=True)
    files.write_text(folder / "config.json", config_text)


def to_host(array: jax.Array) -> np.ndarray:
    """Returns the whole array; with several processes, each of them has to call."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def _file_groups(
    values: Mapping[parameters.Path, jax.Array], max_file_bytes: int
) -> dict[str, list[parameters.Path]]:
    """Spreads the parameters over files, file name → paths, each file at least one."""
    groups: list[list[parameters.Path]] = [[]]
    size = 0
    for path, value in values.items():
        if groups[-1] and size + value.nbytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(path)
        size += value.nbytes
    if len(groups) == 1:
        return {_SINGLE: groups[0]}
    total = len(groups)
    return {
        f"model-{i + 1:05d}-of-{total:05d}.safetensors": paths
        for i, paths in enumerate(groups)
    }


def _tensors(item: parameters.Parameter, value: np.ndarray) -> dict[str, np.ndarray]:
    """The Hugging Face tensors of one parameter."""
    layers = value if item.stacked else value[None]
    return {
        name: np.ascontiguousarray(layer.T if item.transposed else layer)
        for name, layer in zip(item.tensor_names(), layers, strict=True)
    }


def write_tensors(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a safetensors file whole or not at all."""

    def write(partial: pathlib.Path) -> None:
        safetensors.numpy.save_file(dict(tensors), partial, {"format": "pt"})
        # The library makes files that only their owner can read.
        os.chmod(partial, 0o644)

    files.write_with(path, write)  # pyright: ignore[reportArgumentType]


@contextlib.contextmanager
def _open_tensors(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields tensor name to the open safetensors file that holds it."""
    names = _weight_files(folder)
    with contextlib.ExitStack() as stack:
        result: dict[str, Any] = {}
        for name in names:
            try:
                file = stack.enter_context(
                    safetensors.safe_open(folder / name, framework="numpy")
                )
            except (OSError, safetensors.SafetensorError) as error:
                raise errors.CheckpointError(
                    f"{folder / name} cannot be read: {error}"
                ) from None
            result.update(dict.fromkeys(file.keys(), file))
        yield result


def _weight_files(folder: pathlib.Path) -> list[str]:
    """Names of the safetensors files: those of the index, or the single one."""
    index = folder / _INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise errors.CheckpointError(f"{index} is damaged: {error!r}") from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise errors.CheckpointError(
                f"{index} lists files that do not exist: {', '.join(missing)}"
            )
        return names
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    found = sorted(item.name for item in folder.iterdir() if item.is_file())
    raise errors.CheckpointError(
        f"{folder} has neither {_SINGLE} nor {_INDEX}; it has {', '.join(found)}"
    )


def _check_tensors(
    tensors: Mapping[str, Any],
    table: Mapping[parameters.Path, parameters.Parameter],
    config: decoder.DecoderConfig,
    folder: pathlib.Path,
) -> None:
    """Compares names and shapes with what the config calls for; reads no weights."""
    expected = {
        name: item.tensor_shape
        for item in table.values()
        for name in item.tensor_names()
    }
    # Buffers that old releases saved, and the second name of a tied matrix.
    ignored = {name for name in tensors if name.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        ignored.add("lm_head.weight")
    problems = []
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        problems.append(f"missing tensors: {_some(missing)}")
    extra = sorted(tensors.keys() - expected.keys() - ignored)
    if extra:
        problems.append(f"unexpected tensors: {_some(extra)}")
    for name in sorted(expected.keys() & tensors.keys()):
        shape = tuple(tensors[name].get_slice(name).get_shape())
        if shape != expected[name]:
            problems.append(
                f"{name} has shape {shape}, config.json calls for {expected[name]}"
            )
    if problems:
        raise errors.CheckpointError(f"{folder}: {'; '.join(problems[:8])}")


def _some(names: list[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _read(
    tensors: Mapping[str, Any],
    item: parameters.Parameter,
    dtype: str,
    sharding: jax.sharding.Sharding | None,
) -> jax.Array:
    """Reads one parameter; only one shard of it at a time is on the host."""

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        names = item.tensor_names()
        layer_slice, rest = (
            (index[0], index[1:]) if item.stacked else (slice(None), index)
        )
        chosen = names[layer_slice]
        rest = rest[::-1] if item.transposed else rest
        first = _slice(tensors, chosen[0], rest)
        shape = first.shape[::-1] if item.transposed else first.shape
        result = np.empty((len(chosen), *shape), jnp.dtype(dtype))
        for i, name in enumerate(chosen):
            part = first if i == 0 else _slice(tensors, name, rest)
            result[i] = part.T if item.transposed else part
        return result if item.stacked else result[0]

    if sharding is None:
        return jnp.asarray(shard((slice(None),) * len(item.shape)))
    return jax.make_array_from_callback(item.shape, sharding, shard)  # pyright: ignore[reportArgumentType]


def _slice(
    tensors: Mapping[str, Any], name: str, index: tuple[slice, ...]
) -> np.ndarray:
    part = tensors[name].get_slice(name)[index]
    if part.dtype.name not in _DTYPES:
        raise errors.CheckpointError(
            f"{name} has dtype {part.dtype}; expected one of {', '.join(_DTYPES)}"
        )
    return part

"""The programs of a run, compiled from shapes alone: no weights, data or device.

They are the very functions that `train`, `features` and `clustering` run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from clusterjax import config as config_lib
from clusterjax import datatypes, errors, optimizer
from clusterjax import mesh as mesh_lib
from clusterjax import step as step_lib
from clusterjax.clustering import lloyd
from clusterjax.clustering import rows as rows_lib
from clusterjax.features import batches, extractors, model_state
from clusterjax.models import checkpoints, decoder, parameters
from experiments import hlo_cost


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program; all figures are per device.

    Attributes:
      cost: FLOPs, memory traffic and collectives of one run.
      arguments, temporaries, outputs: bytes.
      peak: bytes in use at once at most, donated arguments counted once.
      compile_seconds: on this machine.
    """

    cost: hlo_cost.Cost
    arguments: int
    temporaries: int
    outputs: int
    peak: int
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Rows:
    """Static shape of the batches of one optimiser step.

    Attributes:
      micro_steps: A.
      rows: L, rows per data shard and micro-step.
      length: T, tokens of a row.
      labels: label slots of a data shard in a micro-step.
    """

    micro_steps: int
    rows: int
    length: int
    labels: int


class DoesNotFit(errors.UserError):
    """The compiler found no way to run the program in the device's memory."""


def train_step(
    model_config: decoder.DecoderConfig,
    config: config_lib.Config,
    mesh: Mesh,
    rows: Rows,
    num_steps: int,
) -> Program:
    """The train step of `clusterjax.step`.

    Raises:
      errors.ConfigError: the mesh does not fit the model's sizes.
      DoesNotFit: too little memory on the device.
    """
    model_config = dataclasses.replace(model_config, remat=config.perf.remat)
    tmpl = step_lib.template(model_config, mesh)
    params = _dotted(abstract_arrays(model_config, mesh, config.mesh))
    frozen: step_lib.Params = {}
    if config.model.lora.rank:
        frozen = params
        tmpl, factors = step_lib.with_lora(tmpl, config.model.lora)
        params = jax.eval_shape(lambda: factors)
    dimensions = {name: tmpl.dimensions[name] for name in params}
    tx = optimizer.build(config.train.optimizer, num_steps, dimensions)
    places = step_lib.shardings(
        tmpl, tx, params, frozen, mesh, config.mesh.allow_replication
    )
    sizes = step_lib.Sizes(rows.labels, config.perf.vocab_chunk)
    step = step_lib.jit(step_lib.make_step(tmpl, tx, mesh, sizes), places, mesh)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    state = datatypes.TrainState(count, params, jax.eval_shape(tx.init, params))
    state, frozen = jax.tree.map(
        _placed, (state, frozen), (places.state, places.frozen)
    )
    return compiled(step, mesh, state, frozen, _batch(rows, mesh, places))


def _batch(rows: Rows, mesh: Mesh, places: step_lib.Shardings) -> datatypes.Batch:
    num_rows = mesh_lib.num_shards(mesh) * rows.rows
    shape = (rows.micro_steps, num_rows, rows.length)
    kinds = {"loss_weights": jnp.float32}
    return datatypes.Batch(
        *(
            jax.ShapeDtypeStruct(
                shape, kinds.get(name, jnp.int32), sharding=places.batch
            )
            for name in datatypes.Batch._fields
        )
    )


def feature_step(
    model_config: decoder.DecoderConfig,
    config: config_lib.Config,
    mesh: Mesh,
    length: int,
    label_share: float,
) -> tuple[list[Program], int]:
    """The programs of one batch of the feature pass, and the examples it holds.

    Args:
      model_config: of the model that makes the features.
      config: `features`, `perf` and `mesh` count.
      mesh: the mesh.
      length: tokens of each example of the batch.
      label_share: of the tokens, those that are labels.
    """
    cfg, perf = config.features, config.perf
    arrays = abstract_arrays(model_config, mesh, config.mesh)
    model = checkpoints.assemble(model_config, arrays, mesh)
    state = model_state.split(
        model,
        cfg.compute_dtype,
        extractors.remat(cfg, perf),
        cfg.num_layers,
        mesh=mesh,
    )
    extractor = extractors.Extractor(state, cfg, perf, mesh)
    bucket = batches.in_turns(
        length,
        max(perf.feature_batch_tokens // length, 1),
        perf.feature_turn_tokens if cfg.kind == "probe" else perf.feature_batch_tokens,
    )
    shape = (bucket.rows * extractor.shards, length)
    row = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=mesh_lib.rows(mesh))
    row_labels = max(int(np.ceil(length * label_share)), 1)
    begin = time.monotonic()
    found = _fitting(
        lambda: extractor.programs(
            state.params,
            batches.Rows(row, row, row),
            batches.Sizes(
                shard=row_labels * bucket.rows,
                row=row_labels,
                turns=bucket.turns,
                turn=row_labels * (bucket.rows // bucket.turns),
            ),
        )
    )
    seconds = (time.monotonic() - begin) / len(found)
    return [_examined(item, mesh, seconds) for item in found], shape[0]


def clustering_iteration(
    num_rows: int, width: int, cfg: config_lib.ClusteringConfig, block: int, mesh: Mesh
) -> Program:
    """One of Lloyd's iterations of one start, over all rows.

    Args:
      num_rows: N.
      width: D.
      cfg: the settings of k-means.
      block: `perf.kmeans_block`.
      mesh: the mesh.
    """
    shards = rows_lib.num_shards(mesh)
    per_shard = -(-num_rows // shards // rows_lib.NOISE_ROWS) * rows_lib.NOISE_ROWS
    block = min(max(block, rows_lib.NOISE_ROWS), per_shard)
    padded = -(-per_shard // block) * block * shards
    is_spherical = cfg.metric == "spherical"
    options = lloyd.Options(
        spherical=is_spherical, mesh=mesh, block=block, scatter=False
    )

    def iterate(values_ND, weight_N, centers_GKD):
        rows = rows_lib.Rows(
            values_ND=values_ND,
            weight_N=weight_N,
            square_N=weight_N,
            offset_D=np.zeros(width, np.float32),
            variance=1.0,
            num_rows=num_rows,
            spherical=is_spherical,
            mesh=mesh,
            block=block,
        )
        return lloyd.totals(rows, centers_GKD, options)

    split, whole = mesh_lib.rows(mesh), mesh_lib.replicated(mesh)
    return compiled(
        jax.jit(iterate),
        mesh,
        jax.ShapeDtypeStruct((padded, width), jnp.float32, sharding=split),
        jax.ShapeDtypeStruct((padded,), jnp.float32, sharding=split),
        jax.ShapeDtypeStruct((1, cfg.num_clusters, width), jnp.float32, sharding=whole),
    )


def abstract_arrays(
    model_config: decoder.DecoderConfig, mesh: Mesh, cfg: config_lib.MeshConfig
) -> dict[parameters.Path, jax.ShapeDtypeStruct]:
    """Shape, type and place of every parameter, by path."""
    mesh_lib.check_heads(model_config.num_heads, model_config.num_kv_heads, mesh)
    table = parameters.table(model_config)
    placed = mesh_lib.parameter_shardings(
        _dotted(parameters.dimension_names(model_config)),
        _dotted({path: item.shape for path, item in table.items()}),
        mesh,
        cfg.allow_replication,
    )
    return {
        path: jax.ShapeDtypeStruct(
            item.shape, model_config.param_dtype, sharding=placed[".".join(path)]
        )
        for path, item in table.items()
    }


def _dotted(values: Mapping[parameters.Path, Any]) -> dict[str, Any]:
    return {".".join(path): value for path, value in values.items()}


def _placed(value: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)


def compiled(function: Any, mesh: Mesh, *arguments: Any) -> Program:
    """Compiles a jitted function for (abstract) arguments and examines it."""
    begin = time.monotonic()
    found = _fitting(lambda: function.lower(*arguments).compile())
    return _examined(found, mesh, time.monotonic() - begin)


def _fitting(build: Any) -> Any:
    try:
        return build()
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text:
            raise
        lines = (line.strip() for line in text.splitlines())
        short = next((x for x in lines if "memory" in x.lower()), text[:200])
        raise DoesNotFit(short[:300]) from None


def _examined(found: Any, mesh: Mesh, seconds: float) -> Program:
    memory = found.memory_analysis()
    together = (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
    # The CPU's figure leaves temporaries out.
    peak = getattr(memory, "peak_memory_in_bytes", 0)
    return Program(
        hlo_cost.analyse(found.as_text(), mesh.size),
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes,
        peak if peak and mesh.devices.flat[0].platform != "cpu" else together,
        seconds,
    )

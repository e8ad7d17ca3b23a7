"""What a run will need and cost: its programs, compiled from shapes, added up.

Seconds are rooflines: the longest of arithmetic, memory traffic and network, each at
the published peak of the device.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from clusterjax import config as config_lib
from clusterjax import errors
from clusterjax import mesh as mesh_lib
from clusterjax.models import decoder
from experiments import programs, topology

# Packed rows are seldom full to the last token.
_PACKED_FILL = 0.95
# The fullest shard of a step has about so many times the mean number of labels.
_LABEL_SPREAD = 1.1
# Full float32 products take six bfloat16 passes on a TPU.
_FLOAT32_PASSES = 6


@dataclasses.dataclass(frozen=True)
class Data:
    """What the estimate needs to know of the corpus: N, and means per example."""

    num_examples: int
    mean_tokens: float
    mean_labels: float


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one run of a program on its three limits, at published peaks."""

    arithmetic: float
    memory: float
    network: float

    @property
    def roofline(self) -> float:
        return max(self.arithmetic, self.memory, self.network)

    @property
    def limit(self) -> str:
        """The name of the longest."""
        return max(dataclasses.asdict(self).items(), key=lambda item: item[1])[0]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What comes out. Stage seconds are divided by the efficiency.

    Attributes:
      rows: static shape of a step's batches.
      step: the compiled train step.
      times: of one step.
      num_kept: M, at most, unless it was given.
      num_steps, full_steps: optimiser steps on the kept and on all examples.
      feature_seconds, cluster_seconds, train_seconds, full_seconds: of the stages,
        and of training on everything.
      small_feature_seconds: of the feature pass by the smaller model, if one is given.
    """

    rows: programs.Rows
    step: programs.Program
    times: Times
    num_kept: int
    num_steps: int
    full_steps: int
    feature_seconds: float
    cluster_seconds: float
    train_seconds: float
    full_seconds: float
    small_feature_seconds: float | None

    @property
    def selection_seconds(self) -> float:
        return self.feature_seconds + self.cluster_seconds


def estimate(
    config: config_lib.Config,
    model_config: decoder.DecoderConfig,
    where: topology.Topology,
    corpus: Data,
    *,
    kept_fraction: float | None = None,
    efficiency: float = 0.5,
    small_model: decoder.DecoderConfig | None = None,
) -> Estimate:
    """Compiles the programs of a run and adds up what it costs.

    Raises:
      errors.ConfigError: the mesh does not fit devices or model.
      programs.DoesNotFit: too little memory; the message says what to change.
    """
    mesh = mesh_lib.build(config.mesh, where.devices)
    rows = batch_rows(config, corpus, mesh_lib.num_shards(mesh))
    kept = math.floor(corpus.num_examples * (kept_fraction or kept_bound(config)))
    num_steps, full_steps = (
        count_steps(config.allocation, n) for n in (kept, corpus.num_examples)
    )
    step = _fitting_step(config, model_config, where, mesh, rows, num_steps)
    times = roofline(step, where)
    features = cluster = 0.0
    small = None
    if config.selection.method not in ("full", "random"):
        features = feature_seconds(config, model_config, where, mesh, corpus)
        cluster = cluster_seconds(config, model_config, where, mesh, corpus)
        if small_model is not None:
            small = feature_seconds(config, small_model, where, mesh, corpus)
            small /= efficiency
    return Estimate(
        rows=rows,
        step=step,
        times=times,
        num_kept=kept,
        num_steps=num_steps,
        full_steps=full_steps,
        feature_seconds=features / efficiency,
        cluster_seconds=cluster / efficiency,
        train_seconds=num_steps * times.roofline / efficiency,
        full_seconds=full_steps * times.roofline / efficiency,
        small_feature_seconds=small,
    )


def batch_rows(
    config: config_lib.Config, corpus: Data, num_shards: int
) -> programs.Rows:
    """Shape of the batches: one row per example, or about as many as packing makes."""
    cfg = config.allocation
    length = cfg.row_length or config.data.max_length
    count = cfg.batch_size
    if cfg.packing and corpus.mean_tokens < length * _PACKED_FILL:
        count = math.ceil(count * corpus.mean_tokens / (length * _PACKED_FILL))
    cells = num_shards * cfg.accumulation_steps
    per_cell = math.ceil(count / cells)
    labels = cfg.batch_size * corpus.mean_labels * _LABEL_SPREAD / cells
    slots = math.ceil(labels / 16) * 16
    return programs.Rows(
        cfg.accumulation_steps, per_cell, length, min(slots, per_cell * length)
    )


def kept_bound(config: config_lib.Config) -> float:
    """Share of the data kept; with quota=min at most, reached by equal clusters."""
    cfg = config.selection
    if cfg.method == "full" or (cfg.method == "cluster" and cfg.keep == "all"):
        return 1.0
    is_min = cfg.method == "cluster" and cfg.quota == "min"
    return cfg.ratio if is_min else cfg.target_fraction


def count_steps(cfg: config_lib.AllocationConfig, num_examples: int) -> int:
    """Optimiser steps of all epochs over so many examples."""
    per_epoch = num_examples / cfg.batch_size
    whole = math.floor(per_epoch) if cfg.last_step == "drop" else math.ceil(per_epoch)
    steps = whole * cfg.num_epochs
    return min(steps, cfg.max_steps) if cfg.max_steps else steps


def roofline(program: programs.Program, where: topology.Topology) -> Times:
    """Seconds of a program on each limit; 0 where the device's figure is not known."""
    chip, cost = where.chip, program.cost
    return Times(
        cost.flops / chip.flops,
        cost.traffic / chip.bandwidth if chip.bandwidth else 0.0,
        cost.network / where.network if where.network else 0.0,
    )


def feature_seconds(
    config: config_lib.Config,
    model_config: decoder.DecoderConfig,
    where: topology.Topology,
    mesh: Any,
    corpus: Data,
) -> float:
    """Roofline of the pass over all examples, taken to be of the mean length."""
    longest = config.features.max_tokens or config.data.max_length
    length = math.ceil(min(corpus.mean_tokens, longest) / 16) * 16
    share = corpus.mean_labels / corpus.mean_tokens
    found, examples = programs.feature_step(model_config, config, mesh, length, share)
    batches = math.ceil(corpus.num_examples / examples)
    return batches * sum(roofline(item, where).roofline for item in found)


def cluster_seconds(
    config: config_lib.Config,
    model_config: decoder.DecoderConfig,
    where: topology.Topology,
    mesh: Any,
    corpus: Data,
) -> float:
    """Roofline of k-means at its longest: all starts and iterations, on all rows."""
    cfg = config.clustering
    width = feature_width(config.features, model_config)
    program = programs.clustering_iteration(
        corpus.num_examples, width, cfg, config.perf.kmeans_block, mesh
    )
    times = roofline(program, where)
    once = max(times.roofline, times.arithmetic * _FLOAT32_PASSES)
    return once * cfg.num_restarts * cfg.max_iterations


def feature_width(
    cfg: config_lib.FeaturesConfig, model_config: decoder.DecoderConfig
) -> int:
    """D, numbers of a feature."""
    if cfg.dim is not None:
        return cfg.dim
    if cfg.kind == "proxy":
        return model_config.hidden_size
    if cfg.kind == "head":
        return cfg.k_in * cfg.k_out
    if cfg.kind == "probe":
        layers = len(cfg.layers) or cfg.num_layers or model_config.num_layers
        return cfg.k_in * cfg.k_out * layers * len(cfg.matrices)
    raise errors.ConfigError(
        "features.kind=per_example without features.dim: its width is the number of"
        " chosen parameters; set features.dim for an estimate"
    )


def _fitting_step(
    config: config_lib.Config,
    model_config: decoder.DecoderConfig,
    where: topology.Topology,
    mesh: Any,
    rows: programs.Rows,
    num_steps: int,
) -> programs.Program:
    try:
        step = programs.train_step(model_config, config, mesh, rows, num_steps)
    except programs.DoesNotFit as error:
        raise programs.DoesNotFit(
            f"the train step does not fit {where.name}: {error}. Try"
            f" {advice(config, mesh, rows)}"
        ) from None
    if step.peak > where.chip.memory:
        raise programs.DoesNotFit(
            f"the train step does not fit {where.name}: it needs"
            f" {gib(step.peak)} GiB per device ({gib(step.arguments)} of parameters,"
            f" optimiser state and batch, {gib(step.temporaries)} of temporaries), and"
            f" there are {gib(where.chip.memory)}. Try {advice(config, mesh, rows)}"
        )
    return step


def advice(config: config_lib.Config, mesh: Any, rows: programs.Rows) -> str:
    """What would make the step smaller, the cheapest first."""
    found = []
    if config.perf.remat != "full":
        found.append("perf.remat=full")
    if rows.rows > 1:
        found.append(f"allocation.accumulation_steps={2 * rows.micro_steps}")
    if config.model.compute_dtype == "float32":
        found.append("model.compute_dtype=bfloat16")
    if mesh.shape["data"] > 1:
        found.append("mesh.fsdp=-1 with mesh.data=1")
    if config.train.optimizer.name == "adamw":
        found.append("train.optimizer.name=adafactor")
    if not config.model.lora.rank:
        found.append("adapters (model.lora.rank=16)")
    found.append("a larger topology")
    return ", ".join(found)


def gib(size: float) -> str:
    """Bytes as GiB, for people."""
    return f"{size / 2**30:,.2f}"

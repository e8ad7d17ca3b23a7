"""Does it fit, and what will it cost? A config's own programs, compiled for a topology.

    python -m experiments.estimate --config configs/magicoder_codellama_7b.py \\
        --topology v5e:4x4 --model_config configs/models/codellama_7b.json \\
        --num_examples 75197

No device, weights or data are needed. Topologies: `v5e:4x4`, `v5p:2x2x2`, `v4:2x2x4`,
`v6e:4x4` by the TPU compiler (extra `tpu`, works on a CPU machine), and
`gpu:8x80GB@400TFLOPs[@3350GB/s[@450GB/s]]`, compiled for simulated CPU devices.

The programs are those of `train`, `features` and `clustering`. Seconds are rooflines:
the longest of arithmetic, memory traffic and network, each at its published peak,
divided by `--efficiency`.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

from absl import flags

from clusterjax import config as config_lib
from clusterjax import data, errors, files, progress
from clusterjax import mesh as mesh_lib
from clusterjax.data import tokenizer as tokenizer_lib
from clusterjax.models import checkpoints, decoder, hf_config
from experiments import command_line, programs, topology

_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "Devices: v5e:4x4, v5p:2x2x2, v4:2x2x4, gpu:8x80GB@400TFLOPs."
)
_MODEL_CONFIG = flags.DEFINE_string(
    "model_config", None, "A model's config.json; default: that of model.path."
)
_SMALL_MODEL = flags.DEFINE_string(
    "small_model_config", None, "config.json of a smaller model for the features."
)
_NUM_EXAMPLES = flags.DEFINE_integer(
    "num_examples", None, "N, valid examples; default: the data is read."
)
_MEAN_TOKENS = flags.DEFINE_float(
    "mean_tokens", None, "Mean tokens of an example; default: data.max_length."
)
_MEAN_LABELS = flags.DEFINE_float(
    "mean_labels", None, "Mean label tokens of an example; default: all its tokens."
)
_KEPT = flags.DEFINE_float(
    "kept_fraction", None, "Share that the plan keeps; default: the config's bound."
)
_EFFICIENCY = flags.DEFINE_float(
    "efficiency", 0.5, "Share of the roofline that is reached, in (0, 1]."
)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file for the figures.")

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
            f" {_gib(step.peak)} GiB per device ({_gib(step.arguments)} of parameters,"
            f" optimiser state and batch, {_gib(step.temporaries)} of temporaries), and"
            f" there are {_gib(where.chip.memory)}. Try {advice(config, mesh, rows)}"
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


def describe(
    found: Estimate,
    config: config_lib.Config,
    where: topology.Topology,
    corpus: Data,
    efficiency: float,
) -> list[str]:
    """The figures, line by line, for people."""
    step, rows = found.step, found.rows
    tokens = rows.micro_steps * rows.rows * rows.length
    received = ", ".join(
        f"{kind} {_gib(size)}" for kind, size in sorted(step.cost.collectives.items())
    )
    known = "" if where.chip.bandwidth else " (memory and network not given)"
    lines = [
        f"{where.name}: {where.num_devices} devices,"
        f" batch {config.allocation.batch_size} × {config.data.max_length} tokens,"
        f" {rows.micro_steps} micro-steps of {rows.rows} rows per data shard",
        "",
        "train step, per device",
        f"  memory      {_gib(step.peak)} GiB at the peak of"
        f" {_gib(where.chip.memory)}: arguments {_gib(step.arguments)},"
        f" temporaries {_gib(step.temporaries)}",
        f"  arithmetic  {step.cost.flops / 1e12:,.1f} TFLOP for {tokens:,} positions"
        f" per data shard ({step.cost.flops * where.num_devices / 1e15:,.2f} PFLOP on"
        " all devices)",
        f"  traffic     {_gib(step.cost.traffic)} GiB of its memory",
        f"  received    GiB by collective: {received or 'nothing'}",
        f"  roofline    {found.times.roofline:,.2f} s: arithmetic"
        f" {found.times.arithmetic:,.2f}, memory {found.times.memory:,.2f}, network"
        f" {found.times.network:,.2f}{known}; the limit is {found.times.limit}",
        "",
        f"whole run, at {efficiency:.0%} of the roofline",
        f"  kept        {found.num_kept:,} of {corpus.num_examples:,} examples,"
        f" {found.num_steps:,} steps (all examples: {found.full_steps:,})",
        f"  features    {found.feature_seconds:,.0f} s",
        f"  clustering  {found.cluster_seconds:,.1f} s at most",
        f"  training    {found.train_seconds:,.0f} s",
    ]
    return [*lines, *_break_even(found), *_remarks(found, where)]


def _break_even(found: Estimate) -> list[str]:
    """When selection pays, against the full data and with smaller features."""
    selection, full = found.selection_seconds, found.full_seconds
    total = selection + found.train_seconds
    lines = [
        f"  total       {total:,.0f} s with selection, {full:,.0f} s on all examples:"
        f" {total / full:.0%}",
    ]
    if not selection:
        return lines
    saved = full - found.train_seconds
    runs = "never" if saved <= 0 else f"from run {max(math.ceil(selection / saved), 1)}"
    lines.append(
        f"  break-even  against all examples: {runs} of one plan on; one use pays when"
        f" less than {max(1 - selection / full, 0):.0%} is kept"
    )
    if found.small_feature_seconds is not None:
        small = found.small_feature_seconds
        ratio = (small + found.cluster_seconds + found.train_seconds) / full
        gained = found.feature_seconds - small
        lines.append(
            f"  smaller     features of the smaller model: {small:,.0f} s, total"
            f" {ratio:.0%}; its plan may keep up to {max(gained / full, 0):.1%} of the"
            " data more and cost the same"
        )
    return lines


def _remarks(found: Estimate, where: topology.Topology) -> list[str]:
    cost, lines = found.step.cost, []
    if where.is_simulated:
        lines.append(
            "compiled for simulated CPU devices: arguments are exact; temporaries are"
            " those of masked attention on a CPU, an upper guide"
        )
    if cost.uncounted_loops or cost.silent_kernels:
        lines.append(
            f"not in the arithmetic: {cost.silent_kernels} calls of kernels that state"
            f" no FLOPs; {cost.uncounted_loops} loops of unknown length count once"
        )
    return ["", *lines] if lines else []


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f}"


def read_model(config: config_lib.Config, path: str | None) -> decoder.DecoderConfig:
    """The decoder's sizes: of a config.json, or of the directory `model.path`.

    Raises:
      errors.CheckpointError: neither is there, or it can't be read.
    """
    cfg = config.model
    if path is None:
        folder = checkpoints.directory_of(cfg.path)
        if not (folder / "config.json").is_file():
            raise errors.CheckpointError(
                f"model.path={cfg.path!r} has no config.json; give the sizes alone by"
                " --model_config, for example configs/models/codellama_7b.json"
            )
        return checkpoints.read_config(cfg.path, cfg.param_dtype, cfg.compute_dtype)
    file = pathlib.Path(path)
    if not file.is_file():
        raise errors.CheckpointError(f"{path} does not exist; expected a config.json")
    return hf_config.parse(
        file.read_text(encoding="utf-8"),
        path,
        param_dtype=cfg.param_dtype,
        compute_dtype=cfg.compute_dtype,
    )


def read_data(config: config_lib.Config) -> Data:
    """N and means: of the flags, else of the data itself."""
    longest = float(config.data.max_length)
    if _NUM_EXAMPLES.value is not None:
        tokens = min(_MEAN_TOKENS.value or longest, longest)
        return Data(_NUM_EXAMPLES.value, tokens, _MEAN_LABELS.value or tokens)
    folder = checkpoints.directory_of(config.model.path)
    corpus = data.load(config.data, tokenizer_lib.Tokenizer.load(folder))
    return Data(
        corpus.num_examples,
        _MEAN_TOKENS.value or float(corpus.lengths.mean()),
        _MEAN_LABELS.value or float(corpus.num_labels.mean()),
    )


def main() -> None:
    config = command_line.resolved_config()
    if not _TOPOLOGY.value:
        raise errors.ConfigError("no --topology given; try --topology v5e:4x4")
    if not 0 < _EFFICIENCY.value <= 1:
        raise errors.ConfigError(
            f"--efficiency={_EFFICIENCY.value}; expected a share in (0, 1]"
        )
    where = topology.get(_TOPOLOGY.value)
    model_config = read_model(config, _MODEL_CONFIG.value)
    small = _SMALL_MODEL.value and read_model(config, _SMALL_MODEL.value)
    corpus = read_data(config)
    found = estimate(
        config,
        model_config,
        where,
        corpus,
        kept_fraction=_KEPT.value,
        efficiency=_EFFICIENCY.value,
        small_model=small or None,
    )
    for line in describe(found, config, where, corpus, _EFFICIENCY.value):
        progress.say(line)
    if _OUTPUT.value:
        record = {
            "topology": where.name,
            "num_devices": where.num_devices,
            "efficiency": _EFFICIENCY.value,
            "data": dataclasses.asdict(corpus),
            **dataclasses.asdict(found),
        }
        files.write_json(pathlib.Path(_OUTPUT.value), record)


if __name__ == "__main__":
    command_line.run(main, __doc__)

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

from absl import flags

from clusterjax import config as config_lib
from clusterjax import data, errors, files, progress
from clusterjax.data import tokenizer as tokenizer_lib
from clusterjax.models import checkpoints, decoder, hf_config
from experiments import budget, command_line, topology

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


def describe(
    found: budget.Estimate,
    config: config_lib.Config,
    where: topology.Topology,
    corpus: budget.Data,
    efficiency: float,
) -> list[str]:
    """The figures, line by line, for people."""
    step, rows = found.step, found.rows
    tokens = rows.micro_steps * rows.rows * rows.length
    received = ", ".join(
        f"{kind} {budget.gib(size)}"
        for kind, size in sorted(step.cost.collectives.items())
    )
    known = "" if where.chip.bandwidth else " (memory and network not given)"
    lines = [
        f"{where.name}: {where.num_devices} devices,"
        f" batch {config.allocation.batch_size} × {config.data.max_length} tokens,"
        f" {rows.micro_steps} micro-steps of {rows.rows} rows per data shard",
        "",
        "train step, per device",
        f"  memory      {budget.gib(step.peak)} GiB at the peak of"
        f" {budget.gib(where.chip.memory)}: arguments {budget.gib(step.arguments)},"
        f" temporaries {budget.gib(step.temporaries)}",
        f"  arithmetic  {step.cost.flops / 1e12:,.1f} TFLOP for {tokens:,} positions"
        f" per data shard ({step.cost.flops * where.num_devices / 1e15:,.2f} PFLOP on"
        " all devices)",
        f"  traffic     {budget.gib(step.cost.traffic)} GiB of its memory",
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


def _break_even(found: budget.Estimate) -> list[str]:
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


def _remarks(found: budget.Estimate, where: topology.Topology) -> list[str]:
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


def read_data(config: config_lib.Config) -> budget.Data:
    """N and means: of the flags, else of the data itself."""
    longest = float(config.data.max_length)
    if _NUM_EXAMPLES.value is not None:
        tokens = min(_MEAN_TOKENS.value or longest, longest)
        return budget.Data(_NUM_EXAMPLES.value, tokens, _MEAN_LABELS.value or tokens)
    folder = checkpoints.directory_of(config.model.path)
    corpus = data.load(config.data, tokenizer_lib.Tokenizer.load(folder))
    return budget.Data(
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
    found = budget.estimate(
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
    command_line.run(main, __doc__)  # pyright: ignore[reportArgumentType]

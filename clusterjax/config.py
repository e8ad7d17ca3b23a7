"""All settings: names, types, defaults and meanings, in one place.

Frozen dataclasses are the only source of names, types and defaults. At the door
stands an `ml_collections.ConfigDict` (`default()`), which config files and the command
line change; `resolve()` turns it into the dataclasses once and checks it. Every
function takes its own sub-config.

Keys under `perf` change speed and memory only; all others may change results, so
that `fingerprint()` leaves `perf` out.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import operator
import types
import typing
from typing import Any, Literal

import ml_collections

from clusterjax import errors


def key(
    default: Any,
    text: str,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A config key with its default, its meaning (shown by `--help`) and its bounds."""
    bounds = {"≥": least, "≤": most, ">": above, "<": below}
    metadata = {"help": text, "bounds": bounds}
    return dataclasses.field(default=default, metadata=metadata)


def group(cls: type, text: str) -> Any:
    """A group of keys, with what it is about."""
    return dataclasses.field(default_factory=cls, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """One source of examples."""

    name: str = key("", "name in reports and evaluation; default: the file's stem")
    path: str = key(
        "",
        "file or glob (.jsonl .json .parquet), data set or builder directory, TFDS name"
        " (`tfds:name/config`), hub name (`hub:owner/name`), or `builtin:name`",
    )
    split: str = key("train", "split of a TFDS, hub or built-in data set")
    layout: Literal[
        "auto",
        "instruction_response",
        "alpaca",
        "prompt_completion",
        "messages",
        "conversations",
        "columns",
    ] = key(
        "auto",
        "how rows hold prompt and answer; auto: by the columns found",
    )
    prompt_column: str = key("", "with layout=columns: column that holds the prompt")
    response_column: str = key("", "with layout=columns: column that holds the answer")
    system_column: str = key("", "with layout=columns: column of the system text")
    weight_column: str = key("", "column of user weights (float ≥ 0; 0 drops the row)")
    source_column: str = key("", "column that names the source, instead of `name`")
    group_column: str = key("", "column of ground-truth groups, for coverage figures")
    max_examples: int | None = key(
        None, "first rows to take, in rows; None = all", least=1
    )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is read, how it becomes tokens, and what happens to bad rows."""

    sources: tuple[SourceConfig, ...] = key((), "training sources")
    eval_sources: tuple[SourceConfig, ...] = key((), "held-out sources")
    eval_fraction: float = key(
        0.0,
        "share of the training rows held out by hash of the text, in [0, 1)",
        least=0,
        below=1,
    )
    template: str = key(
        "auto",
        "auto (the tokenizer's chat template) | chatml | magicoder | alpaca | plain |"
        " path of a jinja file",
    )
    max_length: int = key(
        512, "longest example, in tokens; longer ones are cut", least=2
    )
    on_error: Literal["stop", "skip"] = key(
        "stop",
        "what a row that can't be used does: end the run, or be left out and listed",
    )
    drop_duplicates: Literal["none", "exact", "normalized"] = key(
        "exact",
        "which repeated rows are left out; normalized: case and white space ignored",
    )
    max_line_bytes: int = key(
        4_000_000, "longest line of a text file, in bytes", least=1
    )
    cache_dir: str = key("", "tokenised corpora are kept here; '' = in the workdir")
    builtin_dir: str = key("", "built-in data sets are kept here; '' = user cache")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters; rank 0 trains the whole model."""

    rank: int = key(0, "rank of the adapters; 0 = full fine-tuning", least=0)
    alpha: float = key(16.0, "adapters are scaled by alpha / rank", above=0)
    dropout: float = key(
        0.0, "dropout on the adapter's input, in [0, 1)", least=0, below=1
    )
    targets: tuple[str, ...] = key(
        ("q", "v"), "matrices that get adapters: q k v o gate up down"
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model that is trained (and that makes the features)."""

    path: str = key("builtin", "Hugging Face directory, or `builtin`")
    param_dtype: Literal["float32", "bfloat16"] = key(
        "float32", "type of the master weights"
    )
    compute_dtype: Literal["float32", "bfloat16"] = key(
        "float32", "type of activations and matrix products"
    )
    lora: LoraConfig = group(LoraConfig, "low-rank adapters")


@dataclasses.dataclass(frozen=True)
class FeaturesConfig:
    """Gradient features (METHOD §1)."""

    kind: Literal["proxy", "head", "probe", "per_example"] = key(
        "proxy",
        "last-layer proxy (the paper's), exact last layer, all layers, any parameters",
    )
    dim: int | None = key(
        None, "final width by a seeded projection; None = as is", least=1
    )
    k_in: int = key(16, "probe, head: rows of the input projection", least=1)
    k_out: int = key(16, "probe, head: rows of the output projection", least=1)
    layers: tuple[int, ...] = key((), "probe: layers to use; () = all")
    matrices: tuple[str, ...] = key(
        ("q", "k", "v", "o", "gate", "up", "down"), "probe: linear layers to use"
    )
    matrix_sizes: tuple[str, ...] = key(
        (), "probe: other k_in x k_out of some linear layers, like `down=32x16`"
    )
    parameters: tuple[str, ...] = key(
        (r".*",), "per_example: regular expressions of parameter paths"
    )
    projection: Literal["identity", "rademacher", "normal", "sparse"] = key(
        "rademacher", "random matrix that narrows the gradients"
    )
    block_size: int = key(
        65536, "per_example: gradient entries projected at a time", least=1
    )
    seed: int = key(0, "seed of the projections")
    center: Literal["none", "mean"] = key(
        "none", "mean: subtract the mean raw feature before scaling to unit length"
    )
    max_tokens: int | None = key(None, "longest input of the pass, in tokens", least=2)
    num_layers: int | None = key(
        None, "only the first layers, then norm and head", least=1
    )
    model: str = key("", "another, smaller model for the pass; '' = the trained one")
    during_first_epoch: bool = key(
        False,
        "no pass: train the first epoch on all data, collect its features (kind=proxy),"
        " and select for the later epochs",
    )
    compute_dtype: Literal["", "float32", "bfloat16"] = key(
        "", "type of activations in the pass; '' = model.compute_dtype"
    )
    store_dtype: Literal["float32", "float16"] = key(
        "float32", "type of the stored features"
    )
    store_dir: str = key("", "feature store; '' = in the workdir")
    agreement_sample: int = key(
        0, "examples on which a cheaper pass is compared with the full one", least=0
    )
    worth_sample: int = key(
        0, "examples for the whole-model worth figures; 0 = off", least=0
    )


@dataclasses.dataclass(frozen=True)
class ClusteringConfig:
    """K-means, floor and capacity (METHOD §2)."""

    num_clusters: int = key(4, "K, clusters before the floor", least=1)
    num_restarts: int = key(10, "independent k-means++ starts; the best wins", least=1)
    max_iterations: int = key(
        300, "most Lloyd iterations of a start; mini-batch: passes", least=1
    )
    tol: float = key(
        1e-4, "stop at centre shift < tol × mean feature variance", least=0
    )
    metric: Literal["euclidean", "spherical"] = key(
        "euclidean", "distance: euclidean (the paper's), or by the angle"
    )
    min_cluster_size: int = key(
        10, "floor: smaller clusters are dissolved, examples", least=0
    )
    capacity_factor: float = key(
        1.5, "largest cluster allowed, in units of N / K", least=1
    )
    restart_sample: int | None = key(
        None,
        "choose the best start on this many rows; None = 256 K (at least 8,192),"
        " 0 = all rows",
        least=0,
    )
    mini_batch: int | None = key(
        None, "rows of a mini-batch; None = full k-means", least=1
    )
    seed: int = key(0, "seed of the starts")


@dataclasses.dataclass(frozen=True)
class SelectionConfig:
    """Which examples are kept, and the weights that make up for it (METHOD §3–4)."""

    method: Literal[
        "cluster",
        "full",
        "random",
        "stratified",
        "uniform",
        "highest_loss",
        "largest_norm",
        "k_center",
        "near_duplicate",
        "target",
    ] = key(
        "cluster",
        "cluster (the paper's), or a baseline at equal budget",
    )
    quota: Literal["min", "waterfill"] = key(
        "min", "cluster: what the smallest allows (the paper's), or a target fraction"
    )
    ratio: float = key(
        0.75, "quota=min: share of the smallest cluster, in (0, 1]", above=0, most=1
    )
    target_fraction: float = key(
        0.5,
        "waterfill and the baselines: share of the data kept, in (0, 1]",
        above=0,
        most=1,
    )
    budget: Literal["examples", "tokens"] = key(
        "examples",
        "what target_fraction counts for the baselines; tokens: labels only",
    )
    num_kept: int | None = key(
        None, "baselines: examples kept, instead of a fraction", least=1
    )
    keep: Literal[
        "farthest",
        "nearest",
        "mixed",
        "random",
        "largest_norm",
        "k_center",
        "herding",
        "all",
    ] = key(
        "farthest",
        "which examples of a cluster fill its quota; farthest is the paper's",
    )
    share: Literal["examples", "tokens"] = key(
        "examples",
        "what a cluster's share π_c counts; examples is the paper's, tokens: labels",
    )
    weighting: Literal["share", "sqrt", "uniform", "none"] = key(
        "share",
        "how π_c follows the share; share is the paper's, none: one global mean",
    )
    normalise: Literal["token", "example"] = key(
        "token", "the mean inside a cluster is over label tokens or over examples"
    )
    min_kept_fraction: float = key(
        0.05, "a plan that keeps less stops, in [0, 1]", least=0, most=1
    )
    must_keep: tuple[str, ...] = key((), "uids that are always kept")
    never_keep: tuple[str, ...] = key((), "uids that are never kept")
    min_per_source: int = key(0, "examples kept of every source, at least", least=0)
    near_duplicate_cosine: float = key(
        0.95, "near_duplicate: same above this cosine", above=-1, most=1
    )
    target_source: str = key("", "target: the eval source that examples should be like")
    refresh_every: int = key(
        0, "renew features, clusters, plan; in steps, 0 = never", least=0
    )
    seed: int = key(0, "seed of random choices")


@dataclasses.dataclass(frozen=True)
class AllocationConfig:
    """The schedule: which step holds which examples, and where (METHOD §5)."""

    batch_size: int = key(
        32, "B, examples of one optimiser step over all devices", least=1
    )
    num_epochs: int = key(2, "passes over the kept examples", least=1)
    max_steps: int | None = key(
        None, "stop after this many steps; None = all epochs", least=1
    )
    order: Literal["shuffled", "herded"] = key(
        "shuffled", "order within clusters: at random, or by herding of the gradients"
    )
    even_steps: bool = key(
        True,
        "shuffled: every step draws equally from the short and the long answers of each"
        " cluster, so that steps hold about equally many tokens",
    )
    herding_pool: int = key(
        0, "herded: candidates looked at per pick; 0 = all", least=0
    )
    herding_exchanges: int = key(
        100,
        "herded: rounds of exchanges between pairs of steps after the greedy order;"
        " 0 = the greedy order alone",
        least=0,
    )
    placement: Literal["spread", "dedicated"] = key(
        "spread",
        "every worker a share of every cluster, or (the paper's) its own clusters",
    )
    last_step: Literal["pad", "drop"] = key(
        "pad",
        "fill the incomplete last step of an epoch with weight 0, or leave it out",
    )
    packing: bool = key(True, "several examples in one row")
    row_length: int | None = key(
        None, "T of packed rows, tokens; None = max_length", least=2
    )
    accumulation_steps: int = key(1, "A, micro-steps of one optimiser step", least=1)
    seed: int = key(0, "seed of the order")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Optax optimiser and learning-rate schedule."""

    name: Literal["adamw", "adafactor", "sgd"] = key("adamw", "optax optimiser")
    learning_rate: float = key(5e-4, "peak learning rate", above=0)
    schedule: Literal["constant", "linear", "cosine"] = key(
        "cosine", "learning rate after the warm-up; linear, cosine: down to final_scale"
    )
    final_scale: float = key(0.0, "learning rate at the end / peak", least=0)
    warmup_steps: int = key(10, "linear warm-up, in optimiser steps", least=0)
    weight_decay: float = key(0.0, "decoupled weight decay, on matrices only", least=0)
    beta1: float = key(0.9, "adamw: decay of the first moment", least=0, below=1)
    beta2: float = key(0.999, "adamw: decay of the second moment", least=0, below=1)
    eps: float = key(1e-8, "adamw: added to the root of the second moment", above=0)
    clip_norm: float | None = key(
        1.0, "clip the global gradient norm; None = never", above=0
    )
    adafactor_parameter_scale: bool = key(
        False, "adafactor: scale updates by the parameter's RMS (optax's default)"
    )
    adafactor_clip: float | None = key(
        1.0, "adafactor: RMS clip of each layer", above=0
    )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The training loop."""

    optimizer: OptimizerConfig = group(OptimizerConfig, "optimiser and schedule")
    nonfinite: Literal["stop", "skip"] = key(
        "stop", "what a step with a loss or gradient that is not finite does"
    )
    log_every: int = key(10, "steps between lines of metrics.jsonl", least=1)
    eval_every: int = key(
        0, "steps between evaluations; 0 = start and end only", least=0
    )
    statistics_every: int = key(
        0, "steps between gradient-diversity figures; 0 = never", least=0
    )
    checkpoint_every: int = key(
        50, "steps between checkpoints; 0 = the end only", least=0
    )
    keep_checkpoints: int = key(2, "newest checkpoints kept", least=1)
    keep_best: bool = key(False, "keep the checkpoint of lowest held-out loss as well")
    save_model: bool = key(True, "write the final model in Hugging Face form")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Unweighted evaluation on held-out data."""

    max_examples: int | None = key(None, "held-out examples used; None = all", least=1)
    exact_match: int = key(
        0, "examples per source answered by generation; 0 = none", least=0
    )
    max_new_tokens: int = key(64, "exact match: longest answer, in tokens", least=1)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices. Batch rows are split over data × fsdp; one axis may be −1."""

    data: int = key(-1, "data-parallel axis, devices", least=-1)
    fsdp: int = key(1, "axis over which parameters are sharded, devices", least=-1)
    tensor: int = key(1, "tensor-parallel axis, devices", least=-1)
    num_simulated_devices: int | None = key(
        None, "CPU devices to simulate; None = the machine's own devices", least=1
    )
    allow_replication: bool = key(
        False, "go on when a parameter does not divide (logged), instead of stopping"
    )


@dataclasses.dataclass(frozen=True)
class PerfConfig:
    """Speed and memory only: none of these changes a result."""

    feature_batch_tokens: int = key(
        8192, "tokens per device and feature batch", least=1
    )
    feature_micro_batch: int = key(8, "per_example: gradients held at once", least=1)
    feature_turn_tokens: int = key(
        1024, "probe: tokens per device whose activations are held at once", least=1
    )
    feature_buckets: int = key(6, "most different lengths of feature batches", least=1)
    feature_block: int = key(
        2048, "examples in one block of the feature store", least=1
    )
    eval_batch_tokens: int = key(
        8192, "tokens per device and evaluation batch", least=1
    )
    kmeans_block: int = key(8192, "rows of one block of distances", least=1)
    vocab_chunk: int = key(8192, "vocabulary entries of one chunk of logits", least=1)
    remat: Literal["none", "full", "dots"] = key(
        "none", "what the backward pass computes again instead of keeping"
    )
    prefetch: int = key(2, "batches prepared ahead", least=1)
    steps_in_flight: int = key(
        0, "steps dispatched ahead; 0 = 1 on CPU, 2 elsewhere", least=0
    )
    async_checkpoints: bool = key(True, "write checkpoints in the background")
    compilation_cache: str = key("", "directory of compiled programs; '' = none")


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """What is written for people."""

    html: bool = key(True, "write report.html")
    max_points: int = key(3000, "points of the feature map", least=1)
    max_text: int = key(400, "characters of an example's text in the report", least=0)
    tensorboard: bool = key(False, "write TensorBoard events")
    profile_steps: str = key(
        "", "trace these training steps into profile/, as FIRST:LAST; '' = none"
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    stages: Literal[
        "all", "data", "features", "cluster", "select", "train", "report"
    ] = key("all", "the last stage to run")
    seed: int = key(0, "added to the seeds of clustering, selection and allocation")
    data: DataConfig = group(DataConfig, "what is read and how it becomes tokens")
    model: ModelConfig = group(ModelConfig, "the model")
    features: FeaturesConfig = group(FeaturesConfig, "gradient features")
    clustering: ClusteringConfig = group(ClusteringConfig, "k-means, floor, capacity")
    selection: SelectionConfig = group(SelectionConfig, "kept examples and weights")
    allocation: AllocationConfig = group(AllocationConfig, "schedule and placement")
    train: TrainConfig = group(TrainConfig, "optimiser and loop")
    eval: EvalConfig = group(EvalConfig, "held-out evaluation")
    mesh: MeshConfig = group(MeshConfig, "devices and how they are used")
    perf: PerfConfig = group(PerfConfig, "speed and memory, never results")
    report: ReportConfig = group(ReportConfig, "report and logs")


_HOLDS = {"≥": operator.ge, "≤": operator.le, ">": operator.gt, "<": operator.lt}


def default() -> ml_collections.ConfigDict:
    """A locked ConfigDict with every key at its default; config files start here."""
    return _to_config_dict(Config())


def source(**keys: Any) -> ml_collections.ConfigDict:
    """One entry of `data.sources` or `data.eval_sources`, for config files."""
    result = _to_config_dict(SourceConfig())
    result.update(keys)
    return result


def resolve(config: ml_collections.ConfigDict) -> Config:
    """Turns the ConfigDict into the frozen dataclasses, checking names and types.

    Raises:
      errors.ConfigError: a key that does not exist (with the nearest name), or a value
        of the wrong type.
    """
    return _from_mapping(Config, config, prefix="")


def cautions(config: Config) -> list[str]:
    """Settings that are allowed and seldom meant, one line each."""
    found = []
    rate = config.train.optimizer.learning_rate
    if config.model.param_dtype == "bfloat16":
        # bfloat16 has 8 bits of precision: half a step is 2⁻⁹ of the value.
        found.append(
            "model.param_dtype=bfloat16 keeps the masters in bfloat16, where an update"
            " below 1/512 of a weight is lost: at"
            f" train.optimizer.learning_rate={rate:g} perhaps all updates of weights"
            f" above {512 * rate:g}; use float32, and model.compute_dtype=bfloat16 for"
            " speed"
        )
    return found


def fingerprint(config: Any, *names: str) -> str:
    """Hash of a config, or of the named groups of it.

    Leaves out what changes no result: `perf`, `report`, `stages`, and `mesh` (a run may
    go on with another number of devices).
    """
    tree = dataclasses.asdict(config)
    chosen = {name: tree[name] for name in names} if names else tree
    for name in ("perf", "report", "stages", "mesh"):
        chosen.pop(name, None)
    text = json.dumps(chosen, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def describe(cls: type = Config, prefix: str = "") -> list[tuple[str, str, str, str]]:
    """Rows (key, type, default, meaning) of every config key, in order."""
    rows: list[tuple[str, str, str, str]] = []
    for field in dataclasses.fields(cls):
        name = prefix + field.name
        kind = _types(cls)[field.name]
        text = field.metadata.get("help", "")
        if dataclasses.is_dataclass(kind):
            rows.append((name, "group", "", text))
            rows.extend(describe(typing.cast(type, kind), name + "."))
        else:
            rows.append((name, _type_name(kind), repr(field.default), text))
    return rows


def _types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _type_name(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return " | ".join(map(repr, typing.get_args(kind)))
    if isinstance(kind, type) and not typing.get_args(kind):
        return kind.__name__
    return str(kind).replace("clusterjax.config.", "")


def _is_optional(kind: Any) -> bool:
    return isinstance(kind, types.UnionType) and type(None) in typing.get_args(kind)


def _bare(kind: Any) -> Any:
    """`int` for `int | None`, else the type itself."""
    if not _is_optional(kind):
        return kind
    return next(t for t in typing.get_args(kind) if t is not type(None))


def _to_config_dict(value: Any) -> ml_collections.ConfigDict:
    result = ml_collections.ConfigDict()
    kinds = _types(type(value))
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if dataclasses.is_dataclass(item):
            result[field.name] = _to_config_dict(item)
        elif item is None:
            holder = ml_collections.config_dict.placeholder(_bare(kinds[field.name]))  # pyright: ignore[reportAttributeAccessIssue]
            result[field.name] = holder
        else:
            result[field.name] = item
    return result.lock()


def _from_mapping(cls: type, values: ml_collections.ConfigDict, prefix: str) -> Any:
    kinds = _types(cls)
    for name in values:
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1, cutoff=0.5)
            hint = f"; did you mean {prefix}{near[0]}?" if near else ""
            raise errors.ConfigError(
                f"config has no key {prefix}{name}{hint} (keys: {', '.join(kinds)})"
            )
    parts = {
        name: _convert(kinds[name], values[name], prefix + name)
        for name in kinds
        if name in values
    }
    for field in dataclasses.fields(cls):
        if field.name in parts:
            _check_bounds(field, parts[field.name], prefix + field.name)
    return cls(**parts)


def _check_bounds(field: dataclasses.Field, value: Any, name: str) -> None:
    bounds = field.metadata.get("bounds", {})
    for item in value if isinstance(value, tuple) else (value,):
        for sign, bound in bounds.items():
            if bound is None or item is None or _HOLDS[sign](item, bound):
                continue
            raise errors.ConfigError(f"{name}={value!r} must be {sign} {bound:g}")


def _choice(choices: tuple[str, ...], value: Any, name: str) -> str:
    if value in choices:
        return value
    near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise errors.ConfigError(
        f"{name}={value!r} is not one of {', '.join(map(repr, choices))}{hint}"
    )


def _convert(kind: Any, value: Any, name: str) -> Any:
    if value is None and _is_optional(kind):
        return None
    kind = _bare(kind)
    if typing.get_origin(kind) is Literal:
        return _choice(typing.get_args(kind), value, name)
    if dataclasses.is_dataclass(kind):
        if isinstance(value, ml_collections.ConfigDict):
            return _from_mapping(typing.cast(type, kind), value, name + ".")
    elif typing.get_origin(kind) is tuple:
        item_kind = typing.get_args(kind)[0]
        if isinstance(value, (list, tuple)):
            return tuple(
                _convert(item_kind, item, f"{name}[{i}]")
                for i, item in enumerate(value)
            )
    elif kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise errors.ConfigError(
        f"{name}={value!r} has type {type(value).__name__}; expected {_type_name(kind)}"
    )

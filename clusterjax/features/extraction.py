"""The feature pass: every example of a corpus through one extractor, in order."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from clusterjax import config as config_lib
from clusterjax import datatypes, errors, files, progress
from clusterjax import mesh as meshes
from clusterjax.features import (
    batches,
    extractors,
    model_state,
    projection_check,
    store,
    vectors,
)
from clusterjax.models import decoder, lora

# Settings that each kind's raw features depend on, beside the model.
_SETTINGS = {
    "proxy": (),
    "head": ("k_in", "k_out", "projection", "seed"),
    "probe": (
        "k_in",
        "k_out",
        "layers",
        "matrices",
        "matrix_sizes",
        "projection",
        "seed",
    ),
    "per_example": ("parameters", "projection", "seed"),
}


@dataclasses.dataclass(frozen=True)
class Pass:
    """One feature pass.

    Attributes:
      extractor: the compiled steps.
      params: of the model.
      corpus: the examples.
      where: what is read of each example.
      buckets: static shapes.
      mesh: None: one device.
      perf: sizes.
    """

    extractor: extractors.Extractor
    params: Any
    corpus: datatypes.Corpus
    where: batches.Windows
    buckets: list[batches.Bucket]
    mesh: Mesh | None
    perf: config_lib.PerfConfig

    def plan(self, example_id: np.ndarray) -> batches.Plan:
        """Batches of these examples."""
        return batches.plan_batches(
            example_id, self.where, self.buckets, self.extractor.shards
        )

    def blocks(self, example_id: np.ndarray) -> list[np.ndarray]:
        """The examples in blocks of neighbours by length.

        A block's features depend on the block alone, so that a resumed pass gives
        the same bits.
        """
        ordered = batches.order(example_id, self.where, self.buckets)
        size = self.perf.feature_block
        return [ordered[i : i + size] for i in range(0, len(ordered), size)]

    def run(self, example_id: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
        """Yields (example_id, raw [n, D], loss [n]) of every batch, on the host.

        With several processes each gets the rows of its own devices (all rows where
        the outputs are replicated).
        """
        limit = self.perf.steps_in_flight or (
            1 if jax.default_backend() == "cpu" else 2
        )
        plan = self.plan(example_id)
        pending: collections.deque = collections.deque()
        for bucket, ids, sizes in zip(plan.bucket, plan.example_id, plan.sizes):
            rows = put(batches.fill(self.corpus, self.where, ids, bucket), self.mesh)
            pending.append((ids, self.extractor(self.params, rows, sizes)))
            while len(pending) >= limit:
                yield from _fetch(*pending.popleft())
        while pending:
            yield from _fetch(*pending.popleft())


def compute(
    model: decoder.Decoder,
    corpus: datatypes.Corpus,
    cfg: config_lib.FeaturesConfig,
    mesh: Mesh | None = None,
    *,
    perf: config_lib.PerfConfig | None = None,
    directory: epath.PathLike | None = None,
    factors: lora.Factors | None = None,
    lora_config: config_lib.LoraConfig | None = None,
) -> datatypes.GradientFeatures:
    """Computes one gradient feature for every valid example of `corpus`.

    Args:
      model: the decoder; its parameters may be sharded over `mesh`.
      corpus: the examples.
      cfg: which feature.
      mesh: batches are split over its data × fsdp axes; None: one device.
      perf: batch sizes; never changes a result beyond rounding.
      directory: feature store, local or remote: examples found there are not computed
        again, and a killed pass goes on where it stopped. With several processes it
        must be storage that all of them see. None: nothing is kept.
      factors, lora_config: adapters of the model; `per_example` then takes the
        gradient of the adapters.

    Returns:
      Features in the order of the corpus. An example without a label position, with a
      value that is not finite, or with a norm below 1e-12 is in `rejects` instead.

    Raises:
      errors.ConfigError: settings that can't work together.
      errors.DataError: no example has a usable feature.
    """
    perf = perf or config_lib.PerfConfig()
    state = model_state.split(
        model,
        cfg.compute_dtype,
        extractors.remat(cfg, perf),
        cfg.num_layers,
        factors,
        lora_config,
        mesh,
    )
    where = batches.windows(corpus, cfg.max_tokens)
    candidates = np.flatnonzero(where.num_labels > 0)
    if not len(candidates):
        raise errors.DataError(
            f"0 of {corpus.num_examples:,} examples have a label token"
            " (features.max_tokens="
            f"{cfg.max_tokens}); look at the data report and at data.max_length"
        )
    extractor = extractors.Extractor(
        state, cfg, perf, mesh, gather=directory is None and jax.process_count() > 1
    )
    projection_check.run(cfg, extractor)
    buckets = batches.choose_buckets(
        where.length[candidates] - 1,
        perf.feature_buckets,
        perf.feature_batch_tokens,
        extractor.shards,
        perf.feature_turn_tokens if cfg.kind == "probe" else None,
    )
    work = Pass(extractor, state.params, corpus, where, buckets, mesh, perf)
    model_fingerprint = model_state.fingerprint(state)
    settings = settings_fingerprint(cfg, model_fingerprint)
    kept: store.MemoryStore = store.MemoryStore()
    if directory is not None:
        kept = store.Store(
            epath.Path(directory) / settings, extractor.width, cfg.store_dtype
        )
    _complete(work, cfg, kept, candidates)
    path = None
    if directory is not None and files.is_local(directory):
        path = epath.Path(directory) / settings / "values"
    return _finish(work, cfg, kept, model_fingerprint, path)


def settings_fingerprint(cfg: config_lib.FeaturesConfig, model_fingerprint: str) -> str:
    """Hash of everything but the example that its feature depends on."""
    names = ("kind", "dim", "max_tokens", "store_dtype", *_SETTINGS[cfg.kind])
    if cfg.dim is not None and "projection" not in names:
        names = (*names, "projection", "seed")
    chosen = [f"{name}={getattr(cfg, name)!r}" for name in names]
    return files.hash_arrays(model_fingerprint, *chosen)


def put(rows: batches.Rows, mesh: Mesh | None) -> batches.Rows:
    """Moves rows to the devices, split over the data shards."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, rows)
    sharding = meshes.rows(mesh)
    return jax.tree.map(
        lambda leaf: jax.make_array_from_callback(
            leaf.shape, sharding, leaf.__getitem__
        ),
        rows,
    )


def _complete(
    work: Pass,
    cfg: config_lib.FeaturesConfig,
    kept: store.MemoryStore,
    candidates: np.ndarray,
) -> None:
    """Computes what the store does not hold yet, and prints what that takes."""
    keys = np.asarray(work.corpus.content_hash)
    found, _ = kept.find(keys[candidates])
    missing = candidates[found < 0]
    # Equal contents have equal features: one of them is computed.
    _, first = np.unique(keys[missing], axis=0, return_index=True)
    missing = missing[np.sort(first)]
    _barrier("features: found")
    if not len(missing):
        progress.say(f"  features: all {len(candidates):,} are in the store")
        return
    _announce(work, cfg, missing, len(candidates))
    with progress.track("features", len(missing), "examples") as advance:
        for ids in work.blocks(missing):
            block = _compute_block(work, ids, advance)
            if block is not None:
                kept.write(block)
    _barrier("features: done")
    if isinstance(kept, store.Store):
        kept.refresh()
    found, _ = kept.find(keys[candidates])
    if np.any(found < 0):
        raise errors.UserError(
            f"{int(np.sum(found < 0)):,} of {len(candidates):,} features are not in"
            " the store after the pass; with several processes features.store_dir"
            " must be storage that all of them see"
        )


def _compute_block(work: Pass, ids: np.ndarray, advance: Any) -> store.Block | None:
    """Features of one block; of this process's rows (None: none), with several."""
    parts = []
    for example_id, raw_BD, loss_B in work.run(ids):
        unit_BD, norm_B = vectors.unit_rows(raw_BD)
        parts.append((example_id, unit_BD, norm_B, loss_B))
        advance(len(example_id))
    if not parts:
        return None
    example_id, unit_ND, norm, loss = (np.concatenate(p) for p in zip(*parts))
    order = np.argsort(example_id)
    return store.Block(
        key=np.asarray(work.corpus.content_hash)[example_id[order]],
        norm=norm[order],
        loss=loss[order].astype(np.float32),
        unit_ND=unit_ND[order],
    )


def _announce(
    work: Pass, cfg: config_lib.FeaturesConfig, missing: np.ndarray, total: int
) -> None:
    """Compiles the largest step and prints size, padding and predicted memory.

    Raises:
      errors.UserError: the step needs more memory than the device has.
    """
    extractor = work.extractor
    plan = work.plan(batches.order(missing, work.where, work.buckets))
    i = extractors.largest(plan)
    empty = put(extractors.empty_rows(plan.bucket[i], extractor.shards), work.mesh)
    extractor.programs(work.params, empty, plan.sizes[i])
    memory = extractor.memory
    share = work.where.num_labels[missing].sum() / max(
        (work.where.length[missing] - 1).sum(), 1
    )
    progress.say(
        f"  features: {cfg.kind} of width {extractor.width:,},"
        f" {len(missing):,} of {total:,} examples to compute,"
        f" {len(plan.bucket):,} batches of {len(work.buckets)} lengths,"
        f" {plan.padding(work.where.length - 1):.1%} padding, {share:.0%} labels"
    )
    block = min(len(missing), work.perf.feature_block) * extractor.width * 4
    progress.say(
        f"  features: predicted peak {memory.peak / 2**30:.2f} GiB per device"
        f" ({memory.arguments / 2**30:.2f} parameters and rows,"
        f" {memory.temporaries / 2**30:.2f} temporaries),"
        f" {2 * block / 2**30:.2f} GiB on the host for a block"
    )
    _check_memory(cfg.kind, memory.peak, jax.local_devices()[0].memory_stats())


# What makes a step of each kind smaller.
_SMALLER = {
    "proxy": "perf.feature_batch_tokens",
    "head": "perf.feature_batch_tokens",
    "probe": "perf.feature_turn_tokens",
    "per_example": "perf.feature_micro_batch",
}


def _check_memory(kind: str, peak: int, stats: dict[str, Any] | None) -> None:
    """Stops a pass that can't fit; CPUs do not say what they have (`stats` is None)."""
    limit = (stats or {}).get("bytes_limit")
    if limit and peak > limit:
        raise errors.UserError(
            f"a step of the feature pass needs {peak / 2**30:.1f} GiB, the device has"
            f" {limit / 2**30:.1f}: lower {_SMALLER[kind]}, shard the model over more"
            " devices (mesh.fsdp), or set features.compute_dtype='bfloat16'"
        )


def _fetch(
    example_id: np.ndarray, outputs: extractors.Outputs
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The used rows of a batch that this process holds."""
    raw, loss = (_local(output) for output in outputs)
    places = sorted(raw)
    rows = np.concatenate([np.arange(*place) for place in places])
    used = example_id[rows] >= 0
    if used.any():
        yield (
            example_id[rows][used],
            np.concatenate([raw[place] for place in places])[used],
            np.concatenate([loss[place] for place in places])[used],
        )


def _local(array: jax.Array) -> dict[tuple[int, int], np.ndarray]:
    """(first row, end) → rows, for the row ranges on this process's devices."""
    result = {}
    for shard in array.addressable_shards:
        begin, end, _ = shard.index[0].indices(array.shape[0])
        if (begin, end) not in result:
            result[begin, end] = np.asarray(shard.data)
    return result


def _finish(
    work: Pass,
    cfg: config_lib.FeaturesConfig,
    kept: store.MemoryStore,
    model_fingerprint: str,
    path: epath.Path | None,
) -> datatypes.GradientFeatures:
    """Takes out the rejects, centres and orders the rest."""
    keys = np.asarray(work.corpus.content_hash)
    norm, loss = kept.scalars(keys)
    settings = settings_fingerprint(cfg, model_fingerprint)
    fingerprint = files.hash_arrays(work.corpus.fingerprint, settings, cfg.center)
    if path is not None:
        path = path / f"{fingerprint}-{jax.process_index()}.npy"
    return finish(
        work.corpus,
        cfg,
        work.where.num_labels,
        norm,
        loss,
        lambda keep: store.assemble(kept, keys[keep], work.extractor.width, path),
        fingerprint,
        model_fingerprint,
    )


def finish(
    corpus: datatypes.Corpus,
    cfg: config_lib.FeaturesConfig,
    num_labels: np.ndarray,
    norm: np.ndarray,
    loss: np.ndarray,
    unit_rows: Callable[[np.ndarray], np.ndarray],
    fingerprint: str,
    model_fingerprint: str,
) -> datatypes.GradientFeatures:
    """Features of a corpus, without the examples that have no usable one.

    Args:
      corpus: the examples.
      cfg: kind and centring.
      num_labels: int [N], label positions that were seen of each example.
      norm, loss: float32 [N], of the raw features; anything where there are no labels.
      unit_rows: corpus rows → their unit features [n, D].
      fingerprint: of the features.
      model_fingerprint: of the parameters that they are of.

    Raises:
      errors.DataError: no example has a usable feature.
    """
    no_label = num_labels == 0
    bad = ~np.isfinite(norm) | ~np.isfinite(loss)
    zero = ~bad & (norm < vectors.MIN_NORM)
    keep = np.flatnonzero(~(no_label | bad | zero))
    rejects = [
        _reject(corpus, int(i), bool(no_label[i]), bool(bad[i]), float(norm[i]))
        for i in np.flatnonzero(no_label | bad | zero)
    ]
    if not len(keep):
        raise errors.DataError(
            f"none of {corpus.num_examples:,} examples has a usable feature; the"
            f" first: {rejects[0].detail}"
        )
    values = unit_rows(keep)
    if cfg.center == "mean":
        values = vectors.centred(values, norm[keep])
    return datatypes.GradientFeatures(
        values=values,
        norm=norm[keep],
        loss=loss[keep],
        num_labels=np.asarray(corpus.num_labels)[keep],
        user_weight=np.asarray(corpus.user_weight)[keep],
        example_id=keep.astype(np.int64),
        uid=np.asarray(corpus.uid)[keep],
        source_id=np.asarray(corpus.source_id)[keep],
        kind=cfg.kind,
        fingerprint=fingerprint,
        corpus_fingerprint=corpus.fingerprint,
        model_fingerprint=model_fingerprint,
        num_corpus=corpus.num_examples,
        source_names=corpus.source_names,
        rejects=tuple(rejects),
    )


def _reject(
    corpus: datatypes.Corpus, i: int, no_label: bool, bad: bool, norm: float
) -> datatypes.Reject:
    if no_label:
        reason, detail = "no_label_tokens", "no label token inside the feature window"
    elif bad:
        reason, detail = "non_finite_feature", "its gradient or loss is not finite"
    else:
        reason, detail = "zero_feature", f"its gradient norm {norm:.1e} is below 1e-12"
    uid = str(corpus.uid[i])
    return datatypes.Reject(
        source=corpus.source_names[int(corpus.source_id[i])],
        row=int(corpus.row[i]),
        reason=reason,
        detail=f"example {i} ({uid}): {detail}",
        uid=uid,
    )


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)

"""The feature pass: every example of a corpus through one extractor, in order."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from clusterjax import config
from clusterjax import datatypes
from clusterjax import errors
from clusterjax import files
from clusterjax import mesh as meshes
from clusterjax import progress
from clusterjax.features import batches
from clusterjax.features import last_layer
from clusterjax.features import model_state
from clusterjax.models import decoder

# An example whose raw feature is shorter has no direction.
MIN_NORM = 1e-12

# (params, rows, label slots of a shard) → raw [B, D] and mean loss [B], float32.
Extractor = Callable[[Any, batches.Rows, int], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Raw:
    """Features as they come out of the pass, one row per example asked for.

    Attributes:
      unit_ND: float32, rows of unit length (zero where there is no direction).
      norm: float32 [n], length before scaling, NaN where not finite.
      loss: float32 [n].
    """

    unit_ND: np.ndarray
    norm: np.ndarray
    loss: np.ndarray


def compute(
    model: decoder.Decoder,
    corpus: datatypes.Corpus,
    cfg: config.FeaturesConfig,
    mesh: Mesh | None = None,
    *,
    perf: config.PerfConfig | None = None,
    directory: str | None = None,
) -> datatypes.GradientFeatures:
    """Computes one gradient feature for every valid example of `corpus`.

    Args:
      model: the decoder; its parameters may be sharded over `mesh`.
      corpus: the examples.
      cfg: which feature.
      mesh: batches are split over its data × fsdp axes; None: one device.
      perf: batch sizes; never changes a result beyond rounding.
      directory: feature store; None: nothing is kept.

    Returns:
      Features in the order of the corpus. An example without a label position, with a
      value that is not finite, or with a norm below 1e-12 is in `rejects` instead.

    Raises:
      errors.UserError: no example has a usable feature.
    """
    perf = perf or config.PerfConfig()
    state = model_state.split(model, cfg.compute_dtype, perf.remat, cfg.num_layers)
    where = batches.windows(corpus, cfg.max_tokens)
    shards = meshes.num_shards(mesh) if mesh is not None else 1
    candidates = np.flatnonzero(where.num_labels > 0)
    if not len(candidates):
        raise errors.DataError(
            f"0 of {corpus.num_examples:,} examples have a label token inside"
            f" features.max_tokens={cfg.max_tokens}; look at the data report"
        )
    buckets = batches.choose_buckets(
        where.length[candidates] - 1,
        perf.feature_buckets,
        perf.feature_batch_tokens,
        shards,
    )
    ordered = batches.order(candidates, where, buckets)
    plan = batches.plan_batches(ordered, where, buckets, shards)
    extractor = make_extractor(state, cfg, perf, mesh)
    progress.say(
        f"features: {cfg.kind}, {len(candidates):,} examples in"
        f" {len(plan.bucket):,} batches of {len(buckets)} lengths,"
        f" {plan.padding(where.length - 1):.1%} padding"
    )
    raw = run(extractor, state.params, corpus, where, plan, mesh, perf)
    return finish(corpus, where, cfg, model_state.fingerprint(state), raw)


def make_extractor(
    state: model_state.ModelState,
    cfg: config.FeaturesConfig,
    perf: config.PerfConfig,
    mesh: Mesh | None,
) -> Extractor:
    """Builds the jitted step of a kind."""
    shards = meshes.num_shards(mesh) if mesh is not None else 1
    tensor = mesh.shape.get("tensor", 1) if mesh is not None else 1
    vocab_shards = tensor if state.config.vocab_size % tensor == 0 else 1

    @jax.jit
    def body(params, rows):
        return state.merge(params).hidden(
            rows.tokens,
            rows.segment_ids,
            rows.positions,
            num_layers=state.num_layers,
        )

    @functools.partial(jax.jit, static_argnames=("num_slots", "size"))
    def head(params, hidden_BTH, rows, *, num_slots, size):
        labels = last_layer.label_positions(hidden_BTH, rows, num_slots, size, shards)
        matrix_VH = state.merge(params).output_matrix()
        return last_layer.proxy(labels, matrix_VH, perf.vocab_chunk, vocab_shards)

    def extract(params, rows, size):
        num_slots = rows.tokens.shape[0] // shards
        return head(params, body(params, rows), rows, num_slots=num_slots, size=size)

    return extract


def run(
    extractor: Extractor,
    params: Any,
    corpus: datatypes.Corpus,
    where: batches.Windows,
    plan: batches.Plan,
    mesh: Mesh | None,
    perf: config.PerfConfig,
) -> Raw:
    """Runs the pass and returns rows for all N examples (NaN norm: not computed)."""
    total = corpus.num_examples
    norm = np.full(total, np.nan, np.float32)
    loss = np.full(total, np.nan, np.float32)
    unit_ND = None
    with progress.track("features", sum(map(len, plan.example_id)), "rows") as advance:
        outputs = stream(extractor, params, corpus, where, plan, mesh, perf)
        for example_id, raw_BD, loss_B in outputs:
            if unit_ND is None:
                unit_ND = np.zeros((total, raw_BD.shape[1]), np.float32)
            used = example_id >= 0
            chosen = example_id[used]
            unit_ND[chosen], norm[chosen] = unit_rows(raw_BD[used])
            loss[chosen] = loss_B[used]
            advance(len(example_id))
    assert unit_ND is not None
    return Raw(unit_ND, norm, loss)


def stream(
    extractor: Extractor,
    params: Any,
    corpus: datatypes.Corpus,
    where: batches.Windows,
    plan: batches.Plan,
    mesh: Mesh | None,
    perf: config.PerfConfig,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields (example_id [B], raw [B, D], loss [B]) of every batch, on the host."""
    limit = perf.steps_in_flight or (1 if jax.default_backend() == "cpu" else 2)
    pending: collections.deque = collections.deque()
    for example_id, rows, size in batches.batches(corpus, where, plan):
        placed = put(rows, mesh)
        pending.append((example_id, extractor(params, placed, size)))
        while len(pending) >= limit:
            ids, outputs = pending.popleft()
            raw_BD, loss_B = jax.device_get(outputs)
            yield ids, raw_BD, loss_B
    for ids, outputs in pending:
        raw_BD, loss_B = jax.device_get(outputs)
        yield ids, raw_BD, loss_B


def put(rows: batches.Rows, mesh: Mesh | None) -> batches.Rows:
    """Moves rows to the devices, split over the data shards."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, rows)
    sharding = meshes.rows(mesh)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding), rows)


def unit_rows(raw_BD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unit rows and their lengths; a row without direction becomes zero.

    The length is taken after scaling by the largest entry, so that neither 1e-30 nor
    1e30 under- or overflows in float32.
    """
    top = np.abs(raw_BD).max(axis=1, keepdims=True)
    usable = np.isfinite(top) & (top > 0)
    scaled = np.where(usable, raw_BD / np.where(usable, top, 1), 0)
    length = np.linalg.norm(scaled, axis=1, keepdims=True)
    unit = scaled / np.where(usable, length, 1)
    norm = np.where(np.isfinite(top), top * length, np.nan)[:, 0]
    return unit.astype(np.float32), norm.astype(np.float32)


def finish(
    corpus: datatypes.Corpus,
    where: batches.Windows,
    cfg: config.FeaturesConfig,
    model_fingerprint: str,
    raw: Raw,
) -> datatypes.GradientFeatures:
    """Takes out the rejects and centres the rest."""
    no_label = where.num_labels == 0
    bad = ~np.isfinite(raw.norm) | ~np.isfinite(raw.loss)
    zero = ~bad & (raw.norm < MIN_NORM)
    keep = np.flatnonzero(~(no_label | bad | zero))
    rejects = [
        _reject(corpus, int(i), no_label[i], bad[i], float(raw.norm[i]))
        for i in np.flatnonzero(no_label | bad | zero)
    ]
    if not len(keep):
        raise errors.DataError(
            f"none of {corpus.num_examples:,} examples has a usable feature; the"
            f" first: {rejects[0].detail}"
        )
    values = raw.unit_ND[keep]
    if cfg.center == "mean":
        values = centred(values, raw.norm[keep])
    return datatypes.GradientFeatures(
        values=values,
        norm=raw.norm[keep],
        loss=raw.loss[keep],
        num_labels=np.asarray(corpus.num_labels)[keep],
        user_weight=np.asarray(corpus.user_weight)[keep],
        example_id=keep.astype(np.int64),
        uid=np.asarray(corpus.uid)[keep],
        source_id=np.asarray(corpus.source_id)[keep],
        kind=cfg.kind,
        fingerprint=files.hash_arrays(
            corpus.fingerprint, model_fingerprint, config.fingerprint(cfg)
        ),
        corpus_fingerprint=corpus.fingerprint,
        model_fingerprint=model_fingerprint,
        num_corpus=corpus.num_examples,
        source_names=corpus.source_names,
        rejects=tuple(rejects),
    )


def centred(unit_ND: np.ndarray, norm: np.ndarray) -> np.ndarray:
    """Unit rows of the raw features minus their mean (`features.center = mean`)."""
    raw_ND = unit_ND * norm[:, None]
    return unit_rows(raw_ND - raw_ND.mean(axis=0, keepdims=True, dtype=np.float64))[0]


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

"""How well a cheaper pass agrees with the full one, on a sample of examples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from jax.sharding import Mesh

from clusterjax import config as config_lib
from clusterjax import datatypes, files
from clusterjax.features import diagnostics, extraction
from clusterjax.models import decoder, lora

# Features → cluster labels [n]; features → kept uids. The stages never import one
# another, so whoever knows both hands these in.
Cluster = Callable[[datatypes.GradientFeatures], np.ndarray]
Keep = Callable[[datatypes.GradientFeatures], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Two feature sets of the same examples, compared.

    Attributes:
      sample: examples that both have.
      cosine: mean cosine of an example's two features; None when the spaces differ.
      pair_correlation: correlation over pairs of examples of their two cosines.
      rand_index: adjusted Rand index of the two partitions; None without clusters.
      kept_overlap: |A ∩ B| / |A ∪ B| of the kept examples; None without selection.
    """

    sample: int
    cosine: float | None
    pair_correlation: float
    rand_index: float | None
    kept_overlap: float | None


def full_settings(cfg: config_lib.FeaturesConfig) -> config_lib.FeaturesConfig:
    """The same feature without any of the shortcuts."""
    return dataclasses.replace(
        cfg, max_tokens=None, num_layers=None, model="", compute_dtype="float32"
    )


def measure(
    model: decoder.Decoder,
    corpus: datatypes.Corpus,
    cheap: datatypes.GradientFeatures,
    cfg: config_lib.FeaturesConfig,
    mesh: Mesh | None = None,
    *,
    perf: config_lib.PerfConfig | None = None,
    factors: lora.Factors | None = None,
    lora_config: config_lib.LoraConfig | None = None,
    cluster: Cluster | None = None,
    keep: Keep | None = None,
) -> Agreement:
    """Computes the full feature of `cfg.agreement_sample` examples and compares.

    Args:
      model: the full model.
      corpus: of the full model's tokenizer.
      cheap: features from the cheaper pass, of examples with the same uids.
      cfg: settings of the cheaper pass.
      mesh, perf, factors, lora_config: as in `features.compute`.
      cluster, keep: what the features are for, to compare its outcome as well.
    """
    chosen = sample(corpus.num_examples, cfg.agreement_sample, cfg.seed)
    full = extraction.compute(
        model,
        take(corpus, chosen),
        full_settings(cfg),
        mesh,
        perf=perf,
        factors=factors,
        lora_config=lora_config,
    )
    return compare(full, cheap, cluster, keep)


def compare(
    full: datatypes.GradientFeatures,
    cheap: datatypes.GradientFeatures,
    cluster: Cluster | None = None,
    keep: Keep | None = None,
) -> Agreement:
    """Compares two feature sets on the examples that both have, by uid."""
    _, a, b = np.intersect1d(full.uid, cheap.uid, return_indices=True)
    full, cheap = rows(full, a), rows(cheap, b)
    cosine = None
    if full.values.shape == cheap.values.shape and full.kind == cheap.kind:
        cosine = float(np.mean(np.sum(full.values * cheap.values, axis=1)))
    index = overlap = None
    if cluster is not None:
        index = adjusted_rand_index(cluster(full), cluster(cheap))
    if keep is not None:
        first, second = set(keep(full)), set(keep(cheap))
        overlap = len(first & second) / max(len(first | second), 1)
    return Agreement(
        len(a),
        cosine,
        diagnostics.pair_correlation(full.values, cheap.values),
        index,
        overlap,
    )


def adjusted_rand_index(first_N: np.ndarray, second_N: np.ndarray) -> float:
    """Agreement of two partitions: 1 = the same, 0 = chance (Hubert & Arabie 1985)."""
    _, first = np.unique(first_N, return_inverse=True)
    _, second = np.unique(second_N, return_inverse=True)
    table = np.zeros((first.max() + 1, second.max() + 1), np.int64)
    np.add.at(table, (first, second), 1)

    def pairs(counts: np.ndarray) -> float:
        return float(np.sum(counts * (counts - 1) / 2))

    both, a, b = pairs(table), pairs(table.sum(axis=1)), pairs(table.sum(axis=0))
    total = math.comb(len(first), 2)
    expected = a * b / total if total else 0.0
    highest = (a + b) / 2
    return 1.0 if highest == expected else (both - expected) / (highest - expected)


def align(
    feats: datatypes.GradientFeatures, target: datatypes.Corpus
) -> datatypes.GradientFeatures:
    """Moves features to another tokenisation of the same texts, by uid.

    For `features.model`: the smaller model has its own tokenizer, so the texts are read
    again with it; uids are hashes of the text, so they are the same in both corpora.

    Args:
      feats: computed on the smaller model's corpus.
      target: tokenised for the model that is trained.

    Returns:
      Features with the ids and label counts of `target`; its examples without a
      counterpart are rejects.
    """
    places = {uid: n for n, uid in enumerate(feats.uid.tolist())}
    uids = np.asarray(target.uid).tolist()
    found = np.array([places.get(uid, -1) for uid in uids], np.int64)
    keep = np.flatnonzero(found >= 0)
    rejects = tuple(
        datatypes.Reject(
            source=target.source_names[int(target.source_id[i])],
            row=int(target.row[i]),
            reason="no_feature",
            detail=f"example {i} ({target.uid[i]}): the smaller model's pass has none",
            uid=str(target.uid[i]),
        )
        for i in np.flatnonzero(found < 0)
    )
    return dataclasses.replace(
        rows(feats, found[keep]),
        num_labels=np.asarray(target.num_labels)[keep],
        user_weight=np.asarray(target.user_weight)[keep],
        example_id=keep,
        uid=np.asarray(target.uid)[keep],
        source_id=np.asarray(target.source_id)[keep],
        source_names=target.source_names,
        fingerprint=files.hash_arrays(feats.fingerprint, target.fingerprint),
        corpus_fingerprint=target.fingerprint,
        num_corpus=target.num_examples,
        rejects=rejects,
    )


def rows(
    feats: datatypes.GradientFeatures, chosen: np.ndarray
) -> datatypes.GradientFeatures:
    """Some of the features, in the order of `chosen`."""
    names = (
        "values",
        "norm",
        "loss",
        "num_labels",
        "user_weight",
        "example_id",
        "uid",
        "source_id",
    )
    return dataclasses.replace(
        feats, **{name: np.asarray(getattr(feats, name)[chosen]) for name in names}
    )


def sample(count: int, size: int, seed: int) -> np.ndarray:
    """`size` of `count` row numbers without replacement, ascending."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(count, min(size, count), replace=False))


def take(corpus: datatypes.Corpus, chosen: np.ndarray) -> datatypes.Corpus:
    """Some of the examples as a corpus of its own; uids and rows stay."""
    lengths = corpus.lengths[chosen]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    place = np.repeat(np.asarray(corpus.offsets)[chosen] - offsets[:-1], lengths)
    place = place + np.arange(offsets[-1])
    per_example = (
        "num_labels",
        "user_weight",
        "source_id",
        "row",
        "content_hash",
        "uid",
    )
    return dataclasses.replace(
        corpus,
        tokens=np.asarray(corpus.tokens)[place],
        label_mask=np.asarray(corpus.label_mask)[place],
        offsets=offsets,
        group=None if corpus.group is None else corpus.group[chosen],
        fingerprint=files.hash_arrays(corpus.fingerprint, np.asarray(chosen, np.int64)),
        rejects=(),
        num_read=len(chosen),
        **{name: np.asarray(getattr(corpus, name))[chosen] for name in per_example},
    )


def sketches(
    model: decoder.Decoder,
    corpus: datatypes.Corpus,
    mesh: Mesh | None = None,
    *,
    seed: int,
    k: int = 8,
    perf: config_lib.PerfConfig | None = None,
) -> datatypes.GradientFeatures:
    """Whole-model gradient sketches, k × k for every matrix, to judge features by.

    Args:
      seed: another one than that of the features which are judged.
    """
    cfg = config_lib.FeaturesConfig(kind="probe", k_in=k, k_out=k, seed=seed)
    return extraction.compute(model, corpus, cfg, mesh, perf=perf)

"""The feature pass of a run: by which model, how good, and what it is worth."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from etils import epath

from clusterjax import (
    clustering,
    data,
    datatypes,
    errors,
    features,
    models,
    selection,
    step,
    subset,
)
from clusterjax import config as config_lib
from clusterjax.features import agreement


def compute(
    model: Any,
    corpus: datatypes.Corpus,
    config: config_lib.Config,
    mesh: jax.sharding.Mesh,
    folder: epath.Path,
) -> datatypes.GradientFeatures:
    """Features of `corpus` by the trained model, or by the one of `features.model`.

    A smaller model has its own tokenizer: the texts are read again with it, and the
    features are mapped back by uid.

    Raises:
      errors.ConfigError: settings that can't work together.
    """
    store = config.features.store_dir or folder / "store"
    if not config.features.model:
        return features.compute(
            model,
            corpus,
            config.features,
            mesh,
            perf=config.perf,
            directory=store,
            **adapters(model, config),
        )
    tokenizer, smaller = models.load(
        config.features.model,
        mesh=mesh,
        compute_dtype=config.features.compute_dtype or config.model.compute_dtype,
        allow_replication=config.mesh.allow_replication,
    )
    texts = data.load(config.data, tokenizer, directory=folder / "data")
    found = features.compute(
        smaller,
        texts,
        config.features,
        mesh,
        perf=config.perf,
        directory=store,
        **adapters(smaller, config),
    )
    return features.align(found, corpus)


def adapters(model: Any, config: config_lib.Config) -> dict[str, Any]:
    """LoRA factors for `features.compute` where `per_example` looks at adapters.

    They are those that training starts from. Their B is zero, so the model is the plain
    one for the other kinds, which look at the matrices themselves.

    Raises:
      errors.ConfigError: the features of adapters are to be renewed on the way.
    """
    cfg = config.model.lora
    if not cfg.rank or config.features.kind != "per_example":
        return {}
    if config.selection.refresh_every:
        raise errors.ConfigError(
            "features.kind='per_example' with model.lora.rank looks at the adapters"
            " that training starts from, and selection.refresh_every asks for features"
            " of trained ones: leave it out, or choose features.kind='probe'"
        )
    template = step.template(model.config)
    _, factors = step.with_lora(template, cfg)
    return {"factors": step.lora_factors(factors), "lora_config": cfg}


def figures(
    model: Any,
    corpus: datatypes.Corpus,
    feats: datatypes.GradientFeatures,
    clusters: datatypes.Clustering | None,
    config: config_lib.Config,
    mesh: jax.sharding.Mesh,
) -> dict[str, Any]:
    """Diagnostics; with their samples set, agreement and worth (METHOD §1 and §7)."""
    result: dict[str, Any] = {
        "diagnostics": dataclasses.asdict(features.diagnose(feats))
    }
    if config.features.agreement_sample:
        found = features.measure(
            model,
            corpus,
            feats,
            config.features,
            mesh,
            perf=config.perf,
            **adapters(model, config),
            cluster=lambda some: partition(some, config, mesh).cluster_id,
            keep=lambda some: keep(some, config, mesh),
        )
        result["agreement"] = dataclasses.asdict(found)
    if config.features.worth_sample:
        result["worth"] = _worth(model, corpus, feats, clusters, config, mesh)
    return result


def partition(
    feats: datatypes.GradientFeatures,
    config: config_lib.Config,
    mesh: jax.sharding.Mesh,
) -> datatypes.Clustering:
    """Clusters as k-means finds them, without floor or cache."""
    # A sample has small clusters: they are compared as they are.
    cfg = dataclasses.replace(config.clustering, min_cluster_size=0)
    return clustering.fit(feats, cfg, mesh, jax.random.key(cfg.seed))


def keep(
    feats: datatypes.GradientFeatures,
    config: config_lib.Config,
    mesh: jax.sharding.Mesh,
) -> np.ndarray:
    """Uids of what `selection.method=cluster` keeps of such clusters."""
    cfg = dataclasses.replace(
        config.selection, method="cluster", min_kept_fraction=0.0, num_kept=None
    )
    clusters = partition(feats, config, mesh)
    return selection.select(clusters, feats, cfg, subset_rules=subset).uid


def _worth(
    model: Any,
    corpus: datatypes.Corpus,
    feats: datatypes.GradientFeatures,
    clusters: datatypes.Clustering | None,
    config: config_lib.Config,
    mesh: jax.sharding.Mesh,
) -> dict[str, Any]:
    """Judged by sketches with another seed than the one that chose."""
    seed = config.features.seed + 1
    places = agreement.sample(len(feats.uid), config.features.worth_sample, seed)
    some = features.take(corpus, feats.example_id[places])
    sketch = features.sketches(model, some, mesh, seed=seed, perf=config.perf)
    _, ours, theirs = np.intersect1d(feats.uid[places], sketch.uid, return_indices=True)
    labels = None if clusters is None else clusters.cluster_id[places[ours]]
    raw = features.raw(agreement.rows(sketch, theirs))
    found = features.worth(feats.values[places[ours]], raw, labels)
    return {**dataclasses.asdict(found), "sketch_seed": seed}

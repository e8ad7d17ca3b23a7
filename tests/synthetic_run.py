"""A small run made in memory: text bytes as tokens, clusters of Gaussian blobs."""

from __future__ import annotations

import dataclasses

import numpy as np
from etils import epath

from clusterjax import allocation, config, datatypes, selection
from experiments import report, saved_run
from experiments.report import record as record_lib

SOURCES = ("json", "collections", "skills & <tricks>")
FAMILIES = ("sort a list", "reverse <b>text</b>", "convert units")
INJECTION = "<script>alert('x')</script>"


class ByteTokenizer:
    """One token per byte."""

    def decode(self, ids) -> str:
        return bytes(int(i) for i in ids).decode("utf8", "replace")


def corpus(
    num_examples: int, rng: np.random.Generator, *, weighted: bool = False
) -> datatypes.Corpus:
    """Examples of uneven lengths; prompts hold markup that must be escaped."""
    family = rng.integers(0, len(FAMILIES), num_examples)
    texts = [
        (
            f"Please {FAMILIES[family[i]]}, number {i}. {INJECTION}\n",
            "result = " + " + ".join("x" * int(rng.integers(1, 30))),
        )
        for i in range(num_examples)
    ]
    pieces = [(p.encode(), a.encode()) for p, a in texts]
    tokens = [np.frombuffer(p + a, np.uint8) for p, a in pieces]
    mask = [np.arange(len(p) + len(a)) >= len(p) for p, a in pieces]
    source_id = rng.choice(len(SOURCES), num_examples, p=[0.6, 0.3, 0.1])
    uid = [f"{SOURCES[s]}:{i}:{i:08x}" for i, s in enumerate(source_id)]
    weight = rng.uniform(0.5, 2, num_examples) if weighted else np.ones(num_examples)
    return datatypes.Corpus(
        tokens=np.concatenate(tokens).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum([len(t) for t in tokens])]),
        label_mask=np.concatenate(mask),
        num_labels=np.array([m.sum() for m in mask], np.int32),
        user_weight=weight.astype(np.float32),
        source_id=source_id.astype(np.int32),
        source_names=SOURCES,
        row=np.arange(num_examples),
        content_hash=np.zeros((num_examples, 2), np.uint64),
        uid=np.array(uid),
        fingerprint="corpus-fingerprint",
        group=family.astype(np.int32),
        group_names=FAMILIES,
        rejects=(
            datatypes.Reject("json", 900, "no_label_tokens", "600 prompt tokens", "r9"),
        ),
        num_read=num_examples + 1,
    )


def features(
    examples: datatypes.Corpus, num_clusters: int, rng: np.random.Generator
) -> tuple[datatypes.GradientFeatures, datatypes.Clustering]:
    """Unit features in blobs of uneven sizes, and those blobs as clusters."""
    count, width = examples.num_examples, 24
    centers = rng.standard_normal((num_clusters, width))
    size = np.arange(1, num_clusters + 1)
    label = rng.choice(num_clusters, count, p=size / size.sum())
    label[:num_clusters] = np.arange(num_clusters)
    values = centers[label] + 0.7 * rng.standard_normal((count, width))
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    centroids = np.stack([values[label == c].mean(0) for c in range(num_clusters)])
    distance = ((values - centroids[label]) ** 2).sum(1)
    feats = datatypes.GradientFeatures(
        values=values.astype(np.float32),
        norm=rng.lognormal(size=count).astype(np.float32),
        loss=rng.gamma(3, 0.8, count).astype(np.float32),
        num_labels=examples.num_labels,
        user_weight=examples.user_weight,
        example_id=np.arange(count),
        uid=examples.uid,
        source_id=examples.source_id,
        kind="proxy",
        fingerprint="features-fingerprint",
        corpus_fingerprint=examples.fingerprint,
        model_fingerprint="model-fingerprint",
        num_corpus=count,
        source_names=SOURCES,
    )
    sizes = np.bincount(label, minlength=num_clusters)
    clusters = datatypes.Clustering(
        cluster_id=label.astype(np.int32),
        centroids=centroids.astype(np.float32),
        distance=distance.astype(np.float32),
        inertia=float(distance.sum()),
        num_iterations=7,
        converged=True,
        kmeans_sizes=np.concatenate([sizes, [3]]),
        floor_sizes=sizes,
        capacity=int(sizes.max()),
        fingerprint="clusters-fingerprint",
    )
    return feats, clusters


def metrics(num_steps: int) -> list[dict]:
    """Lines as the trainer writes them."""

    def evaluation(step: int, loss: float) -> dict:
        parts = {name: {"loss": loss + 0.1 * i} for i, name in enumerate(SOURCES)}
        values = {"loss": loss, "sources": parts, "time": 1.0 * step}
        return {"step": step, "kind": "eval", **values}

    def train(step: int) -> dict:
        clusters = {str(c): {"loss": 3 / step + c, "labels": 9} for c in range(4)}
        values = {"loss": 3 / step + 1, "labels": 100 * step, "time": 1.0 * step}
        values["clusters"] = clusters
        return {"step": step, "kind": "train", **values}

    lines = [train(step) for step in range(1, num_steps + 1)]
    return [evaluation(0, 4.0), *lines, evaluation(num_steps, 2.0)]


def saved(
    num_examples: int = 300,
    num_clusters: int = 4,
    *,
    num_shards: int = 4,
    weighted: bool = False,
    selection_keys: dict | None = None,
    allocation_keys: dict | None = None,
) -> saved_run.SavedRun:
    """A run up to its schedule."""
    rng = np.random.default_rng(0)
    examples = corpus(num_examples, rng, weighted=weighted)
    feats, clusters = features(examples, num_clusters, rng)
    cfg = config.Config(
        selection=config.SelectionConfig(**(selection_keys or {})),
        allocation=config.AllocationConfig(batch_size=16, **(allocation_keys or {})),
    )
    plan = selection.select(clusters, feats, cfg.selection, corpus=examples)
    schedule = allocation.allocate(
        plan, examples.lengths, examples.num_labels, cfg.allocation, feats=feats
    )
    return saved_run.SavedRun(
        epath.Path("nowhere"),
        cfg,
        ByteTokenizer(),  # pyright: ignore[reportArgumentType]
        examples,
        feats,
        clusters,
        plan,
        schedule,
        num_shards,
    )


def record(run: saved_run.SavedRun, **changes) -> report.RunRecord:
    """What the report shows of `run`."""
    assert run.schedule is not None
    ledger = [
        {"stage": "data", "seconds": 2.0, "detail": "300 examples"},
        {"stage": "features", "seconds": 6.0, "detail": "300 × 24 proxy"},
        {"stage": "cluster", "seconds": 1.5, "detail": "K = 4"},
        {"stage": "select", "seconds": 0.5, "detail": ""},
        {"stage": "train", "seconds": 90.0, "detail": ""},
    ]
    made = report.RunRecord(
        config=run.config,
        corpus=run.corpus,
        tokenizer=run.tokenizer,
        feats=run.feats,
        clusters=run.clusters,
        plan=run.plan,
        schedule=run.schedule,
        layout=record_lib.Layout(run.num_shards, 1),
        metrics=metrics(run.schedule.num_steps),
        ledger=ledger,
        environment={"versions": {"clusterjax": "0.1.0"}},
        data_report={"truncated": 3},
    )
    return dataclasses.replace(made, **changes)

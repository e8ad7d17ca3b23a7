"""One run, from text to report: the only place that knows the order of the stages.

    python -m experiments.run --config configs/quickstart.py --workdir runs/a

Data → gradient features → clusters → plan → schedule → weighted training → report.
A second start with the same --workdir goes on where the first one stopped.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import numpy as np
from etils import epath

from clusterjax import (
    allocation,
    clustering,
    data,
    datatypes,
    errors,
    features,
    files,
    mesh as mesh_lib,
    models,
    progress,
    selection,
    subset,
    train,
)
from clusterjax import config as config_lib
from experiments import artifacts, command_line, ledger as ledger_lib, report, workdir

STAGES = ("data", "features", "cluster", "select", "train", "report")
_METHODS_WITH_CLUSTERS = ("cluster", "stratified")
_METHODS_WITHOUT_FEATURES = ("full", "random")


@dataclasses.dataclass
class Run:
    """The values of one run, filled stage by stage."""

    config: config_lib.Config
    folder: epath.Path
    ledger: ledger_lib.Ledger
    mesh: jax.sharding.Mesh
    tokenizer: Any = None
    model: Any = None
    corpus: datatypes.Corpus | None = None
    eval_corpus: datatypes.Corpus | None = None
    features: datatypes.GradientFeatures | None = None
    clusters: datatypes.Clustering | None = None
    plan: Any = None
    schedule: Any = None
    result: Any = None
    summary: dict[str, Any] = dataclasses.field(default_factory=dict)


def execute(
    config: config_lib.Config, folder: epath.PathLike, *, overwrite: bool = False
) -> Run:
    """Runs the stages up to `config.stages` in the run folder `folder`.

    Raises:
      errors.UserError: a mistake in config, data or folder; raised before the feature
        pass starts.
    """
    mesh = mesh_lib.build(config.mesh)
    with workdir.opened(folder, config, overwrite=overwrite) as opened:
        run = Run(config, opened, ledger_lib.Ledger(opened), mesh)
        last = config.stages if config.stages != "all" else STAGES[-1]
        for name in STAGES[: STAGES.index(last) + 1]:
            _STAGE_FUNCTIONS[name](run)
    return run


def _load(run: Run) -> None:
    config = run.config
    with run.ledger.stage("data") as entry:
        run.tokenizer, run.model = models.load(
            config.model.path, dtype=config.model.param_dtype, mesh=run.mesh
        )
        folder = run.folder / "data"
        run.corpus = data.load(config.data, run.tokenizer, directory=folder)
        run.eval_corpus = data.load_eval(config.data, run.tokenizer, directory=folder)
        entry.detail = (
            f"{run.corpus.num_examples:,} examples of {run.corpus.num_read:,} rows,"
            f" {len(run.corpus.tokens):,} tokens"
        )
    _check_sizes(config, run.corpus)


def _check_sizes(config: config_lib.Config, corpus: datatypes.Corpus) -> None:
    """Stops what can't work before the feature pass."""
    valid = corpus.num_examples
    if (
        config.selection.method in _METHODS_WITH_CLUSTERS
        and config.clustering.num_clusters > valid
    ):
        raise errors.ConfigError(
            f"clustering.num_clusters={config.clustering.num_clusters} is more than the"
            f" {valid:,} valid examples ({corpus.num_read:,} read,"
            f" {len(corpus.rejects):,} rejected: see data/rejects.jsonl); lower it, or"
            " look at the rejects"
        )


def _needs_features(config: config_lib.Config) -> bool:
    return (
        config.selection.method not in _METHODS_WITHOUT_FEATURES
        or config.allocation.order == "herded"
    )


def _saved_plan(run: Run) -> Any:
    """The plan that an earlier start left, if it belongs to this data."""
    if run.plan is not None or not selection.SelectionPlan.exists(run.folder / "plan"):
        return run.plan
    run.plan = selection.SelectionPlan.load(run.folder / "plan")
    if run.plan.corpus_fingerprint != run.corpus.fingerprint:
        raise errors.PlanError(
            f"{run.folder / 'plan'} was made from other data (fingerprint"
            f" {run.plan.corpus_fingerprint} there, {run.corpus.fingerprint} now); use"
            " another --workdir, or move the run away with --overwrite"
        )
    return run.plan


def _compute_features(run: Run) -> None:
    if not _needs_features(run.config):
        return
    folder = run.folder / "features"
    if _saved_plan(run) is not None and (folder / "features.npz").exists():
        run.features = artifacts.load_features(folder)
        return
    with run.ledger.stage("features") as entry:
        run.features = features.compute(
            run.model,
            run.corpus,
            run.config.features,
            run.mesh,
            perf=run.config.perf,
            directory=run.config.features.store_dir or folder / "store",
        )
        artifacts.save_features(run.features, folder)
        count, width = run.features.values.shape
        entry.detail = (
            f"{count:,} × {width:,} {run.features.kind},"
            f" {len(run.features.rejects):,} rejected"
        )


def _cluster(run: Run) -> None:
    config = run.config
    if config.selection.method not in _METHODS_WITH_CLUSTERS:
        return
    if _saved_plan(run) is not None:
        run.clusters = artifacts.load_clustering(run.folder / "plan")
        return
    with run.ledger.stage("cluster") as entry:
        key = jax.random.key(config.seed + config.clustering.seed)
        run.clusters = clustering.fit(
            run.features, config.clustering, run.mesh, key, perf=config.perf
        )
        artifacts.save_clustering(run.clusters, run.folder / "plan")
        sizes = ", ".join(f"{n:,}" for n in run.clusters.sizes)
        entry.detail = f"K = {run.clusters.num_clusters}, sizes {sizes}"


def _select(run: Run) -> None:
    config = run.config
    if _saved_plan(run) is None:
        with run.ledger.stage("select") as entry:
            run.plan = selection.select(
                run.clusters,
                run.features,
                dataclasses.replace(
                    config.selection, seed=config.seed + config.selection.seed
                ),
                corpus=run.corpus,
                rules=subset,
            )
            run.plan.save(run.folder / "plan")
            entry.detail = _kept(run)
    with run.ledger.stage("schedule") as entry:
        run.schedule = allocation.allocate(
            run.plan,
            run.corpus.lengths,
            run.corpus.num_labels,
            dataclasses.replace(
                config.allocation, seed=config.seed + config.allocation.seed
            ),
            feats=run.features,
        )
        entry.detail = f"{run.schedule.num_steps:,} steps"


def _kept(run: Run) -> str:
    kept, all_examples = len(run.plan.example_id), run.corpus.num_examples
    return f"kept {kept:,} of {all_examples:,} ({kept / all_examples:.1%})"


def _train(run: Run) -> None:
    config = run.config
    with run.ledger.stage("train") as entry:
        run.result = train.fit(
            run.model,
            run.corpus,
            run.schedule,
            config.train,
            run.mesh,
            run.folder,
            tokenizer=run.tokenizer,
            eval_corpus=run.eval_corpus,
            model_cfg=config.model,
            eval_cfg=config.eval,
            perf=config.perf,
            report=config.report,
        )


def _report(run: Run) -> None:
    with run.ledger.stage("report"):
        report.write(run)


_STAGE_FUNCTIONS = {
    "data": _load,
    "features": _compute_features,
    "cluster": _cluster,
    "select": _select,
    "train": _train,
    "report": _report,
}


def main() -> int | None:
    config = command_line.resolved_config()
    if not command_line.WORKDIR.value:
        raise errors.WorkdirError("no --workdir given; try --workdir runs/a")
    execute(config, command_line.WORKDIR.value, overwrite=command_line.OVERWRITE.value)


if __name__ == "__main__":
    command_line.run(main, __doc__)

"""One run, from text to report: the only place that knows the order of the stages.

    python -m experiments.run --config configs/quickstart.py --workdir runs/a

Data → gradient features → clusters → plan → schedule → weighted training → report.
A second start with the same --workdir goes on where the first one stopped.
"""

from __future__ import annotations

import dataclasses
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
    exact_match,
    faults,
    features,
    files,
    models,
    progress,
    selection,
    subset,
)
from clusterjax import config as config_lib
from clusterjax import mesh as mesh_lib
from clusterjax import plan as plans
from experiments import (
    artifacts,
    command_line,
    feature_pass,
    first_epoch,
    hosts,
    renewal,
    report,
    saved_run,
    workdir,
)
from experiments import ledger as ledger_lib
from experiments.report import record as record_lib

STAGES = ("data", "features", "cluster", "select", "train", "report")
_METHODS_WITH_CLUSTERS = ("cluster", "stratified", "uniform")
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
    corpus: datatypes.Corpus = dataclasses.field(init=False)
    eval_corpus: datatypes.Corpus | None = None
    features: Any = None
    clusters: Any = None
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
    first_epoch.check(config)
    if config.mesh.num_simulated_devices is not None:
        mesh_lib.simulate(config.mesh.num_simulated_devices)
    if config.perf.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", config.perf.compilation_cache)
    mesh = mesh_lib.build(config.mesh)
    for text in config_lib.cautions(config):
        progress.say(f"caution: {text}")
    with workdir.opened(folder, config, overwrite=overwrite) as opened:
        run = Run(config, opened, ledger_lib.Ledger(opened), mesh)
        last = config.stages if config.stages != "all" else STAGES[-1]
        for name in STAGES[: STAGES.index(last) + 1]:
            faults.point(f"stage.{name}")
            _STAGE_FUNCTIONS[name](run)
    return run


def _load(run: Run) -> None:
    config = run.config
    with run.ledger.stage("data") as entry:
        run.tokenizer, run.model = models.load(
            config.model.path,
            config.model.param_dtype,
            run.mesh,
            compute_dtype=config.model.compute_dtype,
            remat=config.perf.remat,
            allow_replication=config.mesh.allow_replication,
        )
        folder = run.folder / "data"
        run.corpus = data.load(config.data, run.tokenizer, directory=folder)
        run.eval_corpus = data.load_eval(config.data, run.tokenizer, directory=folder)
        entry.detail = (
            f"{run.corpus.num_examples:,} examples of {run.corpus.num_read:,} rows,"
            f" {len(run.corpus.tokens):,} tokens"
        )
    hosts.require_same_inputs(config, run.corpus, run.eval_corpus)
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


def _saved_plan(run: Run) -> plans.SelectionPlan | None:
    """The plan that an earlier start left, if it belongs to this data."""
    folder = run.folder / "plan"
    if run.plan is None and (folder / "plan.json").exists():
        run.plan = plans.SelectionPlan.load(folder)
        there, here = run.plan.fingerprints["data"], run.corpus.fingerprint
        if there != here:
            raise errors.PlanError(
                f"{folder} was made from other data (fingerprint {there} there, {here}"
                " now); use another --workdir, or move the run away with --overwrite"
            )
    return run.plan


def _compute_features(run: Run) -> None:
    if not _needs_features(run.config):
        return
    folder = run.folder / "features"
    if _saved_plan(run) is not None and (folder / "features.npz").exists():
        run.features = artifacts.load_features(folder)
        return
    trained = None
    if run.config.features.during_first_epoch:
        trained = first_epoch.collect(run)
    with run.ledger.stage("features") as entry:
        run.features = (
            first_epoch.features_of(run, trained)
            if trained is not None
            else feature_pass.compute(
                run.model, run.corpus, run.config, run.mesh, folder
            )
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
                subset_rules=subset,
                target=_target_features(run),
            )
            run.plan.save(run.folder / "plan")
            entry.detail = _kept(run)
        if run.features is not None:
            _judge_features(run)
    with run.ledger.stage("schedule") as entry:
        run.schedule = allocation.allocate(
            run.plan,
            run.corpus.lengths,
            run.corpus.num_labels,
            first_epoch.later_allocation(config, run.corpus.num_examples),
            feats=run.features,
            herd=subset.herded_order,
        )
        if run.schedule.plan is not run.plan:  # it now holds the herded order
            run.plan = run.schedule.plan
            run.plan.save(run.folder / "plan")
        entry.detail = f"{run.schedule.num_steps:,} steps"
    figures = allocation.measure(
        run.schedule, mesh_lib.num_shards(run.mesh), feats=run.features
    )
    for line in figures.lines():
        progress.say(f"  {line}")


def _judge_features(run: Run) -> None:
    with run.ledger.stage("figures") as entry:
        found = feature_pass.figures(
            run.model, run.corpus, run.features, run.clusters, run.config, run.mesh
        )
        if jax.process_index() == 0:
            files.write_json(run.folder / "features" / "figures.json", found)
        rank = found["diagnostics"]["effective_rank"]
        entry.detail = f"effective rank {rank:,.1f}: see features/figures.json"


def _target_features(run: Run) -> datatypes.GradientFeatures | None:
    """Features of the held-out source that `selection.method=target` aims at."""
    config = run.config
    if config.selection.method != "target":
        return None
    names = run.eval_corpus.source_names if run.eval_corpus is not None else ()
    wanted = config.selection.target_source
    if run.eval_corpus is None or wanted not in names:
        raise errors.ConfigError(
            f"selection.target_source={wanted!r} is not a held-out source; there are"
            f" {', '.join(names) or 'none'} (data.eval_sources)"
        )
    found = features.compute(
        run.model,
        run.eval_corpus,
        config.features,
        run.mesh,
        perf=config.perf,
        **feature_pass.adapters(run.model, config),
    )
    keep = found.source_id == names.index(wanted)
    arrays = {
        field.name: getattr(found, field.name)[keep]
        for field in dataclasses.fields(found)
        if isinstance(getattr(found, field.name), np.ndarray)
    }
    return dataclasses.replace(found, **arrays)


def _kept(run: Run) -> str:
    kept, all_examples = len(run.plan.example_id), run.corpus.num_examples
    return f"kept {kept:,} of {all_examples:,} ({kept / all_examples:.1%})"


def _train(run: Run) -> None:
    with run.ledger.stage("train") as entry:
        run.result = renewal.train_all(run, _compute_features, _cluster, _select)
        trained = [line for line in run.result.history if line["kind"] == "train"]
        entry.detail = (
            f"{_num_steps(run):,} steps, {trained[-1]['tokens']:,} tokens,"
            f" {trained[-1]['labels']:,} of them labels"
        )
    _answer(run)


def _answer(run: Run) -> None:
    """Exact match of the trained model, when asked for."""
    if run.eval_corpus is None or not run.config.eval.exact_match:
        return
    with run.ledger.stage("answers") as entry:
        found = exact_match.measure(
            run.result.model,
            run.eval_corpus,
            run.tokenizer,
            run.config.eval,
            mesh_lib.replicated(run.mesh),
        )
        run.result.final_eval = {**run.result.final_eval, **found}
        entry.detail = f"{found['exact_match_examples']:,} prompts"


def _num_steps(run: Run) -> int:
    first = first_epoch.num_steps(run.config, run.corpus.num_examples)
    return first + run.schedule.num_steps


def _summarise(run: Run) -> dict[str, Any]:
    """What came out, in numbers; written to `summary.json`."""
    kept, count = len(np.unique(run.plan.example_id)), run.corpus.num_examples
    seconds = {entry.stage: round(entry.seconds, 3) for entry in run.ledger.entries}
    first, last = run.result.initial_eval, run.result.final_eval
    summary = {
        "method": run.config.selection.method,
        "num_examples": count,
        "num_kept": kept,
        "kept_fraction": kept / count,
        "num_clusters": run.plan.num_clusters,
        "num_steps": _num_steps(run),
        "initial_eval": first,
        "final_eval": last,
        "seconds_by_stage": seconds,
        "seconds_total": round(run.ledger.total, 3),
        "processor_seconds_by_stage": {
            entry.stage: round(entry.processor_seconds, 3)
            for entry in run.ledger.entries
        },
        "train_seconds_by_part": run.result.seconds,
        "config_fingerprint": config_lib.fingerprint(run.config),
        "plan_fingerprint": run.plan.fingerprint,
    }
    if first and last:
        summary["loss_fall"] = 1 - last["loss"] / first["loss"]
    return summary


def _report(run: Run) -> None:
    if jax.process_index() != 0:
        return
    run.summary = _summarise(run)
    files.write_json(run.folder / "summary.json", run.summary)
    if run.config.report.html:
        with run.ledger.stage("report") as entry:
            path = run.folder / "report.html"
            report.write(_record(run), path)
            entry.detail = str(path)
    _say_result(run.summary)


def _record(run: Run) -> report.RunRecord:
    return report.RunRecord(
        config=run.config,
        corpus=run.corpus,
        tokenizer=run.tokenizer,
        feats=run.features,
        clusters=run.clusters,
        plan=run.plan,
        schedule=run.schedule,
        layout=record_lib.Layout(
            mesh_lib.num_shards(run.mesh), run.config.allocation.accumulation_steps
        ),
        metrics=run.result.history,
        ledger=[dataclasses.asdict(entry) for entry in run.ledger.entries],
        summary=run.summary,
        environment=files.read_json(run.folder / "environment.json"),
        data_report=files.read_json(run.folder / "data" / "report.json"),
        feature_figures=saved_run.read_json(run.folder / "features" / "figures.json"),
    )


def _say_result(summary: dict[str, Any]) -> None:
    first, last = summary["initial_eval"], summary["final_eval"]
    losses = (
        f"; held-out loss {first['loss']:.4f} → {last['loss']:.4f}"
        f" ({-summary['loss_fall']:+.1%})"
        if first and last
        else ""
    )
    progress.say(
        f"done: kept {summary['num_kept']:,} of {summary['num_examples']:,} examples"
        f" ({summary['kept_fraction']:.1%}){losses}; {summary['seconds_total']:,.0f} s"
        " with selection"
    )


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
    command_line.run(main, __doc__ or "")

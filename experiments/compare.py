"""Methods × seeds × budgets from one config: runs, one table, figures.

    python -m experiments.compare --config configs/compare_quickstart.py \
        --workdir runs/compare_quickstart

Every run has its own folder and process. A second start goes on where the first one
stopped; finished runs are not repeated. Writes results.json, table.md and compare.html.
Total times include the selection, also where a run could reuse what another one had
computed already. Compiled programs are kept for the next run, as a second run on any
machine would find them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import shlex
import subprocess
import sys
from typing import Any

import numpy as np

from clusterjax import config as config_lib
from clusterjax import errors, files
from clusterjax import plan as plan_lib
from experiments import comparison, comparison_page, grid, history, mechanism, saved_run

# Stages whose result a later run may find: their first cost counts in each of them.
SHARED_STAGES = {
    "data": ("data", "model"),
    "features": ("data", "model", "features"),
}


@dataclasses.dataclass
class Runner:
    """Runs the trials of one comparison."""

    comparison: grid.Comparison
    workdir: pathlib.Path

    def run_all(self) -> list[comparison.Row]:
        """Runs what is not finished; returns a row for each trial.

        Raises:
          errors.UserError: a run failed; its last lines are shown.
        """
        finished: list[tuple[grid.Trial, pathlib.Path]] = []
        sizes: dict[int, tuple[int, float]] = {}
        planned = grid.trials(self.comparison)
        for number, trial in enumerate(planned, 1):
            if trial.seed in sizes:
                trial = grid.with_size(trial, self.comparison, *sizes[trial.seed])
            folder = self._run(trial, f"{number} of {len(planned)}")
            if trial.method == self.comparison.budget_of:
                kind = self.comparison.budget_kind
                sizes[trial.seed] = _size(folder, kind)
            finished.append((trial, folder))
        rows = [self._row(trial, folder) for trial, folder in finished]
        return with_shared_seconds(rows)

    def _run(self, trial: grid.Trial, number: str) -> pathlib.Path:
        config = grid.trial_config(self.comparison, trial)
        own = self.workdir / trial.name
        for folder in (own, *map(pathlib.Path, self.comparison.finished)):
            if _is_finished(folder, config):
                print(f"[{number}] {trial.name}: finished in {folder}", flush=True)
                return folder
        command = self._command(trial)
        print(f"[{number}] {trial.name}: {shlex.join(command)}", flush=True)
        own.mkdir(parents=True, exist_ok=True)
        with open(own / "log.txt", "a", encoding="utf-8") as log:
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT)
        if done.returncode:
            tail = (own / "log.txt").read_text(encoding="utf-8").splitlines()[-12:]
            raise errors.UserError(
                f"run {trial.name} ended with code {done.returncode}; the last lines of"
                f" {own / 'log.txt'}:\n" + "\n".join(tail)
            )
        summary = files.read_json(own / "summary.json")
        loss = summary["final_eval"]["loss"]
        print(
            f"    held-out loss {loss:.4f}, kept {summary['num_kept']:,},"
            f" {summary['seconds_total']:,.0f} s",
            flush=True,
        )
        return own

    def _command(self, trial: grid.Trial) -> list[str]:
        return [
            sys.executable,
            "-m",
            "experiments.run",
            f"--config={self.comparison.base}",
            f"--workdir={self.workdir / trial.name}",
            *grid.arguments(trial),
            f"--config.data.cache_dir={self.workdir / 'shared' / 'corpora'}",
            f"--config.features.store_dir={self.workdir / 'shared' / 'features'}",
            f"--config.perf.compilation_cache={self.workdir / 'shared' / 'programs'}",
        ]

    def _row(self, trial: grid.Trial, folder: pathlib.Path) -> comparison.Row:
        run = saved_run.load(folder)
        assert run.plan is not None and run.schedule is not None
        ledger = files.read_json(folder / "ledger.json")
        metrics = saved_run.read_lines(run.folder / "metrics.jsonl")
        points = history.build(metrics, ledger)
        summary = files.read_json(folder / "summary.json")
        fingerprints = {
            stage: _result_fingerprint(run.config, *groups)
            for stage, groups in SHARED_STAGES.items()
        }
        found = mechanism.figures(run) if self.comparison.mechanism else {}
        return comparison.Row(
            method=trial.method,
            seed=trial.seed,
            budget=trial.budget,
            command=shlex.join(self._command(trial)[1:]),
            folder=os.fspath(folder),
            kept=int(summary["num_kept"]),
            examples=int(summary["num_examples"]),
            kept_labels=int(run.plan.num_labels[run.plan.copies > 0].sum()),
            steps=int(summary["num_steps"]),
            stages=summary["seconds_by_stage"],
            processor_stages=summary.get("processor_seconds_by_stage", {}),
            fingerprints=fingerprints,
            heldout=[dataclasses.asdict(point) for point in points.heldout],
            exact_match=_exact_match(summary["final_eval"]),
            coverage=mechanism.kept_coverage(run),
            purity=mechanism.cluster_purity(run),
            mechanism=found,
        )


def _is_finished(folder: pathlib.Path, config: config_lib.Config) -> bool:
    if not (folder / "summary.json").exists():
        return False
    try:
        made = saved_run.read_config(folder)
    except errors.ConfigError:
        return False  # left by a version with other keys
    return _result_fingerprint(made) == _result_fingerprint(config)


def _result_fingerprint(config: config_lib.Config, *groups: str) -> str:
    """Hash of a config, or of groups of it, without the places of stored things."""
    data = dataclasses.replace(config.data, cache_dir="", builtin_dir="")
    features = dataclasses.replace(config.features, store_dir="")
    moved = dataclasses.replace(config, data=data, features=features)
    return config_lib.fingerprint(moved, *groups)


def _size(folder: pathlib.Path, kind: str) -> tuple[int, float]:
    """(examples kept, share of examples or label tokens kept) of a run's plan."""
    plan = plan_lib.SelectionPlan.load(folder / "plan")
    share = plan.num_kept / len(plan.candidate_id)
    if kind == "tokens":
        total = plan.num_labels.sum(dtype=np.int64)
        share = float((plan.copies * plan.num_labels).sum(dtype=np.int64) / total)
    return plan.num_kept, share


def _exact_match(evaluation: dict[str, Any]) -> float | None:
    value = evaluation.get("exact_match")
    return None if value is None else float(value)


def with_shared_seconds(rows: list[comparison.Row]) -> list[comparison.Row]:
    """Counts the first cost of a shared stage in every run that has the stage."""
    for clock in ("stages", "processor_stages"):
        first: dict[tuple[str, str], float] = {}
        for row in rows:
            for stage, seconds in getattr(row, clock).items():
                key = stage, row.fingerprints.get(stage, "")
                first[key] = max(first.get(key, 0.0), seconds)
        rows = [
            dataclasses.replace(row, **{clock: _at_first_cost(row, clock, first)})
            for row in rows
        ]
    return rows


def _at_first_cost(
    row: comparison.Row, clock: str, first: dict[tuple[str, str], float]
) -> dict[str, float]:
    return {
        stage: first[stage, row.fingerprints[stage]]
        if stage in row.fingerprints
        else seconds
        for stage, seconds in getattr(row, clock).items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="file with get_config()")
    parser.add_argument(
        "--workdir", help="folder of the runs; default: runs/<name of the config>"
    )
    parser.add_argument("--seeds", help="instead of the config's, e.g. 0,1,2")
    parser.add_argument("--methods", help="only these, e.g. cluster,random")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="config key for all runs; may be repeated",
    )
    arguments = parser.parse_args()
    try:
        _compare(arguments)
    except errors.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _compare(arguments: argparse.Namespace) -> None:
    made = grid.load(arguments.config)
    changes: dict[str, Any] = {
        "shared": {**made.shared, **grid.parse_keys(arguments.set)}
    }
    if arguments.seeds:
        changes["seeds"] = tuple(map(int, arguments.seeds.split(",")))
    if arguments.methods:
        wanted = arguments.methods.split(",")
        unknown = [name for name in wanted if name not in made.methods]
        if unknown:
            raise errors.ConfigError(
                f"--methods {unknown[0]} is not in {arguments.config}; it has"
                f" {', '.join(made.methods)}"
            )
        changes["methods"] = {name: made.methods[name] for name in wanted}
    made = dataclasses.replace(made, **changes)
    name = pathlib.Path(arguments.config).stem
    workdir = pathlib.Path(arguments.workdir or f"runs/{name}")
    rows = Runner(made, workdir).run_all()
    result = comparison.Comparison(rows, made.full, made.random)
    files.write_json(workdir / "results.json", [dataclasses.asdict(r) for r in rows])
    files.write_text(workdir / "table.md", comparison.markdown(result))
    comparison_page.write(result, workdir / "compare.html", title=name)
    print()
    print(comparison.markdown(result))
    print(f"Written: {workdir}/results.json, table.md, compare.html")


if __name__ == "__main__":
    sys.exit(main())

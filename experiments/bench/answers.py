"""What the trained models of a comparison answer: tasks of lm-evaluation-harness.

    python -m experiments.bench answers --results runs/methods/results.json
        [--methods "paper,full,random"] [--output FILE.json]

Asks the saved model of every run (`train.save_model`) the held-out questions of the
embedded `skills`: the right one of four answers by likelihood, the answer written out,
and bits per byte of the whole text. Scores stay in the run folder, so that a second
start goes on where the first one stopped. Needs the extra `eval`.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Mapping, Sequence

from clusterjax import errors, files
from experiments import comparison, evaluate, intervals, machine, published
from experiments.bench import record

# Task, its metric as the harness names it, decimals shown.
_MEASURES = (
    ("skills_choice", "acc,none", 3),
    ("skills_exact", "exact_match,none", 3),
    ("skills_bits", "bits_per_byte,none", 3),
)
_HEADS = ("method", "models", "choice, share right", "− random")
_HEADS += ("written out, share right", "− random", "bits per byte", "− random")
_FILE = "answers.json"

Scores = Mapping[str, float]


def scores(folder: pathlib.Path) -> Scores:
    """Task → score of a run's model; kept in the folder.

    Raises:
      errors.UserError: the run saved no model, or the harness is missing.
    """
    path = folder / _FILE
    if not path.exists():
        if not (folder / "model").is_dir():
            raise errors.UserError(
                f"{folder} holds no model; run it with train.save_model=True"
            )
        found = evaluate.evaluate(
            evaluate.parser().parse_args(
                [
                    f"--model={folder / 'model'}",
                    f"--tasks={','.join(task for task, *_ in _MEASURES)}",
                ]
            )
        )
        files.write_json(path, {t: found[t][metric] for t, metric, _ in _MEASURES})
    return files.read_json(path)


def table(
    found: Mapping[str, Mapping[int, Scores]], random: str = "random"
) -> record.Table:
    """A row for each method.

    Args:
      found: method → seed → task → score.
      random: the method that paired differences are taken to.
    """
    rows = []
    for method, by_seed in found.items():
        cells: list[str | int] = [method, len(by_seed)]
        for task, _, digits in _MEASURES:
            value, reference = (
                {seed: each[task] for seed, each in runs.items()}
                for runs in (by_seed, found.get(random, {}))
            )
            cells.append(intervals.interval(list(value.values())).text(digits))
            if method == random:
                cells.append("–")
            else:
                difference = intervals.paired(value, reference)
                cells.append(difference.text(digits, sign=True))
        rows.append(cells)
    return record.Table("answers", _HEADS, rows)


def measure(
    rows: Sequence[comparison.Row], methods: Sequence[str]
) -> dict[str, dict[int, Scores]]:
    """Method → seed → scores of the runs of these methods (all when there are none).

    Raises:
      errors.UserError: no run has that method; as `scores`.
    """
    known = dict.fromkeys(row.method for row in rows)
    if missing := [method for method in methods if method not in known]:
        raise errors.UserError(
            f"--methods {missing[0]}: the results hold {', '.join(known)}"
        )
    found: dict[str, dict[int, Scores]] = {method: {} for method in methods or known}
    for row in rows:
        if row.method in found:
            found[row.method][row.seed] = scores(pathlib.Path(row.folder))
            print(f"{row.method}, seed {row.seed}: {found[row.method][row.seed]}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", required=True, help="results.json of a comparison")
    parser.add_argument("--methods", default="", help="names, by commas; default: all")
    parser.add_argument("--output", default="", help="JSON file for the figures")
    options = parser.parse_args(argv)
    methods = [name.strip() for name in options.methods.split(",") if name.strip()]
    try:
        rows = published.read_comparison(options.results).rows
        found = measure(rows, methods)
    except errors.UserError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if options.output:
        versions = machine.versions(["lm_eval"])
        record.write(
            options.output, "answers", [table(found)], details=found, versions=versions
        )


if __name__ == "__main__":
    main()

"""A plan for people and for other trainers.

    python -m experiments.plan show   runs/a/plan
    python -m experiments.plan diff   runs/a/plan runs/b/plan
    python -m experiments.plan verify runs/a/plan
    python -m experiments.plan export runs/a/plan --format jsonl --out kept.jsonl

`show` and `diff` need the plan alone. `verify` and `export` also read the run folder
that the plan lies in. Formats of `export`: `jsonl` (weight column), `hub` (directory
for `datasets.load_from_disk`), `array_record` (TFDS directory), `steps` (Parquet: which
step holds which example with which token weight, for an exact use elsewhere); see
docs/plan.md.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from etils import epath

from clusterjax import errors
from clusterjax import plan as plan_lib
from experiments import plan_check, plan_table

FORMATS = ("jsonl", "hub", "array_record", "steps")


def plan_directory(path: epath.PathLike) -> epath.Path:
    """The plan's directory, given it or the run folder that it lies in."""
    path = epath.Path(path)
    inner = path / "plan"
    return inner if plan_lib.SelectionPlan.exists(inner) else path


def export(folder: epath.Path, kind: str, out: str, text: bool) -> str:
    """Writes the plan in `folder` to `out`; returns a sentence for people.

    Raises:
      errors.UserError: the run has no plan, or its data changed.
    """
    from experiments import saved_run
    from experiments.exports import array_record, hub, jsonl, records, step_table

    run = saved_run.load(folder.parent)
    if kind == "steps":
        if run.schedule is None:
            raise errors.PlanError(f"{folder} holds no plan")
        count = step_table.write(run.schedule, out)
        return f"{count:,} (step, example) rows of {len(run.schedule):,} steps in {out}"
    kept = records.records(run, text=text and kind != "array_record")
    if kind == "jsonl":
        count = jsonl.write(kept, out)
    elif kind == "hub":
        count = hub.write(kept if text else records.tokenized(run), out)
    else:
        count = array_record.write(kept, pathlib.Path(out))
    return f"{count:,} kept examples in {out}"


def _run(arguments: argparse.Namespace) -> list[str]:
    folder = plan_directory(arguments.plan)
    if arguments.command == "show":
        return plan_table.describe(plan_lib.SelectionPlan.load(folder))
    if arguments.command == "diff":
        other = plan_directory(arguments.other)
        return plan_table.difference(
            plan_lib.SelectionPlan.load(folder), plan_lib.SelectionPlan.load(other)
        )
    if arguments.command == "verify":
        from experiments import saved_run

        return plan_check.verify(saved_run.load(folder.parent))
    return [export(folder, arguments.format, arguments.out, not arguments.tokens_only)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in [
        ("show", "sizes, shares, quotas, weights"),
        ("diff", "what another plan keeps instead"),
        ("verify", "check the plan and its schedule against METHOD §3–5"),
        ("export", "write it for another trainer"),
    ]:
        command = commands.add_parser(name, help=text)
        command.add_argument("plan", help="plan directory, or its run folder")
        if name == "diff":
            command.add_argument("other", help="the other plan")
        if name == "export":
            command.add_argument("--format", choices=FORMATS, required=True)
            command.add_argument("--out", required=True, help="file or directory")
            command.add_argument(
                "--tokens_only",
                action="store_true",
                help="leave the text out; hub: input_ids, attention_mask, labels only",
            )
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        print("\n".join(_run(arguments)))
    except errors.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except plan_check.Violation as violation:
        print(f"VIOLATED: {violation}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

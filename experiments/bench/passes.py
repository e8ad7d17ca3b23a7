"""Cheaper feature passes: what share of full training they cost, how far they agree.

    python -m experiments.bench passes --config configs/smollm2_real.py --folder DIR
        --full RUN [--layers 6,15] [--max_tokens 48] [--smaller MODEL] [--collected RUN]

Each pass is the features stage of a run of its own (`--config.stages=select`), made
twice: the second time its programs are compiled already, and that is the time told.
Agreement is with the plain pass, over all examples: mean cosine of an example's two
features, correlation over pairs of their two cosines, adjusted Rand index of the
partitions, shared part of the kept sets. `--full` is a finished run on all data, whose
training is the measure; `--collected` one with `features.during_first_epoch`.
"""

from __future__ import annotations

import argparse
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax

from clusterjax import errors, files
from clusterjax import mesh as mesh_lib
from clusterjax.features import agreement
from experiments import feature_pass, saved_run
from experiments.bench import record

_HEADS = (
    "pass",
    "wall (s)",
    "processor (s)",
    "of full training",
    "cosine",
    "correlation of pairs",
    "Rand index",
    "kept in both",
)
_DIGITS = (None, 1, 1, 4, 3, 3, 3, 3)


def variants(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Name of a pass → its config keys; the plain one first."""
    found: dict[str, dict[str, Any]] = {"plain": {}}
    for count in options.layers:
        found[f"first {count} layers"] = {"features.num_layers": count}
    for count in options.max_tokens:
        found[f"first {count} tokens"] = {"features.max_tokens": count}
    if options.layers and options.max_tokens:
        found[f"first {options.layers[0]} layers, {options.max_tokens[0]} tokens"] = {
            "features.num_layers": options.layers[0],
            "features.max_tokens": options.max_tokens[0],
        }
    found["bfloat16"] = {"features.compute_dtype": "bfloat16"}
    if options.smaller:
        name = pathlib.PurePath(options.smaller).name
        found[f"smaller model ({name})"] = {"features.model": options.smaller}
    return found


def run(folder: pathlib.Path, config: str, keys: dict[str, Any]) -> dict[str, float]:
    """Runs up to the plan, twice; seconds of the second features stage.

    Raises:
      errors.UserError: the run failed; its last lines.
    """
    command = [
        *(sys.executable, "-m", "experiments.run", f"--config={config}"),
        *(f"--workdir={folder}", "--config.stages=select"),
        *(f"--config.{key}={value}" for key, value in keys.items()),
        f"--config.perf.compilation_cache={folder.parent / 'programs'}",
    ]
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stdout + done.stderr).splitlines()[-12:]
            raise errors.UserError("\n".join((shlex.join(command), *lines)))
    return stage(folder, "features")


def stage(folder: pathlib.Path, name: str) -> dict[str, float]:
    """Wall and processor seconds of a stage of a run."""
    entries = [e for e in files.read_json(folder / "ledger.json") if e["stage"] == name]
    if not entries:
        raise errors.UserError(f"{folder} has no stage {name} in its ledger.json")
    return {
        "wall": sum(entry["seconds"] for entry in entries),
        "processor": sum(entry["processor_seconds"] for entry in entries),
    }


def compare(
    plain: saved_run.SavedRun, cheap: saved_run.SavedRun
) -> agreement.Agreement:
    """Features, partition and kept set of two runs, under the settings of the first."""
    mesh = mesh_lib.build(plain.config.mesh, jax.devices()[:1])
    assert plain.feats is not None and cheap.feats is not None
    return agreement.compare(
        plain.feats,
        cheap.feats,
        lambda some: feature_pass.partition(some, plain.config, mesh).cluster_id,
        lambda some: feature_pass.keep(some, plain.config, mesh),
    )


def measure(options: argparse.Namespace) -> list[tuple[Any, ...]]:
    """A row for each pass."""
    full = stage(pathlib.Path(options.full), "train")
    keys = dict(item.split("=", 1) for item in options.set)
    rows, plain = [], None
    for name, changes in variants(options).items():
        folder = pathlib.Path(options.folder).absolute() / name.replace(" ", "-")
        seconds = run(folder, options.config, keys | changes)
        found = saved_run.load(folder)
        plain = plain or found
        rows.append(_row(name, seconds, full, compare(plain, found)))
    if options.collected and plain:
        found = saved_run.load(options.collected)
        # What the steps pay for it beyond training is measured by bench `collecting`.
        seconds = stage(pathlib.Path(options.collected), "features")
        rows.append(
            _row("during the first epoch", seconds, full, compare(plain, found))
        )
    return rows


def _row(
    name: str,
    seconds: dict[str, float],
    full: dict[str, float],
    found: agreement.Agreement,
) -> tuple[Any, ...]:
    share = seconds["processor"] / full["processor"]
    row = (
        *(name, seconds["wall"], seconds["processor"], share),
        *(found.cosine, found.pair_correlation, found.rand_index, found.kept_overlap),
    )
    print(row, flush=True)
    return row


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--folder", required=True, help="for the runs; is overwritten")
    parser.add_argument("--full", required=True, help="finished run on all data")
    parser.add_argument("--collected", default="", help="run that collected features")
    parser.add_argument("--layers", default="", help="numbers of layers, 6,15")
    parser.add_argument("--max_tokens", default="", help="lengths of input, 48")
    parser.add_argument("--smaller", default="", help="another model for the pass")
    parser.add_argument("--set", action="append", default=[], help="config key=value")
    parser.add_argument("--output", default="", help="JSON file for the figures")
    options = parser.parse_args(argv)
    for name in ("layers", "max_tokens"):
        counts = getattr(options, name).split(",")
        setattr(options, name, [int(count) for count in counts if count])
    try:
        rows = measure(options)
    except errors.UserError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if options.output:
        table = record.Table("passes", _HEADS, rows, _DIGITS)
        record.write(options.output, "passes", [table])


if __name__ == "__main__":
    main()

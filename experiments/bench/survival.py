"""Kills a run with kill -9 at many moments, and compares it with an undisturbed one.

    python -m experiments.bench survival --folder DIR [--devices 2]

One run of 40 steps through all stages is killed again and again, each time at another
fault point (`clusterjax.faults`), and started again in the same folder. At the end its
state must equal that of the undisturbed run bit for bit (checksums of every array of
parameters and optimiser), and so must `metrics.jsonl` but for the times. Prints a table
of where each kill fell.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from clusterjax import faults
from experiments.bench import record

_STEPS = 40

# Counts start anew with every start. With `@ms` the blow comes that long after the
# point, here: while the checkpoint is being written.
MOMENTS = (
    "stage.data:1",
    "files.write:3",
    "stage.features:1",
    "files.write:6",
    "files.write:8",
    "stage.cluster:1",
    "stage.select:1",
    "files.write:9",
    "stage.train:1",
    "train.compile:1",
    "train.step:1",
    "train.step:7",
    "checkpoint.before:1",
    "checkpoint.writing:1",
    "checkpoint.writing:1@20",
    "checkpoint.writing:1@60",
    "checkpoint.writing:2@5",
    "train.log:3",
    "train.step:11",
    "eval:1",
    "model.save:1",
    "stage.report:1",
)


def command(folder: pathlib.Path, devices: int) -> list[str]:
    """The run that is killed: both embedded sets, 40 steps, a save every 5."""
    settings = {
        "data.sources[0].max_examples": 110,
        "data.sources[1].max_examples": 110,
        "data.max_length": 96,
        "clustering.num_clusters": 3,
        "selection.ratio": 1.0,
        "allocation.batch_size": 8,
        "allocation.num_epochs": 4,
        "allocation.max_steps": _STEPS,
        "train.checkpoint_every": 5,
        "train.eval_every": 20,
        "train.log_every": 2,
        "eval.max_examples": 16,
        "mesh.num_simulated_devices": devices,
    }
    overrides = [f"--config.{name}={value}" for name, value in settings.items()]
    script = [sys.executable, "-m", "experiments.run"]
    config = ["--config", "configs/quickstart.py", "--workdir", str(folder)]
    return [*script, *config, *overrides]


def start(arguments: list[str], fault: str = "") -> tuple[int, str]:
    """Runs to the end or to the blow; returns exit code and output."""
    environment = {**os.environ, faults.VARIABLE: fault, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def outcome(folder: pathlib.Path) -> dict[str, Any]:
    """What must be equal: checksums of the last state, and lines without times."""
    steps = [p for p in (folder / "checkpoints").iterdir() if p.name.isdigit()]
    last = max(steps, key=lambda p: int(p.name))
    texts = [p.read_bytes() for p in (last / "record").iterdir() if p.is_file()]
    (record,) = [json.loads(t) for t in texts if b"checksums" in t]
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "step": record["step"],
        "checksums": record["checksums"],
        "lines": [{k: v for k, v in x.items() if k != "time"} for x in lines],
        "model": (folder / "model" / "model.safetensors").read_bytes(),
    }


def survive(
    folder: pathlib.Path,
    devices: int,
    kind: str,
    moments: Sequence[str] = MOMENTS,
) -> list[dict[str, Any]]:
    """Runs both; returns a row for every blow.

    Raises:
      AssertionError: the outcomes differ.
    """
    code, said = start(command(folder / "undisturbed", devices))
    assert code == 0, said
    rows = []
    killed = command(folder / "killed", devices)
    for moment in moments:
        code, said = start(killed, f"{moment}:{kind}")
        rows.append({"moment": moment, "code": code, "fell": _where(said)})
        print(_row(rows[-1]), flush=True)
        assert code in (0, 75, -signal.SIGKILL, -signal.SIGTERM), said
    code, said = start(killed)
    assert code == 0, said
    a, b = outcome(folder / "killed"), outcome(folder / "undisturbed")
    for name in b:
        assert a[name] == b[name], f"{name} differ: {a[name]!r} and {b[name]!r}"
    return rows


def _where(said: str) -> str:
    """The last line that the run printed before the blow."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    resumed = re.findall(r"resumed at step [\d,]+", said)
    return "; ".join([*resumed, lines[-1][:60] if lines else "nothing printed yet"])


def _row(row: dict[str, Any]) -> str:
    return f"{row['moment']:<28} exit {row['code']:>4}  {row['fell']}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the comparison and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", required=True, type=pathlib.Path, help="empty, for both runs"
    )
    parser.add_argument("--devices", type=int, default=2, help="simulated devices")
    parser.add_argument("--signal", default="KILL", choices=("KILL", "TERM"))
    parser.add_argument("--output", help="JSON file for the table")
    options = parser.parse_args(argv)
    rows = survive(options.folder, options.devices, options.signal)
    struck = sum(row["code"] not in (0,) for row in rows)
    print(f"{struck} of {len(rows)} blows fell; both runs ended equal, bit for bit")
    if options.output:
        table = record.Table(
            "kills",
            ("moment", "exit code", "last line printed before"),
            [(row["moment"], row["code"], row["fell"]) for row in rows],
        )
        record.write(options.output, "survival", [table])


if __name__ == "__main__":
    main()

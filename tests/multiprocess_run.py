"""A whole run in two processes over loopback; used by the tests of its faults."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import time

from flax import nnx

from clusterjax import models
from clusterjax.data import tokenizer as tokenizer_lib
from clusterjax.models import checkpoints, decoder

ROOT = pathlib.Path(__file__).parent.parent
SETTINGS: dict[str, object] = {}  # overrides of tests/small_config.py for every run


def make_model(folder: pathlib.Path) -> None:
    """Writes a decoder of one layer with the built-in tokenizer."""
    tokenizer = tokenizer_lib.Tokenizer.load(checkpoints.directory_of("builtin"))
    cfg = decoder.DecoderConfig(
        vocab_size=-(-tokenizer.vocab_size // 8) * 8,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
    )
    models.save(decoder.Decoder(cfg, nnx.Rngs(0)), tokenizer, folder)


def command(folder: pathlib.Path, **changes: object) -> list[str]:
    """The little run, from data to report, by the model in `<folder>/../model`."""
    model = folder.parent / "model"
    if not model.exists():
        make_model(model)
    settings = {"model.path": model, **SETTINGS, **changes}
    overrides = [f"--config.{name}={value}" for name, value in settings.items()]
    script = [sys.executable, "-m", "experiments.run"]
    config = ["--config", "tests/small_config.py", "--workdir", str(folder)]
    return [*script, *config, *overrides]


def start(
    arguments: list[str], fault: str = "", home: pathlib.Path | None = None
) -> subprocess.Popen[str]:
    """Starts a process in the repository's root, with a fault on its way."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "CLUSTERJAX_FAULT": fault,
        "PYTHONUNBUFFERED": "1",
        "HOME": str(home or pathlib.Path.home()),
    }
    return subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_two(
    folder: pathlib.Path,
    faults: tuple[str, str] = ("", ""),
    *,
    second: dict[str, object] | None = None,
    homes: tuple[pathlib.Path | None, pathlib.Path | None] = (None, None),
) -> list[subprocess.Popen[str]]:
    """Both processes of one run; `second` are settings of the second alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own: tuple[dict[str, object], ...] = ({}, second or {})
    return [
        start(
            [
                *command(folder, **own[process]),
                f"--coordinator=127.0.0.1:{port}",
                "--num_processes=2",
                f"--process_id={process}",
            ],
            faults[process],
            homes[process],
        )
        for process in (0, 1)
    ]


def finish(processes: list[subprocess.Popen[str]], limit: float = 600) -> list[str]:
    """Waits for all; returns what they said."""
    try:
        return [process.communicate(timeout=limit)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def seconds_to_follow(
    dying: subprocess.Popen[str], other: subprocess.Popen[str], limit: float = 90
) -> float:
    """Seconds from the end of one process to the end of the other."""
    dying.wait(timeout=600)
    begin = time.monotonic()
    other.wait(timeout=limit)
    return time.monotonic() - begin

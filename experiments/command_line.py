"""The command line: `--config FILE`, `--config.group.key=value`, `--workdir DIR`."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging
from ml_collections import config_flags

from clusterjax import config as config_lib
from clusterjax import distributed, errors, progress

USER_ERROR_EXIT_CODE = 2

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, for example configs/quickstart.py."
)
WORKDIR = flags.DEFINE_string("workdir", None, "Run folder; made when missing.")
OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "Move a finished or different run out of the way first."
)

COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "host:port of process 0; not needed where JAX detects a cluster (TPU pod, Slurm).",
)
NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "Processes of the run, with --coordinator."
)
PROCESS_ID = flags.DEFINE_integer(
    "process_id", None, "This process, from 0, with --coordinator."
)
PROFILE_STEPS = flags.DEFINE_string(
    "profile_steps", None, "FIRST:LAST training steps to trace into profile/."
)
_FLAGS = (
    CONFIG,
    WORKDIR,
    OVERWRITE,
    COORDINATOR,
    NUM_PROCESSES,
    PROCESS_ID,
    PROFILE_STEPS,
)


def run(main: Callable[[], int | None], description: str) -> None:
    """Parses the flags, calls `main()`, and turns user errors into one clean message.

    Exit codes: 0 done, 2 a mistake of the user's (message without a traceback), 75
    stopped by a signal with the state saved, 76 another process is gone, or what
    `main` returns.
    """

    def guarded(argv: Sequence[str]) -> int | None:
        # Orbax tells every file operation at INFO, which drowns our own lines.
        logging.set_verbosity(logging.WARNING)
        if len(argv) > 1:
            return _fail(f"unexpected arguments: {' '.join(argv[1:])}")
        try:
            distributed.initialize(
                COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value
            )
            with distributed.ending_together():
                return main()
        except errors.UserError as error:
            return _fail(str(error))

    app.run(guarded, flags_parser=lambda argv: _parse(argv, description))


def resolved_config() -> config_lib.Config:
    """The config of `--config` with its overrides, as frozen dataclasses."""
    if CONFIG.value is None:
        raise errors.ConfigError(
            "no --config given; try --config configs/quickstart.py, or --help"
        )
    config = config_lib.resolve(CONFIG.value)
    if PROFILE_STEPS.value is None:
        return config
    report = dataclasses.replace(config.report, profile_steps=PROFILE_STEPS.value)
    return dataclasses.replace(config, report=report)


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return USER_ERROR_EXIT_CODE


def _parse(argv: Sequence[str], description: str) -> list[str]:
    if any(item in ("--help", "-h", "--helpfull", "--helpshort") for item in argv):
        progress.say(help_text(description))
        sys.exit(0)
    try:
        for item in argv[1:]:
            _check_key(item)
        _check_file(argv)
        return flags.FLAGS(list(argv))
    except (
        errors.UserError,
        flags.Error,
        AttributeError,
        KeyError,
        TypeError,
        IndexError,
    ) as error:
        message = str(error)
    sys.exit(_fail(message))


def _check_file(argv: Sequence[str]) -> None:
    """Refuses a config file that is not there, before anything imports it."""
    for item, following in zip(argv[1:], [*argv[2:], ""]):
        name = following if item == "--config" else item.removeprefix("--config=")
        is_named = item == "--config" or item.startswith("--config=")
        if is_named and not os.path.exists(name.split(":")[0]):
            raise errors.ConfigError(f"--config {name}: there is no such file")


def _check_key(item: str) -> None:
    """Refuses an override of a key that does not exist, with the nearest one."""
    found = re.match(r"--(?:no)?config\.([^=]+)", item)
    if not found:
        return
    name = re.sub(r"\[\d+\]", "", found[1])
    known = [row[0] for row in config_lib.describe() if row[1] != "group"]
    known += [
        f"data.{group}.{row[0]}"
        for group in ("sources", "eval_sources")
        for row in config_lib.describe(config_lib.SourceConfig)
    ]
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    tail = name.rpartition(".")[2]
    same_tail = [key for key in known if key.rpartition(".")[2] == tail]
    best = (same_tail or near or [None])[0]
    hint = f"; did you mean config.{best}?" if best else ""
    raise errors.ConfigError(f"there is no config key config.{name}{hint}")


def help_text(description: str) -> str:
    """Usage, flags, and every config key with type, default and meaning."""
    lines = [description.strip(), "", "Flags:"]
    for flag in _FLAGS:
        lines.append(f"  --{flag.name}: {flags.FLAGS[flag.name].help}")
    lines += ["", "Config keys (override with --config.KEY=VALUE):"]
    for name, kind, default, text in config_lib.describe():
        if kind == "group":
            lines += ["", f"  [{name}] {text}"]
        else:
            lines.append(f"    {name} = {default}  ({kind})\n        {text}")
    lines += ["", "  [data.sources[i], data.eval_sources[i]] one source of examples"]
    for name, kind, default, text in config_lib.describe(config_lib.SourceConfig):
        lines.append(f"    {name} = {default}  ({kind})\n        {text}")
    return "\n".join(lines)

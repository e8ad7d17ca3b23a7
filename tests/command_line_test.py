"""The command line: help explains every key, mistakes are one clear line."""

import subprocess
import sys

import pytest

from clusterjax import config as config_lib
from clusterjax import errors
from experiments import command_line


def _run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "experiments.run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_help_explains_every_key():
    text = command_line.help_text("what it does")
    for name, kind, _, meaning in config_lib.describe():
        assert name in text
        assert meaning in text, (name, kind)


@pytest.mark.parametrize(
    ("item", "hint"),
    [
        ("--config.selection.ratioo=0.5", "did you mean config.selection.ratio?"),
        ("--config.num_clusters=5", "did you mean config.clustering.num_clusters?"),
        ("--config.data.sources[0].pth=x", "did you mean config.data.sources.path?"),
    ],
)
def test_misspelt_keys_get_a_suggestion(item, hint):
    with pytest.raises(errors.ConfigError) as caught:
        command_line._check_key(item)
    assert hint in str(caught.value)


def test_right_keys_pass():
    for item in ("--config.selection.ratio=1", "--config.data.sources[1].path=x"):
        command_line._check_key(item)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no --config given"),
        (("--config", "nowhere.py"), "nowhere.py"),
        (("--config", "configs/quickstart.py"), "no --workdir given"),
        (
            ("--config", "configs/quickstart.py", "--config.selection.ratio=much"),
            "could not convert string to float: 'much'",
        ),
    ],
)
def test_mistakes_end_with_code_2_and_no_traceback(arguments, message):
    done = _run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_profile_steps_flag(monkeypatch):
    monkeypatch.setattr(command_line, "CONFIG", _Flag(config_lib.default()))
    monkeypatch.setattr(command_line, "PROFILE_STEPS", _Flag(None))
    assert command_line.resolved_config().report.profile_steps == ""
    monkeypatch.setattr(command_line, "PROFILE_STEPS", _Flag("10:15"))
    assert command_line.resolved_config().report.profile_steps == "10:15"


class _Flag:
    """A flag with a value."""

    def __init__(self, value):
        self.value = value

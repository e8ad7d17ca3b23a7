"""The run folder: refuses another config, a second process, and an unwritable place."""

import dataclasses
import os

import pytest

from clusterjax import config as config_lib
from clusterjax import errors, files
from experiments import ledger as ledger_lib
from experiments import workdir

CONFIG = config_lib.Config()


def test_second_start_with_the_same_config_is_welcome(tmp_path):
    for _ in range(2):
        with workdir.opened(tmp_path / "run", CONFIG) as folder:
            assert files.read_json(folder / "config.json")["seed"] == 0
    assert files.read_json(tmp_path / "run" / "environment.json")["versions"]["jax"]


def test_a_relative_folder_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with workdir.opened("runs/a", CONFIG) as folder:
        assert os.fspath(folder) == os.path.join(tmp_path, "runs", "a")
    assert os.fspath(files.absolute("gs://bucket/a")) == "gs://bucket/a"


def test_another_config_is_refused_and_the_key_named(tmp_path):
    with workdir.opened(tmp_path / "run", CONFIG):
        pass
    other = dataclasses.replace(CONFIG, selection=config_lib.SelectionConfig(ratio=0.5))
    with (
        pytest.raises(
            errors.WorkdirError, match=r"selection.ratio: 0.75 there, 0.5 now"
        ),
        workdir.opened(tmp_path / "run", other),
    ):
        pass
    with workdir.opened(tmp_path / "run", other, overwrite=True):
        pass
    assert len(list(tmp_path.glob("run.old-*"))) == 1


def test_a_folder_of_an_earlier_version_lacks_new_keys(tmp_path):
    with workdir.opened(tmp_path / "run", CONFIG) as folder:
        saved = files.read_json(folder / "config.json")
    del saved["allocation"]["herding_exchanges"]
    files.write_json(folder / "config.json", saved)
    with workdir.opened(tmp_path / "run", CONFIG):
        pass
    changed = config_lib.AllocationConfig(herding_exchanges=7)
    other = dataclasses.replace(CONFIG, allocation=changed)
    with (
        pytest.raises(errors.WorkdirError, match=r"herding_exchanges: 100 there, 7"),
        workdir.opened(tmp_path / "run", other),
    ):
        pass


def test_keys_that_change_no_result_may_differ(tmp_path):
    with workdir.opened(tmp_path / "run", CONFIG):
        pass
    other = dataclasses.replace(
        CONFIG,
        perf=config_lib.PerfConfig(prefetch=9),
        mesh=config_lib.MeshConfig(num_simulated_devices=2),
    )
    with workdir.opened(tmp_path / "run", other) as folder:
        assert files.read_json(folder / "config.json")["perf"]["prefetch"] == 9


def test_two_runs_in_one_folder(tmp_path):
    with (
        workdir.opened(tmp_path / "run", CONFIG),
        pytest.raises(errors.WorkdirError, match=f"in use .*{os.getpid()}"),
        workdir.opened(tmp_path / "run", CONFIG),
    ):
        pass


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(errors.WorkdirError, match="can't be written"),
        workdir.opened(tmp_path / "file" / "run", CONFIG),
    ):
        pass


def test_ledger_adds_up_over_restarts(tmp_path):
    ledger_lib.Ledger(tmp_path).add("train", 2.0, "first")
    ledger = ledger_lib.Ledger(tmp_path)
    ledger.add("train", 3.0)
    with pytest.raises(RuntimeError), ledger.stage("report"):
        raise RuntimeError
    entries = {e.stage: e for e in ledger_lib.Ledger(tmp_path).entries}
    assert entries["train"].seconds == 5.0
    assert entries["train"].detail == "first"
    assert entries["report"].seconds >= 0


def test_a_stage_inside_another_counts_once(tmp_path, monkeypatch):
    now = iter([0.0, 10.0, 13.0, 14.0, 16.0, 20.0])
    monkeypatch.setattr(ledger_lib.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(ledger_lib.time, "process_time", lambda: 0.0)
    ledger = ledger_lib.Ledger(tmp_path)
    with ledger.stage("train"):
        for _ in range(2):
            with ledger.stage("features"):
                pass
    seconds = {entry.stage: entry.seconds for entry in ledger.entries}
    # From 10 to 13 and from 14 to 16 features, the rest of 20 seconds training.
    assert seconds == {"features": 5.0, "train": 15.0} and ledger.total == 20

"""Faults tried on whole runs: what is said, what stays whole, what a second start does.

The table in docs/pods.md lists them. Full disks, damaged checkpoints and kills inside
one process are in checkpoint_test, resume_test and survival_test as well.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import resource
import signal
import time

import jax
import multiprocess_run
import numpy as np
import pytest

from clusterjax import config as config_lib
from clusterjax import errors, loop
from experiments import run as run_lib
from experiments import workdir

SETTINGS = multiprocess_run.SETTINGS


def _config(**groups) -> config_lib.Config:
    """About 60 short examples, four steps, on one device."""
    source = config_lib.SourceConfig(path="builtin:skills", max_examples=60)
    settings = {
        "data": config_lib.DataConfig(sources=(source,), max_length=48),
        "clustering": config_lib.ClusteringConfig(
            num_clusters=2, num_restarts=2, min_cluster_size=1
        ),
        "selection": config_lib.SelectionConfig(ratio=1.0),
        "allocation": config_lib.AllocationConfig(batch_size=8, max_steps=4),
        "train": config_lib.TrainConfig(
            log_every=1, checkpoint_every=2, save_model=False
        ),
        "mesh": config_lib.MeshConfig(num_simulated_devices=1),
        "report": config_lib.ReportConfig(html=False),
        "perf": config_lib.PerfConfig(feature_block=16),
    }
    return config_lib.Config(**{**settings, **groups})


def _lines(folder) -> list[dict]:
    """metrics.jsonl without times."""
    text = (pathlib.Path(folder) / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in line.items() if k != "time"} for line in lines]


def _arrays(run) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(run.result.state)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return run_lib.execute(_config(), folder)


def _check_same(found, undisturbed) -> None:
    assert _lines(found.folder) == _lines(undisturbed.folder)
    for a, b in zip(_arrays(found), _arrays(undisturbed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_full_disk_while_saving(tmp_path, undisturbed):
    """No file may grow above 1 MB, as if the disk were full; then it may again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(errors.CheckpointError) as caught:
            run_lib.execute(_config(), tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "is the disk full, or not writable?" in str(caught.value)
    assert "Whole checkpoints there: none" in str(caught.value)
    _check_same(run_lib.execute(_config(), tmp_path / "run"), undisturbed)


def test_read_only_workdir(tmp_path):
    """/proc takes no new folders from anybody; a folder without rights, not from us."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    places = ["/proc/clusterjax"] + ([locked / "run"] if os.geteuid() else [])
    for place in places:
        with pytest.raises(errors.WorkdirError, match="can't be written"):
            run_lib.execute(_config(), place)


def test_corrupted_feature_block(tmp_path, undisturbed, capsys):
    config = _config()
    run_lib.execute(dataclasses.replace(config, stages="features"), tmp_path / "run")
    blocks = sorted((tmp_path / "run" / "features" / "store").rglob("*.features"))
    assert len(blocks) > 1
    content = bytearray(blocks[0].read_bytes())
    content[len(content) // 2] ^= 1
    blocks[0].write_bytes(content)
    capsys.readouterr()
    found = run_lib.execute(config, tmp_path / "run")
    said = capsys.readouterr().out
    assert f"{blocks[0]} is damaged" in said
    assert "set aside, its examples are computed again" in said
    np.testing.assert_array_equal(found.features.values, undisturbed.features.values)
    _check_same(found, undisturbed)


def test_plan_of_other_data(tmp_path):
    """A line of the file changes between two starts with the same config."""
    rows = [
        {"instruction": f"Say {i} twice.", "response": f"{i} {i}"} for i in range(40)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    source = config_lib.SourceConfig(path=str(path))
    config = _config(
        data=config_lib.DataConfig(sources=(source,), max_length=48), stages="select"
    )
    run_lib.execute(config, tmp_path / "run")
    rows[7]["response"] = "8 8"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(errors.PlanError, match="was made from other data"):
        run_lib.execute(dataclasses.replace(config, stages="all"), tmp_path / "run")


def test_clock_going_back(tmp_path, monkeypatch, undisturbed):
    """Every look at the clock is 1,000 s earlier; the run is stopped and goes on."""
    clock = itertools.count(time.time(), -1000)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: float(next(clock)))
        patch.setattr(loop.Loop, "_stopping", lambda self, done: done == 3)
        with pytest.raises(SystemExit):
            run_lib.execute(_config(), tmp_path / "run")
        patch.setattr(loop.Loop, "_stopping", lambda self, done: False)
        found = run_lib.execute(_config(), tmp_path / "run")
    assert found.result.resumed_from == 3
    _check_same(found, undisturbed)
    times = [line["time"] for line in found.result.history]
    assert times == sorted(times)
    assert all(0 <= entry.seconds < 600 for entry in found.ledger.entries)


def test_second_run_in_the_same_folder_refuses(tmp_path):
    """The first is halted (SIGSTOP) in its feature stage while the second starts."""
    folder = tmp_path / "run"
    settings = {"stages": "features"}
    first = multiprocess_run.start(
        multiprocess_run.command(folder, **settings), "stage.features:1:STOP"
    )
    try:
        while not (folder / "data" / "report.json").exists():
            assert first.poll() is None and time.sleep(0.2) is None
        with (
            pytest.raises(errors.WorkdirError, match=rf"in use .*process {first.pid}"),
            workdir.opened(folder, _config()),
        ):
            pass
        second = multiprocess_run.start(multiprocess_run.command(folder, **settings))
        (said,) = multiprocess_run.finish([second])
        assert second.returncode == 2
        assert f"is in use by another run (process {first.pid})" in said
        first.send_signal(signal.SIGCONT)
        (said,) = multiprocess_run.finish([first])
        assert first.returncode == 0, said
    finally:
        first.kill()


@pytest.mark.slow
def test_hosts_with_other_settings_end_together(tmp_path):
    changes = {"selection.ratio": 0.5}
    processes = multiprocess_run.start_two(tmp_path / "run", second=changes)
    for said in multiprocess_run.finish(processes):
        assert "the processes have different inputs: config (process 1 has" in said
    assert [process.returncode for process in processes] == [2, 2]


@pytest.mark.slow
def test_hosts_with_other_data_end_together(tmp_path, monkeypatch):
    """One config, but `~` is another folder with another file on the second host."""
    for host in (0, 1):
        home = tmp_path / str(host)
        home.mkdir()
        rows = [
            {"instruction": f"Say {i}.", "response": f"{i + host}"} for i in range(40)
        ]
        for i in (0, 1):
            text = "\n".join(map(json.dumps, rows[i::2]))
            (home / f"rows-{i}.jsonl").write_text(text)
    for i in (0, 1):
        monkeypatch.setitem(SETTINGS, f"data.sources[{i}].path", f"~/rows-{i}.jsonl")
        monkeypatch.setitem(SETTINGS, f"data.sources[{i}].split", "train")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    homes = (tmp_path / "0", tmp_path / "1")
    processes = multiprocess_run.start_two(tmp_path / "run", homes=homes)
    for said in multiprocess_run.finish(processes):
        assert "the processes have different inputs: corpus (process 1 has" in said
    assert [process.returncode for process in processes] == [2, 2]


@pytest.mark.slow
def test_both_go_on_after_the_death_of_one(tmp_path):
    """One of two is killed during the save of step 4; the end is as without it."""
    lines = []
    for name, fault in (("whole", ""), ("killed", "checkpoint.writing:2")):
        folder = tmp_path / name
        if fault:
            processes = multiprocess_run.start_two(folder, ("", fault))
            multiprocess_run.seconds_to_follow(processes[1], processes[0])
            multiprocess_run.finish(processes)
        processes = multiprocess_run.start_two(folder)
        said = multiprocess_run.finish(processes)
        assert [process.returncode for process in processes] == [0, 0], said
        lines.append(_lines(folder))
    assert "resumed at step" in said[0]
    assert lines[0] == lines[1]


POINTS = (
    "stage.data:1",
    "stage.features:1",
    "stage.cluster:1",
    "stage.select:1",
    "stage.train:1",
    "train.step:3",
    "checkpoint.writing:1",
    "model.save:1",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dying", "point"),
    [*((1, p) for p in POINTS), *((0, p) for p in POINTS[1::2])],
)
def test_one_of_two_is_killed(tmp_path, point, dying):
    """The other ends within a minute and says why."""
    folder = tmp_path / "run"
    faults = (point, "") if dying == 0 else ("", point)
    processes = multiprocess_run.start_two(folder, faults)
    seconds = multiprocess_run.seconds_to_follow(processes[dying], processes[1 - dying])
    said = multiprocess_run.finish(processes)[1 - dying]
    assert processes[dying].returncode == -signal.SIGKILL
    code = processes[1 - dying].returncode
    last = said.strip().splitlines()[-1]
    print(f"| {point} | {dying} | {seconds:.0f} s | {code} | {last[:60]} |")
    assert seconds < 60
    # Ours, or JAX's when its watch notices before an operation fails.
    assert code in (76, -signal.SIGABRT), said
    assert "lost another process" in said or "another task died" in said

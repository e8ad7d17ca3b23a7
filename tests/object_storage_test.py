"""Workdir, data and feature store on object storage (a stand-in): the same run."""

import dataclasses
import json
import threading

import jax
import numpy as np
import object_storage
import pytest
from etils import epath

from clusterjax import config as config_lib
from clusterjax import errors, files, loop, metrics
from experiments import lease, workdir
from experiments import run as run_lib


@pytest.fixture
def storage(monkeypatch, tmp_path):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")  # a path taken for a local one would show here
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.2)
    monkeypatch.setattr(lease, "WATCH_SECONDS", 0.5)
    return object_storage.install(monkeypatch, tmp_path / "storage")


def _config(path: str, store: str = "", **groups) -> config_lib.Config:
    source = config_lib.SourceConfig(path=path)
    settings = {
        "data": config_lib.DataConfig(
            sources=(source,), eval_fraction=0.2, max_length=48
        ),
        "features": config_lib.FeaturesConfig(store_dir=store),
        "clustering": config_lib.ClusteringConfig(
            num_clusters=2, num_restarts=2, min_cluster_size=1
        ),
        "selection": config_lib.SelectionConfig(ratio=1.0),
        "allocation": config_lib.AllocationConfig(batch_size=8, max_steps=4),
        "train": config_lib.TrainConfig(log_every=1, checkpoint_every=2),
        "mesh": config_lib.MeshConfig(num_simulated_devices=2),
    }
    return config_lib.Config(**{**settings, **groups})


def _write_rows(path) -> None:
    rows = [
        {"instruction": f"Repeat {i}.", "response": f"{i} " * (1 + i % 7)}
        for i in range(60)
    ]
    files.write_text(path, "\n".join(map(json.dumps, rows)))


def _lines(folder) -> list[dict]:
    return [
        {k: v for k, v in line.items() if k != "time"}
        for line in metrics.read(epath.Path(folder) / "metrics.jsonl")
    ]


def test_a_run_lives_there_and_goes_on(storage, tmp_path, monkeypatch):
    """Stopped after step 3 and started again; equal to a run on local disk."""
    _write_rows(tmp_path / "rows.jsonl")
    local = run_lib.execute(_config(str(tmp_path / "rows.jsonl")), tmp_path / "run")
    _write_rows("gs://bucket/data/rows.jsonl")
    config = _config("gs://bucket/data/rows.jsonl", "gs://bucket/features")
    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_stopping", lambda self, done: done == 3)
        with pytest.raises(SystemExit) as stopped:
            run_lib.execute(config, "gs://bucket/runs/a")
    assert stopped.value.code == 75
    found = run_lib.execute(config, "gs://bucket/runs/a")
    assert found.result.resumed_from == 3
    assert _lines("gs://bucket/runs/a") == _lines(tmp_path / "run")
    for a, b in zip(
        jax.tree.leaves(found.result.state),
        jax.tree.leaves(local.result.state),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    there = tmp_path / "storage" / "bucket" / "runs" / "a"
    for name in ("config.json", "summary.json", "report.html", "plan/plan.parquet"):
        assert (there / name).stat().st_size > 0
    model = (there / "model" / "model.safetensors").read_bytes()
    assert model == (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    assert list((tmp_path / "storage" / "bucket" / "features").rglob("*.features"))
    assert not list((tmp_path / "cwd").iterdir())
    assert not (there / ".lease").exists()


def test_damaged_checkpoint_there_is_passed_over(storage, tmp_path, capsys):
    _write_rows("gs://bucket/rows.jsonl")
    config = _config("gs://bucket/rows.jsonl")
    first = run_lib.execute(config, "gs://bucket/a")
    folder = tmp_path / "storage" / "bucket" / "a" / "checkpoints"
    for path in (folder / "4" / "state").rglob("*"):
        if path.is_file() and "/d/" in str(path):
            path.write_bytes(b"")
    again = run_lib.execute(config, "gs://bucket/a")
    assert again.result.resumed_from == 2
    assert "gs://bucket/a/checkpoints/4 is damaged" in capsys.readouterr().out
    for a, b in zip(
        jax.tree.leaves(again.result.state),
        jax.tree.leaves(first.result.state),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_second_run_there_refuses(storage):
    config = config_lib.Config()
    with (
        workdir.opened("gs://bucket/a", config),
        pytest.raises(errors.WorkdirError, match="gs://bucket/a is in use by another"),
        workdir.opened("gs://bucket/a", config),
    ):
        pass


def test_a_lease_whose_owner_is_gone_is_taken_over(storage):
    folder = epath.Path("gs://bucket/a")
    folder.mkdir(parents=True)
    (folder / ".lease").write_text("host:1:dead\n17\n")
    with lease.held(folder):
        assert "dead" not in (folder / ".lease").read_text()


def test_of_two_that_start_at_once_one_stays(storage):
    folder = epath.Path("gs://bucket/a")
    folder.mkdir(parents=True)
    ends, both = [], threading.Barrier(2)

    def run():
        both.wait()
        try:
            with lease.held(folder):
                both.wait(timeout=5)
                ends.append("held")
        except errors.WorkdirError:
            ends.append("refused")
            both.wait(timeout=5)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends) == ["held", "refused"]


def test_other_configs_are_refused_there(storage):
    config = config_lib.Config()
    with workdir.opened("gs://bucket/a", config):
        pass
    other = dataclasses.replace(config, seed=1)
    with (
        pytest.raises(errors.WorkdirError, match="seed: 0 there, 1 now"),
        workdir.opened("gs://bucket/a", other),
    ):
        pass

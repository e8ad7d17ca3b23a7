"""Plans renewed during training, stopped in the middle, and resumed bit for bit."""

import dataclasses

import jax
import multiprocess_run
import numpy as np
import pytest

from clusterjax import config as config_lib
from clusterjax import loop, train
from clusterjax import plan as plans
from experiments import artifacts
from experiments import run as run_lib


def _config():
    source = config_lib.SourceConfig(path="builtin:skills", max_examples=90)
    base = config_lib.Config()
    return dataclasses.replace(
        base,
        data=config_lib.DataConfig(sources=(source,), max_length=64),
        clustering=config_lib.ClusteringConfig(num_clusters=3, num_restarts=2),
        selection=config_lib.SelectionConfig(ratio=1.0, refresh_every=3),
        allocation=config_lib.AllocationConfig(batch_size=6, max_steps=8),
        train=config_lib.TrainConfig(log_every=1, checkpoint_every=2),
        mesh=config_lib.MeshConfig(num_simulated_devices=2),
        report=config_lib.ReportConfig(html=False),
        perf=config_lib.PerfConfig(feature_buckets=1),
    )


def test_a_plan_is_renewed_from_the_parameters_of_its_step(tmp_path):
    """Two steps each, by a decoder of one layer; other features, the same clusters."""
    multiprocess_run.make_model(tmp_path / "model")
    base = _config()
    config = dataclasses.replace(
        base,
        model=config_lib.ModelConfig(path=str(tmp_path / "model")),
        selection=dataclasses.replace(base.selection, refresh_every=2),
        allocation=config_lib.AllocationConfig(batch_size=6, max_steps=4),
        train=dataclasses.replace(base.train, save_model=False),
    )
    found = run_lib.execute(config, tmp_path / "run")
    steps = [line["step"] for line in found.result.history if line["kind"] == "train"]
    assert steps == [1, 2, 3, 4]
    first, second = (
        artifacts.load_features(tmp_path / "run" / part / "features")
        for part in ("", "renewal-1")
    )
    np.testing.assert_array_equal(first.uid, second.uid)
    assert np.abs(first.values - second.values).max() > 1e-3
    plan = plans.SelectionPlan.load(tmp_path / "run" / "renewal-1" / "plan")
    assert plan.num_clusters == found.plan.num_clusters == 3
    assert plan.fingerprint != found.plan.fingerprint


@pytest.mark.slow
def test_renewed_plans_resume_bit_equal(tmp_path, monkeypatch):
    whole = run_lib.execute(_config(), tmp_path / "whole")
    for stop in (2, 3, 5, 7):
        with monkeypatch.context() as patch:
            patch.setattr(loop.Loop, "_stopping", lambda _, done, s=stop: done == s)
            with pytest.raises(train.Preempted):
                run_lib.execute(_config(), tmp_path / "stopped")
    found = run_lib.execute(_config(), tmp_path / "stopped")
    a, b = (jax.tree.leaves(run.result.state) for run in (found, whole))
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    steps = [line["step"] for line in found.result.history if line["kind"] == "train"]
    assert steps == list(range(1, 9))
    assert (tmp_path / "whole" / "renewal-2" / "plan" / "plan.json").exists()

"""The whole line on a little real data: one report, the same run on any devices."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from clusterjax import config as config_lib
from clusterjax import errors, features
from experiments import measures, mechanism, saved_run
from experiments import run as run_lib


def _config(num_devices: int = 4, **selection) -> config_lib.Config:
    """About 200 short examples of both embedded sets, ten steps."""

    def sources(split: str, count: int) -> tuple[config_lib.SourceConfig, ...]:
        return tuple(
            config_lib.SourceConfig(path=path, split=split, max_examples=count)
            for path in ("builtin:stdlib_functions", "builtin:skills")
        )

    return config_lib.Config(
        data=config_lib.DataConfig(
            sources=sources("train", 80),
            eval_sources=sources("heldout", 12),
            max_length=128,
        ),
        clustering=config_lib.ClusteringConfig(num_clusters=3, num_restarts=3),
        selection=config_lib.SelectionConfig(**selection),
        allocation=config_lib.AllocationConfig(batch_size=10, num_epochs=1),
        train=config_lib.TrainConfig(
            optimizer=config_lib.OptimizerConfig(learning_rate=1e-3, warmup_steps=2),
            log_every=1,
        ),
        mesh=config_lib.MeshConfig(num_simulated_devices=num_devices),
        perf=config_lib.PerfConfig(feature_buckets=2, eval_batch_tokens=2048),
    )


@pytest.fixture(scope="module")
def four_devices(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return run_lib.execute(_config(4), folder / "run")


def _losses(run) -> np.ndarray:
    return np.array([x["loss"] for x in run.result.history if x["kind"] == "train"])


def test_a_run_leaves_everything_and_learns(four_devices):
    folder = four_devices.folder
    for name in ("config.json", "environment.json", "metrics.jsonl", "summary.json"):
        assert (folder / name).exists(), name
    assert (folder / "model" / "model.safetensors").exists()
    page = (folder / "report.html").read_text()
    assert "<script" in page and "http-equiv" not in page
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["final_eval"]["loss"] < summary["initial_eval"]["loss"]
    assert summary["num_kept"] < summary["num_examples"] <= 160
    stages = [x["stage"] for x in json.loads((folder / "ledger.json").read_text())]
    first = ["data", "features", "cluster", "select", "figures", "schedule"]
    assert stages[:6] == first


@pytest.mark.parametrize("num_devices", [1, 2])
def test_same_steps_and_losses_on_other_numbers_of_devices(
    four_devices, num_devices, tmp_path
):
    config = _config(num_devices)
    config = dataclasses.replace(config, report=config_lib.ReportConfig(html=False))
    other = run_lib.execute(config, tmp_path / "run")
    assert other.mesh.size == num_devices
    for step, there in zip(four_devices.schedule, other.schedule, strict=True):
        np.testing.assert_array_equal(step.example_id, there.example_id)
    # float32 sums in another order, through ten updates
    np.testing.assert_allclose(_losses(other), _losses(four_devices), rtol=1e-5)


def test_a_second_start_repeats_nothing(four_devices):
    config = _config(4)
    again = run_lib.execute(config, four_devices.folder)
    assert again.result.resumed_from == four_devices.schedule.num_steps
    for path, there in zip(
        jax.tree.leaves(again.result.state.params),
        jax.tree.leaves(four_devices.result.state.params),
        strict=True,
    ):
        np.testing.assert_array_equal(path, there)
    seconds = {e.stage: e.seconds for e in again.ledger.entries}
    first = {e.stage: e.seconds for e in four_devices.ledger.entries}
    assert seconds["features"] == first["features"]


def test_mechanism_is_measured_at_a_checkpoint(four_devices, monkeypatch, tmp_path):
    small = dataclasses.replace(mechanism.SKETCH, k_in=4, k_out=4, dim=64)
    monkeypatch.setattr(mechanism, "SKETCH", small)
    run = saved_run.load(four_devices.folder)
    (last,) = mechanism.checkpoint_steps(run)
    assert last == four_devices.schedule.num_steps
    found = mechanism.during(run, [last], renew=True)[f"{last}"]
    assert 0 < found["cosine"] < 0.99  # the gradients have turned
    # The same figures, from the trained model itself.
    sketch = features.compute(four_devices.result.model, run.corpus, small)
    expected = measures.mechanism(
        sketch,
        four_devices.schedule,
        sketch_seed=small.seed,
        chosen_by=("proxy", 0),
        rng=np.random.default_rng(0),
    )
    for name, value in dataclasses.asdict(expected).items():
        assert found[name] == pytest.approx(value, rel=1e-4), name
    assert found["renewed"]["noise"] != found["noise"]


@pytest.mark.parametrize("method", ["full", "random"])
def test_plain_baselines_in_a_relative_folder(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = run_lib.execute(_config(2, method=method, num_kept=40), "run")
    kept = len(run.plan.example_id)
    assert kept == (run.corpus.num_examples if method == "full" else 40)
    assert run.features is None and run.clusters is None
    assert (run.folder / "report.html").exists()


def test_more_clusters_than_examples_stop_before_the_feature_pass(tmp_path):
    config = _config(4)
    config = dataclasses.replace(
        config, clustering=config_lib.ClusteringConfig(num_clusters=500)
    )
    with pytest.raises(errors.ConfigError, match="num_clusters=500 is more than the"):
        run_lib.execute(config, tmp_path / "run")
    assert not (tmp_path / "run" / "features").exists()

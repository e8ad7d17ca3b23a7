"""Features collected from the passes that train: exact, resumable, or refused."""

import dataclasses
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
import training_cases

from clusterjax import checkpoint, collection, errors, features, loop, steps, train
from clusterjax import config as config_lib
from clusterjax import mesh as mesh_lib
from clusterjax import step as step_lib
from clusterjax.features import collected, vectors
from clusterjax.selection import quotas
from experiments import first_epoch, history, saved_run
from experiments import run as run_lib

CHILD = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
from clusterjax import distributed
distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
import pathlib
import numpy as np
import first_epoch_test as cases
import training_cases
from clusterjax import config
from clusterjax import mesh as mesh_lib
folder = pathlib.Path(sys.argv[3])
corpus = training_cases.corpus()
schedule = training_cases.schedule(corpus)
mesh = mesh_lib.build(config.MeshConfig())
found = cases._train(training_cases.model(), corpus, schedule, mesh, folder)
np.save(folder / f"raw-{sys.argv[2]}.npy", found.gather(corpus.num_examples)[0])
again = cases.collection.Collection(folder / "features", schedule.num_steps, 1)
again.resume(schedule.num_steps)
np.save(folder / f"read-{sys.argv[2]}.npy", again.gather(corpus.num_examples)[0])
"""


def _corpus():
    corpus = training_cases.corpus()
    hashes = np.arange(2 * corpus.num_examples, dtype=np.uint64).reshape(-1, 2)
    return dataclasses.replace(corpus, content_hash=hashes)


def _train(model, corpus, schedule, mesh, folder, **perf):
    """Trains an epoch that collects, with a checkpoint at every step."""
    shards = mesh_lib.num_shards(mesh)
    found = collection.Collection(
        folder / "features",
        schedule.num_steps,
        collection.slots_needed(
            schedule.place(step, shards) for step in range(schedule.num_steps)
        ),
    )
    cfg = config_lib.TrainConfig(
        optimizer=config_lib.OptimizerConfig(name="sgd", learning_rate=0.5),
        checkpoint_every=1,
        keep_checkpoints=10,
        save_model=False,
    )
    perf = config_lib.PerfConfig(**perf)
    train.fit(model, corpus, schedule, cfg, mesh, folder, perf=perf, collect=found)
    return found


# (data, fsdp, tensor), micro-steps, packing, remat
@pytest.mark.parametrize(
    ("shape", "micro_steps", "packing", "remat"),
    [
        ((1, 1, 1), 1, True, "none"),
        ((4, 1, 1), 1, True, "none"),
        ((2, 1, 1), 3, False, "full"),
        ((2, 2, 2), 2, True, "none"),
    ],
)
def test_collected_feature_is_that_of_the_step_that_trained(
    make_mesh, tmp_path, shape, micro_steps, packing, remat
):
    corpus, model = _corpus(), training_cases.model()
    schedule = training_cases.schedule(
        corpus, accumulation_steps=micro_steps, packing=packing
    )
    found = _train(model, corpus, schedule, make_mesh(*shape), tmp_path, remat=remat)
    raw_NH, loss_N = found.gather(corpus.num_examples)
    tmpl, initial = step_lib.split(model)
    seen = []
    for step in range(schedule.num_steps):
        params = initial
        if step:
            params = checkpoint.read_params(tmp_path / "checkpoints", step)
        expected = features.compute(
            tmpl.merge(params, {})[0], corpus, config_lib.FeaturesConfig()
        )
        ids = schedule.step(step).example_id
        raw = vectors.raw(expected)
        limit = np.maximum(expected.norm, 0.01 * np.median(expected.norm))
        gap = np.linalg.norm(raw_NH[ids] - raw[ids], axis=1)
        assert np.max(gap / limit[ids]) <= 1e-5
        np.testing.assert_allclose(loss_N[ids], expected.loss[ids], rtol=1e-5)
        seen.extend(ids)
    # The parameters moved far enough that a wrong step would show.
    last = np.linalg.norm(raw_NH - vectors.raw(expected), axis=1)
    first = schedule.step(0).example_id
    assert np.median(last[first] / expected.norm[first]) > 1e-3
    assert sorted(seen) == list(range(corpus.num_examples))


def test_training_is_not_changed_by_collecting(make_mesh, tmp_path):
    corpus, model = _corpus(), training_cases.model()
    schedule = training_cases.schedule(corpus)
    mesh = make_mesh(2)
    _train(model, corpus, schedule, mesh, tmp_path / "a")
    cfg = config_lib.TrainConfig(
        optimizer=config_lib.OptimizerConfig(name="sgd", learning_rate=0.5),
        save_model=False,
    )
    plain = train.fit(model, corpus, schedule, cfg, mesh, tmp_path / "b")
    after = checkpoint.read_params(tmp_path / "a" / "checkpoints", schedule.num_steps)
    for name, value in plain.state.params.items():
        np.testing.assert_allclose(after[name], np.asarray(value), rtol=0, atol=1e-6)


def test_finished_features_equal_those_of_a_pass(make_mesh, tmp_path):
    """A learning rate of next to nothing: all steps have the first parameters."""
    corpus, model = _corpus(), training_cases.model()
    schedule = training_cases.schedule(corpus)
    cfg = config_lib.TrainConfig(
        optimizer=config_lib.OptimizerConfig(name="sgd", learning_rate=1e-30),
        save_model=False,
    )
    found = collection.Collection(tmp_path / "f", schedule.num_steps, 40)
    train.fit(model, corpus, schedule, cfg, make_mesh(), tmp_path, collect=found)
    for settings in ({}, {"dim": 8}, {"center": "mean"}):
        chosen = config_lib.FeaturesConfig(**settings)
        ours = collected.from_training(
            *found.gather(corpus.num_examples), corpus, chosen, "origin"
        )
        pass_ = features.compute(model, corpus, chosen)
        np.testing.assert_allclose(ours.values, pass_.values, atol=2e-5)
        np.testing.assert_allclose(ours.norm, pass_.norm, rtol=1e-5)
        np.testing.assert_array_equal(ours.example_id, pass_.example_id)
        assert ours.fingerprint != pass_.fingerprint


def test_broken_example_is_a_reject_and_alone():
    hidden_PH = np.ones((6, 3), np.float32)
    hidden_PH[4] = np.inf
    nll_P = np.full(6, np.log(4), np.float32)
    example_P = np.array([5, 5, 7, -1, 2, -1])
    found = collection.collect(hidden_PH, nll_P, example_P, slots=3, num_shards=2)
    np.testing.assert_array_equal(found.example_id, [5, 7, -1, 2, -1, -1])
    np.testing.assert_allclose(found.raw[:2], -0.75 * np.ones((2, 3)), rtol=1e-6)
    assert np.isnan(found.raw[3]).all() and np.isnan(found.loss[3])


def test_slots_are_those_of_the_fullest_shard():
    step = steps.Step(0, 0, *(np.zeros(5, int) for _ in range(4)))
    placed = steps.Placement(
        step,
        *(np.zeros(5, int) for _ in range(1)),
        shard=np.array([0, 1, 1, 1, 0]),
        micro_step=np.array([0, 0, 0, 1, 1]),
        row=np.zeros(5, int),
        start=np.zeros(5, int),
        segment=np.zeros(5, int),
        num_shards=2,
        num_micro_steps=2,
        num_rows=1,
        row_length=8,
        num_labels=8,
    )
    assert collection.slots_needed([placed]) == 2


def test_collection_forgets_what_is_after_the_checkpoint(tmp_path):
    def part(i):
        ids = np.array([[i]])
        return collection.Collected(np.full((1, 1, 2), i), np.full((1, 1), i), ids)

    first = collection.Collection(tmp_path, 4, 1)
    for step in range(3):
        first.add(step, part(step))
        first.flush(step + 1)
    again = collection.Collection(tmp_path, 4, 1)
    again.resume(2)
    for step in (2, 3):
        again.add(step, part(step + 10))
    again.flush(4)
    last = collection.Collection(tmp_path, 4, 1)
    last.resume(9)  # a later checkpoint: nothing is collected after step 4
    raw, loss = last.gather(14)
    np.testing.assert_array_equal(np.flatnonzero(np.isfinite(loss)), [0, 1, 12, 13])
    np.testing.assert_array_equal(raw[12], [12, 12])
    with pytest.raises(errors.WorkdirError, match="another --workdir"):
        collection.Collection(tmp_path / "none", 4, 1).resume(1)


def _config(**changes):
    source = config_lib.SourceConfig(path="builtin:skills", max_examples=60)
    base = config_lib.Config(
        data=config_lib.DataConfig(sources=(source,), max_length=64),
        features=config_lib.FeaturesConfig(during_first_epoch=True),
        clustering=config_lib.ClusteringConfig(
            num_clusters=3, num_restarts=2, min_cluster_size=2
        ),
        selection=config_lib.SelectionConfig(
            quota="waterfill", target_fraction=0.5, keep="herding"
        ),
        allocation=config_lib.AllocationConfig(batch_size=12, num_epochs=3),
        train=config_lib.TrainConfig(
            log_every=1, checkpoint_every=2, keep_checkpoints=20, save_model=False
        ),
        mesh=config_lib.MeshConfig(num_simulated_devices=2),
        report=config_lib.ReportConfig(html=False),
    )
    groups = {
        group: dataclasses.replace(getattr(base, group), **keys)
        for group, keys in changes.items()
    }
    return dataclasses.replace(base, **groups)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"features": {"kind": "probe"}}, "features.kind"),
        ({"features": {"num_layers": 1}}, "features.num_layers"),
        ({"features": {"max_tokens": 9}}, "features.max_tokens"),
        ({"features": {"model": "builtin"}}, "features.model"),
        ({"selection": {"method": "random"}}, "selection.method"),
        ({"selection": {"method": "target"}}, "selection.method"),
        ({"selection": {"refresh_every": 2}}, "refresh_every"),
        ({"selection": {"never_keep": ("a",)}}, "never_keep"),
        ({"selection": {"quota": "min"}}, "max_steps"),
        (
            {"selection": {"method": "stratified", "budget": "tokens"}},
            "budget='tokens'",
        ),
        ({"allocation": {"last_step": "drop"}}, "last_step"),
        ({"allocation": {"num_epochs": 1}}, "num_epochs"),
        ({"model": {"lora": config_lib.LoraConfig(2, dropout=0.1)}}, "dropout"),
    ],
)
def test_what_cannot_be_collected_is_refused_at_once(changes, named):
    with pytest.raises(errors.ConfigError, match=named):
        first_epoch.check(_config(**changes))


def test_steps_are_those_of_both_parts():
    config = _config()
    first_epoch.check(config)
    later = first_epoch.later_allocation(config, 61)
    assert first_epoch.num_steps(config, 61) == 6
    # Two later epochs of half the examples.
    assert later.max_steps == 2 * -(-quotas.target_count(0.5, 61) // 12)
    fixed = _config(allocation={"max_steps": 9}, selection={"quota": "min"})
    first_epoch.check(fixed)
    assert first_epoch.later_allocation(fixed, 61).max_steps == 3
    with pytest.raises(errors.ConfigError, match="ends before"):
        first_epoch.later_allocation(_config(allocation={"max_steps": 6}), 61)
    plain = _config(features={"during_first_epoch": False})
    assert first_epoch.num_steps(plain, 61) == 0
    assert first_epoch.later_allocation(plain, 61).num_epochs == 3


def test_clock_counts_selection_after_the_first_epoch():
    ledger = [
        {"stage": name, "seconds": seconds}
        for name, seconds in (("data", 1), ("train", 50), ("select", 2), ("report", 9))
    ]
    line = {"kind": "eval", "step": 5, "loss": 1.0, "time": 40.0}
    assert history.build([line], ledger).heldout[0].seconds == 43


@pytest.mark.slow
def test_stopped_runs_give_the_same_plan_and_parameters(tmp_path, monkeypatch):
    whole = run_lib.execute(_config(), tmp_path / "whole")
    for stop in (1, 3, 5, 6, 8):
        with monkeypatch.context() as patch:
            patch.setattr(loop.Loop, "_stopping", lambda _, done, s=stop: done == s)
            with pytest.raises(train.Preempted):
                run_lib.execute(_config(), tmp_path / "stopped")
    found = run_lib.execute(_config(), tmp_path / "stopped")
    assert found.plan.fingerprint == whole.plan.fingerprint
    np.testing.assert_array_equal(found.features.values, whole.features.values)
    a, b = (jax.tree.leaves(run.result.state) for run in (found, whole))
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    lines = [line for line in found.result.history if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, 12))
    assert found.summary["num_steps"] == 11
    assert found.summary["num_kept"] == 30
    stages = found.summary["seconds_by_stage"]
    assert stages["features"] < stages["train"]
    again = saved_run.load(tmp_path / "stopped")
    assert again.schedule is not None and again.schedule.num_steps == 6
    assert again.schedule.fingerprint == found.schedule.fingerprint


@pytest.mark.slow
def test_every_process_has_the_features_of_all(make_mesh, tmp_path):
    tests = pathlib.Path(__file__).parent
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = os.pathsep.join([str(tests.parent), str(tests)])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(port), str(i), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": paths},
        )
        for i in (0, 1)
    ]
    try:
        assert [process.wait(timeout=600) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    corpus = training_cases.corpus()
    one = _train(
        training_cases.model(),
        corpus,
        training_cases.schedule(corpus),
        make_mesh(4),
        tmp_path / "one",
    )
    expected = one.gather(corpus.num_examples)[0]
    for name in ("raw-0", "raw-1", "read-0", "read-1"):
        found = np.load(tmp_path / f"{name}.npy")
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)

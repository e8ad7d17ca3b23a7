"""Stopped anywhere and resumed anywhere: the same steps, bit for bit."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import training_cases

from clusterjax import config, errors, faults, loop, train
from clusterjax import input as input_lib

CONFIG = config.TrainConfig(
    optimizer=config.OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
    log_every=2,
    eval_every=3,
    checkpoint_every=2,
    save_model=False,
)


class _Crash(BaseException):
    """Not an Exception, so that nothing on the way up tidies after it."""


def _fit(mesh, folder, cfg=CONFIG, in_background=True, corpus=None):
    corpus = corpus or training_cases.corpus()
    return train.fit(
        training_cases.model(),
        corpus,
        training_cases.schedule(corpus, num_epochs=3),
        cfg,
        mesh,
        folder,
        eval_corpus=training_cases.corpus(6, seed=5),
        perf=config.PerfConfig(vocab_chunk=25, async_checkpoints=in_background),
    )


def _lines(folder):
    """metrics.jsonl without times."""
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "time"} for line in lines]


def _arrays(result):
    return [np.asarray(x) for x in jax.tree.leaves(result.state)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:2]).reshape(2, 1, 1), ("data", "fsdp", "tensor")
    )
    return _arrays(_fit(mesh, folder)), _lines(folder)


@pytest.mark.parametrize(
    ("point", "count"),
    [
        ("train.step", 1),
        ("train.step", 7),
        ("checkpoint.before", 3),
        ("checkpoint.writing", 2),
        ("train.log", 4),
        ("eval", 3),
        ("train.compile", 1),
    ],
)
def test_resumes_bit_equal(make_mesh, tmp_path, monkeypatch, undisturbed, point, count):
    """CASES 26: 40 examples, 3 epochs; state, lines and order as without the stop."""
    hits = []

    def strike(name):
        hits.append(name)
        if name == point and hits.count(point) == count:
            raise _Crash

    with monkeypatch.context() as patch:
        patch.setattr(faults, "point", strike)
        with pytest.raises(_Crash):
            _fit(make_mesh(2), tmp_path)
    found = _fit(make_mesh(2), tmp_path)
    arrays, lines = undisturbed
    for a, b in zip(_arrays(found), arrays, strict=True):
        np.testing.assert_array_equal(a, b)
    assert _lines(tmp_path) == lines


def test_asked_to_stop_saves_and_ends_with_a_code_of_its_own(
    make_mesh, tmp_path, monkeypatch, undisturbed
):
    monkeypatch.setattr(loop.Loop, "_stopping", lambda self, done: done == 5)
    with pytest.raises(train.Preempted) as stopped:
        _fit(make_mesh(2), tmp_path)
    assert (stopped.value.code, stopped.value.step) == (75, 5)
    monkeypatch.undo()
    found = _fit(make_mesh(2), tmp_path)
    assert found.resumed_from == 5
    for a, b in zip(_arrays(found), undisturbed[0], strict=True):
        np.testing.assert_array_equal(a, b)


def test_goes_on_with_another_number_of_devices(
    make_mesh, tmp_path, monkeypatch, undisturbed
):
    """8 → 4 → 2 (sharded parameters) → 2 × 2 × 2: the same ids and losses by step."""
    seen = {}
    rows = input_lib.Layout.rows

    def recorded(self, step, shards):
        item = rows(self, step, shards)
        seen[step] = sorted(set(item.batch.example_id.ravel().tolist()) - {-1})
        return item

    monkeypatch.setattr(input_lib.Layout, "rows", recorded)
    for stop, shape in ((2, (8,)), (4, (4,)), (6, (1, 2))):
        with monkeypatch.context() as patch:
            patch.setattr(loop.Loop, "_stopping", lambda self, done, s=stop: done == s)
            with pytest.raises(train.Preempted):
                _fit(make_mesh(*shape), tmp_path)
    found = _fit(make_mesh(2, 2, 2), tmp_path)
    assert found.resumed_from == 6
    schedule = training_cases.schedule(training_cases.corpus(), num_epochs=3)
    ids = {step.step: sorted(step.example_id.tolist()) for step in schedule}
    assert seen == ids
    lines = _lines(tmp_path)
    assert [x["step"] for x in lines] == [x["step"] for x in undisturbed[1]]
    for a, b in zip(lines, undisturbed[1], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a.get("labels") == b.get("labels")


def test_other_data_or_settings_are_refused(make_mesh, tmp_path):
    _fit(make_mesh(1), tmp_path)
    other = training_cases.corpus(seed=9)
    with pytest.raises(errors.CheckpointError, match="corpus='corpus-40-0'"):
        changed = dataclasses.replace(
            other, num_labels=training_cases.corpus().num_labels
        )
        _fit(make_mesh(1), tmp_path, corpus=changed)
    changed = dataclasses.replace(
        CONFIG, optimizer=dataclasses.replace(CONFIG.optimizer, learning_rate=1.0)
    )
    with pytest.raises(errors.CheckpointError, match="optimizer="):
        _fit(make_mesh(1), tmp_path, changed)


def test_a_finished_run_is_not_trained_again(make_mesh, tmp_path, capsys):
    first = _fit(make_mesh(1), tmp_path)
    again = _fit(make_mesh(1), tmp_path)
    assert again.resumed_from == 9
    assert again.final_eval == first.final_eval
    assert again.history == first.history


class _Rest:
    """The steps of a schedule from `first` on, as a renewed plan would bring them."""

    def __init__(self, schedule, first):
        self._schedule, self._first = schedule, first
        self.num_steps = schedule.num_steps - first
        self.num_labels, self.plan = schedule.num_labels, schedule.plan
        self.fingerprint = "renewed"

    def place(self, step, num_shards):
        return self._schedule.place(step + self._first, num_shards)

    def labels_needed(self, num_shards):
        return self._schedule.labels_needed(num_shards)


def test_a_renewed_plan_takes_over(make_mesh, tmp_path, undisturbed):
    """In two parts with a schedule each: the same run, if the steps are the same."""
    corpus = training_cases.corpus()
    schedule = training_cases.schedule(corpus, num_epochs=3)
    parts = (
        (schedule, {"stop_at": 4, "total_steps": 9}),
        (_Rest(schedule, 4), {"start_at": 4}),
    )
    for part, settings in parts:
        found = train.fit(
            training_cases.model(),
            corpus,
            part,
            CONFIG,
            make_mesh(2),
            tmp_path,
            eval_corpus=training_cases.corpus(6, seed=5),
            perf=config.PerfConfig(vocab_chunk=25),
            **settings,
        )
    for a, b in zip(_arrays(found), undisturbed[0], strict=True):
        np.testing.assert_array_equal(a, b)
    assert _lines(tmp_path) == undisturbed[1]

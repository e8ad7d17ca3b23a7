"""Two processes with two devices each, over loopback, against one with four."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import training_cases

from clusterjax import config, train

CHILD = pathlib.Path(__file__).parent / "multiprocess_child.py"
ROOT = CHILD.parent.parent


def _start(folder, faults=("", ""), seeds=(0, 0), epochs=2):
    """Starts both processes; returns them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pathlib.Path(folder).mkdir(exist_ok=True)
    started = []
    for process in (0, 1):
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(CHILD.parent)]),
            "CLUSTERJAX_FAULT": faults[process],
        }
        command = [sys.executable, str(CHILD), str(port), "2", str(process)]
        started.append(
            subprocess.Popen(
                [*command, str(folder), str(seeds[process]), str(epochs)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return started


def _finish(processes, limit=600):
    try:
        said = [process.communicate(timeout=limit)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], said


def _lines(folder):
    text = pathlib.Path(folder, "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:4]).reshape(2, 2, 1), ("data", "fsdp", "tensor")
    )
    corpus = training_cases.corpus()
    result = train.fit(
        training_cases.model(),
        corpus,
        training_cases.schedule(corpus, num_epochs=2),
        config.TrainConfig(
            optimizer=config.OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
            log_every=1,
            statistics_every=3,
            save_model=False,
        ),
        mesh,
        folder,
        eval_corpus=training_cases.corpus(6, seed=5),
        perf=config.PerfConfig(vocab_chunk=25),
    )
    total = sum(
        float(np.abs(np.asarray(x)).sum()) for x in result.state.params.values()
    )
    return _lines(folder), total


def _check_same(folder, one_process):
    lines, total = one_process
    found = _lines(folder)
    assert len(found) == len(lines)
    for a, b in zip(found, lines, strict=True):
        assert (a["step"], a["kind"]) == (b["step"], b["kind"])
        for name in ("loss", "token_loss", "grad_norm", "worker_cosine"):
            if name in b:
                assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-5)
    for process in (0, 1):
        seen = json.loads((folder / f"seen-{process}.json").read_text())
        assert seen["sum"] == pytest.approx(total, rel=1e-5)


def test_two_processes_train_like_one(tmp_path, one_process):
    codes, said = _finish(_start(tmp_path))
    assert codes == [0, 0], said
    _check_same(tmp_path, one_process)
    for process in (0, 1):
        seen = json.loads((tmp_path / f"seen-{process}.json").read_text())
        for shards, shape in seen["rows"]:
            # Each process filled the rows of its own two data shards, and no others.
            assert shards == [2 * process, 2 * process + 1]
            assert shape[1] % 2 == 0
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_different_inputs_end_both(tmp_path):
    codes, said = _finish(_start(tmp_path, seeds=(0, 1)))
    assert 0 not in codes
    for text in said:
        assert "the processes have different inputs" in text
        assert "corpus (process 1 has another than process 0)" in text


@pytest.mark.slow
@pytest.mark.parametrize("point", ["train.step:3", "checkpoint.writing:1", "eval:1"])
def test_the_death_of_one_ends_the_other_and_all_resume(tmp_path, one_process, point):
    processes = _start(tmp_path, faults=("", point))
    processes[1].wait(timeout=300)
    died = time.monotonic()
    processes[0].wait(timeout=90)
    assert time.monotonic() - died < 60
    codes, _ = _finish(processes)
    assert codes[1] == -9 and codes[0] != 0
    codes, said = _finish(_start(tmp_path))
    assert codes == [0, 0], said
    _check_same(tmp_path, one_process)


@pytest.mark.slow
def test_sigterm_to_one_stops_both_at_the_same_step(tmp_path):
    """JAX tells the other process within some seconds: 180 steps are enough."""
    codes, said = _finish(_start(tmp_path, ("", "train.step:2:TERM"), epochs=60))
    assert codes == [75, 75], said
    steps = [int(p.name) for p in (tmp_path / "checkpoints").iterdir()]
    assert 2 <= max(steps) < 180
    for text in said[:1]:
        assert f"saved at step {max(steps)}" in text

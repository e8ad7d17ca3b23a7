"""metrics.jsonl holds every step once, whatever happened."""

import dataclasses
import json

import numpy as np

from clusterjax import metrics


def _steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_resuming_drops_later_and_broken_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = metrics.Log(path, -1)
    for step in (1, 2, 3):
        log.write(step, "train", {"loss": 1.0 / step})
    with path.open("a") as file:
        file.write('{"step": 4, "kind": "tr')
    again = metrics.Log(path, 2)
    assert _steps(path) == [1, 2]
    assert [line["step"] for line in metrics.read(path)] == [1, 2]
    again.write(3, "train", {"loss": np.float32(0.5), "bad": float("nan")})
    last = json.loads(path.read_text().splitlines()[-1])
    assert last == {"step": 3, "kind": "train", "loss": 0.5, "bad": None}
    metrics.Log(path, -1)
    assert metrics.read(path) == []
    assert _steps(path) == []


def test_totals_survive_a_stop_inside_a_window():
    whole, stopped = metrics.Totals(), metrics.Totals()
    for k in range(3):
        whole.add(10, 4, 0.1 * k, 0.4 * k)
    stopped.add(10, 4, 0.0, 0.0)
    resumed = metrics.Totals(**json.loads(json.dumps(dataclasses.asdict(stopped))))
    for k in (1, 2):
        resumed.add(10, 4, 0.1 * k, 0.4 * k)
    assert resumed == whole
    assert whole.window() == resumed.window()
    assert whole.so_far() == {"tokens": 30, "labels": 12, "skipped": 0}

"""Blows at many moments of one run; see experiments/bench/survival.py."""

import pytest

from experiments.bench import survival


@pytest.mark.slow
def test_a_run_killed_at_every_stage_ends_bit_equal(tmp_path):
    rows = survival.survive(tmp_path, devices=2, kind="KILL")
    assert sum(row["code"] == -9 for row in rows) >= 20


@pytest.mark.slow
def test_a_run_stopped_by_sigterm_ends_bit_equal(tmp_path):
    """Before training the signal just ends it; from then on the state is saved."""
    moments = ("stage.cluster:1", "train.step:3", "checkpoint.writing:2", "eval:1")
    rows = survival.survive(tmp_path, devices=2, kind="TERM", moments=moments)
    assert [row["code"] for row in rows] == [-15, 75, 75, 75]

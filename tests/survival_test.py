"""Kill -9 at 22 moments of one run; see experiments/bench/survival.py."""

import pytest

from experiments.bench import survival


@pytest.mark.slow
def test_a_run_killed_at_every_stage_ends_bit_equal(tmp_path):
    rows = survival.survive(tmp_path, devices=2, kind="KILL")
    assert sum(row["code"] == -9 for row in rows) >= 20

"""Plans on disk: exact, whole or not at all, checked."""

import dataclasses

import numpy as np
import planning_cases
import pytest

from clusterjax import allocation, config, errors, files, selection


def _assert_equal(a, b):
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            np.testing.assert_array_equal(x, y, err_msg=field.name)
            assert x.dtype == y.dtype, field.name
        else:
            assert x == y, field.name


@pytest.mark.parametrize("method", ["cluster", "uniform", "near_duplicate"])
def test_a_saved_plan_comes_back_bit_by_bit(tmp_path, method):
    feats = planning_cases.features(90)
    clusters = planning_cases.clusters(planning_cases.sized([50, 30, 10]))
    cfg = config.SelectionConfig(method=method, must_keep=("s:1",), share="tokens")
    plan = selection.select(clusters, feats, cfg)
    plan.save(tmp_path / "plan")
    again = selection.SelectionPlan.load(tmp_path / "plan")
    _assert_equal(plan, again)
    assert plan.fingerprint == again.fingerprint
    assert selection.SelectionPlan.exists(tmp_path / "plan")


def test_kept_and_pruned_are_a_partition():
    plan = planning_cases.plan([30, 20], keep="farthest", ratio=0.5)
    both = np.sort(np.concatenate([plan.example_id, plan.pruned_id]))
    np.testing.assert_array_equal(both, np.arange(50))
    assert (np.diff(plan.example_id) > 0).all()
    assert plan.uid.tolist() == [f"s:{i}" for i in plan.example_id]


def test_herded_order_is_stored(tmp_path):
    plan = planning_cases.plan([30, 20])
    feats = planning_cases.features(50)
    cfg = config.AllocationConfig(batch_size=8, order="herded")
    labels = plan.num_labels
    schedule = allocation.allocate(plan, labels + 3, labels, cfg, feats)
    schedule.plan.save(tmp_path)
    again = selection.SelectionPlan.load(tmp_path)
    _assert_equal(schedule.plan, again)
    # No features are needed any more, and the schedule is the same.
    later = allocation.allocate(again, labels + 3, labels, cfg)
    np.testing.assert_array_equal(later.members(0), schedule.members(0))
    other = dataclasses.replace(cfg, batch_size=16)
    with pytest.raises(errors.PlanError, match="needs gradient features"):
        allocation.allocate(again, labels + 3, labels, other)


def test_damage_is_seen(tmp_path):
    plan = planning_cases.plan([30, 20])
    plan.save(tmp_path)
    whole = (tmp_path / "plan.parquet").read_bytes()
    (tmp_path / "plan.parquet").write_bytes(whole[:-10] + b"0123456789")
    with pytest.raises(errors.PlanError, match=r"plan\.parquet does not fit"):
        selection.SelectionPlan.load(tmp_path)
    (tmp_path / "plan.parquet").unlink()
    with pytest.raises(errors.PlanError, match="missing"):
        selection.SelectionPlan.load(tmp_path)
    (tmp_path / "plan.json").write_text('{"format": ')
    with pytest.raises(errors.PlanError, match="damaged"):
        selection.SelectionPlan.load(tmp_path)
    with pytest.raises(errors.PlanError, match="holds no plan"):
        selection.SelectionPlan.load(tmp_path / "elsewhere")


def test_an_edited_manifest_or_another_format_is_refused(tmp_path):
    planning_cases.plan([30, 20]).save(tmp_path)
    manifest = files.read_json(tmp_path / "plan.json")
    share = [(0.5).hex()] * 2
    files.write_json(tmp_path / "plan.json", manifest | {"cluster_share_hex": share})
    with pytest.raises(errors.PlanError, match="edited"):
        selection.SelectionPlan.load(tmp_path)
    files.write_json(tmp_path / "plan.json", manifest | {"format_version": 99})
    with pytest.raises(errors.PlanError, match="99"):
        selection.SelectionPlan.load(tmp_path)


def test_a_save_that_breaks_off_is_recognised(tmp_path, monkeypatch):
    old = planning_cases.plan([30, 20])
    old.save(tmp_path)
    new = planning_cases.plan([30, 20], keep="nearest", ratio=0.5)

    def broken(path, value):
        raise OSError("disk full")

    monkeypatch.setattr(files, "write_json", broken)
    with pytest.raises(OSError, match="disk full"):
        new.save(tmp_path)
    with pytest.raises(errors.PlanError, match="does not fit the checksum"):
        selection.SelectionPlan.load(tmp_path)


def test_static_weights_give_every_cluster_its_share():
    weight = np.linspace(0.5, 2, 50)
    plan = planning_cases.plan([30, 20], keep="nearest", ratio=0.5, user_weight=weight)
    total = np.bincount(plan.cluster_id, plan.static_weight) / plan.num_kept
    np.testing.assert_allclose(total, plan.cluster_share, rtol=1e-12)
    plain = planning_cases.plan([30, 20], keep="nearest", ratio=0.5)
    expected = plain.num_kept * plain.cluster_share / plain.quota
    np.testing.assert_allclose(
        plain.static_weight, expected[plain.cluster_id], rtol=1e-12
    )


def test_fingerprint_tells_plans_apart():
    plan = planning_cases.plan([30, 20])
    others = [
        planning_cases.plan([30, 20], weighting="sqrt"),
        planning_cases.plan([30, 20], normalise="example"),
        planning_cases.plan([30, 20], keep="nearest"),
        planning_cases.plan([20, 30]),
    ]
    assert len({plan.fingerprint, *(other.fingerprint for other in others)}) == 5

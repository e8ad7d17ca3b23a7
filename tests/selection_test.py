"""Quotas, keep rules, forced ids, baselines and shares, against golden data."""

import dataclasses
import pathlib

import numpy as np
import planning_cases
import pytest

from clusterjax import config, datatypes, errors, selection, subset
from clusterjax.selection import keep, quotas

GOLDEN = pathlib.Path(__file__).parent / "golden" / "selection"
GOLDEN_NAMES = ("even_k4", "skewed_k4", "skewed_k8", "tiny_cluster_k3")
# The published code names a rule by what it prunes.
PUBLISHED_NAME = {"farthest": "close", "nearest": "far", "mixed": "mix"}


def _golden(name: str):
    stored = np.load(GOLDEN / f"{name}.npz")
    label = stored["final_label"]
    clusters = dataclasses.replace(
        planning_cases.clusters(label),
        centroids=stored["centroids"],
        distance=stored["final_sqdist"],
    )
    feats = planning_cases.features(len(label), values=stored["features"])
    return stored, clusters, feats


@pytest.mark.parametrize("name", GOLDEN_NAMES)
@pytest.mark.parametrize("ratio", [1.0, 0.75, 0.5])
@pytest.mark.parametrize("rule", PUBLISHED_NAME)
def test_golden_kept_sets_and_quotas(name, ratio, rule):
    stored, clusters, feats = _golden(name)
    cfg = config.SelectionConfig(ratio=ratio, keep=rule, min_kept_fraction=0.0)
    percent = round(100 * ratio)
    plan = selection.select(clusters, feats, cfg)
    assert set(plan.quota.tolist()) == {int(stored[f"quota_{percent}"])}
    for cluster in range(plan.num_clusters):
        expected = stored[f"kept_{PUBLISHED_NAME[rule]}_{percent}_c{cluster}"]
        found = plan.example_id[plan.cluster_id == cluster]
        np.testing.assert_array_equal(found, np.sort(expected))


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_worker_weights(name):
    stored, clusters, feats = _golden(name)
    cfg = config.SelectionConfig(min_kept_fraction=0.0)
    plan = selection.select(clusters, feats, cfg)
    np.testing.assert_allclose(
        plan.num_clusters * plan.cluster_share, stored["worker_weight"], rtol=1e-14
    )


def test_min_quota_is_rational():
    # 0.29 * 100 is 28.999999999999996 in binary arithmetic.
    np.testing.assert_array_equal(quotas.minimum(np.array([100, 300]), 0.29), [29, 29])
    np.testing.assert_array_equal(quotas.minimum(np.array([1000]), 0.001), [1])
    assert quotas.target_count(0.07, 100) == 7


def test_waterfill_by_hand():
    sizes = np.array([3, 10, 20, 7])
    np.testing.assert_array_equal(quotas.waterfill(sizes, 24), [3, 7, 7, 7])
    # One each by cluster id, to clusters that have room.
    np.testing.assert_array_equal(quotas.waterfill(sizes, 25), [3, 8, 7, 7])
    np.testing.assert_array_equal(quotas.waterfill(sizes, 26), [3, 8, 8, 7])
    np.testing.assert_array_equal(quotas.waterfill(sizes, 40), sizes)
    np.testing.assert_array_equal(quotas.waterfill(sizes, 0), [0, 0, 0, 0])
    np.testing.assert_array_equal(
        quotas.waterfill(sizes, 20, np.array([0, 0, 12, 0])), [3, 3, 12, 2]
    )
    with pytest.raises(errors.PlanError, match="41"):
        quotas.waterfill(sizes, 41)


def test_waterfill_is_as_balanced_as_the_total_allows(rng):
    for _ in range(200):
        sizes = rng.integers(1, 30, rng.integers(1, 9))
        lowest = rng.integers(0, sizes + 1) * rng.integers(0, 2)
        total = int(rng.integers(lowest.sum(), sizes.sum() + 1))
        quota = quotas.waterfill(sizes, total, lowest)
        assert quota.sum() == total
        assert (quota >= lowest).all() and (quota <= sizes).all()
        # No transfer of one place from a larger to a smaller quota is possible.
        can_give, can_take = quota > lowest, quota < sizes
        if can_give.any() and can_take.any():
            assert quota[can_give].max() - quota[can_take].min() <= 1


def test_proportional_quotas(rng):
    np.testing.assert_array_equal(
        quotas.proportional(np.array([50, 30, 20]), 10), [5, 3, 2]
    )
    np.testing.assert_array_equal(
        quotas.proportional(np.array([990, 5, 5]), 100), [98, 1, 1]
    )
    for _ in range(200):
        sizes = rng.integers(1, 50, rng.integers(1, 9))
        total = int(rng.integers(len(sizes), sizes.sum() + 1))
        quota = quotas.proportional(sizes, total)
        assert quota.sum() == total
        assert (quota >= 1).all() and (quota <= sizes).all()


def test_zero_quota_is_an_error_that_says_so():
    # METHOD §6.3: "keep the last q" with q = 0 kept everything.
    clusters = planning_cases.clusters(planning_cases.sized([40, 3]))
    feats = planning_cases.features(43)
    cfg = config.SelectionConfig(ratio=0.3, min_kept_fraction=0.0)
    with pytest.raises(errors.PlanError, match="keeps 0 examples of cluster 1"):
        selection.select(clusters, feats, cfg)


def test_a_plan_that_keeps_too_little_stops_and_shows_the_sizes():
    # METHOD §6.2 in small: one tiny cluster shrinks everything.
    clusters = planning_cases.clusters(planning_cases.sized([400, 400, 200, 3]))
    feats = planning_cases.features(1003)
    with pytest.raises(errors.PlanError, match=r"keeps 8 of 1,003.*400, 400, 200, 3"):
        selection.select(clusters, feats, config.SelectionConfig(ratio=0.75))
    plan = selection.select(
        clusters, feats, config.SelectionConfig(quota="waterfill", target_fraction=0.3)
    )
    np.testing.assert_array_equal(plan.quota, [100, 99, 99, 3])


def test_ties_are_broken_by_example_id():
    clusters = dataclasses.replace(
        planning_cases.clusters(np.zeros(6, int)),
        distance=np.array([1, 2, 2, 2, 1, 3], np.float32),
    )
    feats = planning_cases.features(6, norm=np.array([1, 5, 5, 5, 1, 1]))

    def kept(rule):
        cfg = config.SelectionConfig(keep=rule, ratio=0.5)
        return selection.select(clusters, feats, cfg).example_id.tolist()

    assert kept("farthest") == [1, 2, 5]
    assert kept("nearest") == [0, 1, 4]
    assert kept("mixed") == [0, 1, 5]  # one nearest, then the two farthest
    assert kept("largest_norm") == [1, 2, 3]


def test_largest_norm_uses_raw_norms():
    # METHOD §6.6: after scaling to unit length the norms are rounding noise.
    norm = np.array([0.1, 3.0, 0.2, 2.0, 0.3, 1.0])
    feats = planning_cases.features(6, norm=norm)
    cfg = config.SelectionConfig(keep="largest_norm", ratio=0.5)
    plan = selection.select(planning_cases.clusters(np.zeros(6, int)), feats, cfg)
    assert plan.example_id.tolist() == [1, 3, 5]


def test_number_of_clusters_and_plan_do_not_know_devices():
    # METHOD §6.4 and §6.10: no input of the planner tells it how many devices exist.
    import inspect

    names = set(inspect.signature(selection.select).parameters)
    assert not names & {"mesh", "num_devices", "num_shards"}
    fields = {field.name for field in dataclasses.fields(config.SelectionConfig)}
    assert not any("device" in name or "worker" in name for name in fields)


def test_random_keep_depends_on_seed_and_ids_only():
    label = planning_cases.sized([30, 50])
    clusters, feats = planning_cases.clusters(label), planning_cases.features(80)

    def kept(seed):
        cfg = config.SelectionConfig(keep="random", ratio=0.5, seed=seed)
        return selection.select(clusters, feats, cfg).example_id

    np.testing.assert_array_equal(kept(1), kept(1))
    assert (kept(1) != kept(2)).any()


def _brute_k_center(values, count, start):
    chosen = [start]
    while len(chosen) < count:
        distance = ((values[:, None] - values[chosen][None]) ** 2).sum(2).min(1)
        distance[chosen] = -1
        chosen.append(int(np.argmax(distance)))
    return chosen


@pytest.mark.parametrize("rules", [keep.NumpyRules(), subset], ids=["numpy", "jitted"])
def test_k_center_against_brute_force(rules):
    feats = planning_cases.features(60, dim=4)
    clusters = planning_cases.clusters(planning_cases.sized([20, 40]))
    cfg = config.SelectionConfig(keep="k_center", ratio=0.5)
    plan = selection.select(clusters, feats, cfg, subset_rules=rules)
    for cluster in range(2):
        members = np.flatnonzero(clusters.cluster_id == cluster)
        start = int(np.argmax(feats.norm[members]))
        values = feats.values[members].astype(np.float64)
        expected = members[_brute_k_center(values, 10, start)]
        found = plan.example_id[plan.cluster_id == cluster]
        np.testing.assert_array_equal(found, np.sort(expected))


def test_k_center_with_equal_rows_chooses_each_once():
    # METHOD §6.5: a zero distance turned the published code's matrix into NaN.
    values = np.repeat(np.eye(3), 4, axis=0)
    chosen = keep.NumpyRules().k_center(values, 12, 0)
    assert sorted(chosen.tolist()) == list(range(12))
    assert {int(np.argmax(values[i])) for i in chosen[:3]} == {0, 1, 2}


@pytest.mark.parametrize("normalise", ["example", "token"])
@pytest.mark.parametrize("rules", [keep.NumpyRules(), subset], ids=["numpy", "jitted"])
def test_herding_picks_the_running_mean_nearest_the_mean(rules, normalise):
    feats = planning_cases.features(40, dim=5, seed=3)
    clusters = planning_cases.clusters(np.zeros(40, int))
    cfg = config.SelectionConfig(keep="herding", ratio=0.3, normalise=normalise)
    plan = selection.select(clusters, feats, cfg, subset_rules=rules)

    gradient = feats.values.astype(np.float64) * feats.norm[:, None]
    weight = (
        feats.num_labels.astype(np.float64) if normalise == "token" else np.ones(40)
    )
    mean = weight @ gradient / weight.sum()
    vector = weight[:, None] * (gradient - mean)
    if normalise == "token":  # one coordinate more, with a tenth of the energy
        excess = feats.num_labels - feats.num_labels.mean()
        scale = np.sqrt(0.1 * (vector**2).sum() / (excess**2).sum())
        vector = np.column_stack([vector, scale * excess])
    total, chosen = np.zeros(vector.shape[1]), []
    for _ in range(12):
        cost = [
            np.inf if i in chosen else ((total + vector[i]) ** 2).sum()
            for i in range(40)
        ]
        chosen.append(int(np.argmin(cost)))
        total += vector[chosen[-1]]
    assert plan.example_id.tolist() == sorted(chosen)


def test_must_keep_and_never_keep_come_before_the_rule():
    clusters = dataclasses.replace(
        planning_cases.clusters(np.repeat([0, 1], 6)),
        distance=np.tile(np.arange(6), 2).astype(np.float32),
    )
    feats = planning_cases.features(12)
    cfg = config.SelectionConfig(
        ratio=0.5, must_keep=("s:0", "s:7"), never_keep=("s:5", "s:11", "s:10")
    )
    plan = selection.select(clusters, feats, cfg)
    # 4 of cluster 1 are allowed, so that min gives 2 each.
    np.testing.assert_array_equal(plan.quota, [2, 2])
    assert plan.example_id.tolist() == [0, 4, 7, 9]
    assert plan.kept_by[[0, 7]].tolist() == [2, 2]
    # Shares stay those of the full data.
    np.testing.assert_allclose(plan.cluster_share, [0.5, 0.5])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"must_keep": ("s:99",)}, "no candidates"),
        ({"must_keep": ("s:1",), "never_keep": ("s:1",)}, "stands in"),
    ],
)
def test_forced_ids_that_make_no_sense(settings, message):
    clusters = planning_cases.clusters(planning_cases.sized([10, 10]))
    with pytest.raises(errors.PlanError, match=message):
        selection.select(
            clusters, planning_cases.features(20), config.SelectionConfig(**settings)
        )


def test_minima_per_source_move_no_more_than_needed(rng):
    moved_some = 0
    for seed in range(60):
        label = planning_cases.sized(rng.integers(8, 30, 3).tolist(), seed)
        feats = planning_cases.features(len(label), seed=seed, num_sources=4)
        skew = np.where(rng.random(len(label)) < 0.75, 0, feats.source_id)
        feats = dataclasses.replace(feats, source_id=skew.astype(np.int32))
        clusters = planning_cases.clusters(label, seed=seed)
        plain = config.SelectionConfig(ratio=0.5)
        cfg = dataclasses.replace(plain, min_per_source=2)
        before = selection.select(clusters, feats, plain)
        after = selection.select(clusters, feats, cfg)
        np.testing.assert_array_equal(after.quota, before.quota)
        available = np.bincount(feats.source_id, minlength=4)
        had = np.bincount(feats.source_id[before.example_id], minlength=4)
        has = np.bincount(feats.source_id[after.example_id], minlength=4)
        assert (has >= np.minimum(2, available)).all()
        deficit = np.maximum(np.minimum(2, available) - had, 0).sum()
        changed = len(np.setdiff1d(after.example_id, before.example_id))
        assert changed >= deficit
        assert (changed == 0) == (deficit == 0)
        moved_some += changed > 0
    assert moved_some > 10


def test_minima_that_need_a_chain_of_exchanges():
    # Source 2 exists in cluster 1 only, whose places source 1 needs for its minimum;
    # source 1 must move to cluster 0, in the place of source 0.
    cluster_id = np.array([0, 0, 0, 0, 1, 1])
    source_id = np.array([0, 0, 1, 0, 1, 2], np.int32)
    distance = np.array([9, 8, 1, 7, 9, 1], np.float32)
    clusters = dataclasses.replace(
        planning_cases.clusters(cluster_id), distance=distance
    )
    feats = dataclasses.replace(planning_cases.features(6), source_id=source_id)
    cfg = config.SelectionConfig(ratio=0.5, min_per_source=1)
    with pytest.raises(errors.PlanError, match="min_per_source"):
        selection.select(clusters, feats, cfg)  # two places for three sources
    cfg = dataclasses.replace(cfg, quota="waterfill", target_fraction=0.5)
    plan = selection.select(clusters, feats, cfg)
    np.testing.assert_array_equal(plan.quota, [2, 1])
    assert plan.example_id.tolist() == [0, 2, 5]


def test_an_empty_minimum_is_all_that_a_small_source_has():
    feats = dataclasses.replace(
        planning_cases.features(20),
        source_id=np.array([1] + [0] * 19, np.int32),
    )
    clusters = planning_cases.clusters(np.repeat([0, 1], 10))
    plan = selection.select(
        clusters, feats, config.SelectionConfig(ratio=0.5, min_per_source=3)
    )
    assert 0 in plan.example_id


@pytest.mark.parametrize("share", ["examples", "tokens"])
@pytest.mark.parametrize("weighting", ["share", "sqrt", "uniform", "none"])
def test_cluster_shares(share, weighting):
    labels = np.array([1, 2, 3, 4, 10, 20])
    weight = np.array([1.0, 1.0, 2.0, 1.0, 1.0, 0.5])
    feats = planning_cases.features(6, num_labels=labels, user_weight=weight)
    clusters = planning_cases.clusters(np.array([0, 0, 0, 0, 1, 1]))
    cfg = config.SelectionConfig(keep="all", share=share, weighting=weighting)
    plan = selection.select(clusters, feats, cfg)
    size = np.array([5.0, 1.5] if share == "examples" else [13.0, 20.0])
    expected = {"sqrt": np.sqrt(size), "uniform": np.ones(2)}.get(weighting, size)
    np.testing.assert_allclose(plan.cluster_share, expected / expected.sum())


def _baseline(method, feats=None, clusters=None, **settings):
    feats = planning_cases.features(60) if feats is None else feats
    cfg = config.SelectionConfig(method=method, **settings)
    return selection.select(clusters, feats, cfg)


def test_full_and_random_work_without_features():
    corpus = planning_cases.corpus(np.full(30, 5), np.full(30, 2))
    full = selection.select(
        None, None, config.SelectionConfig(method="full"), corpus=corpus
    )
    assert full.example_id.tolist() == list(range(30))
    assert full.num_clusters == 1
    cfg = config.SelectionConfig(method="random", target_fraction=0.3)
    drawn = selection.select(None, None, cfg, corpus=corpus)
    assert drawn.num_kept == 9
    with pytest.raises(errors.ConfigError, match="needs gradient features"):
        selection.select(None, None, config.SelectionConfig(), corpus=corpus)


def test_ranked_baselines():
    feats = planning_cases.features(60)
    loss = _baseline("highest_loss", feats, target_fraction=0.2)
    assert set(loss.example_id) == set(np.argsort(-feats.loss)[:12])
    norm = _baseline("largest_norm", feats, num_kept=7)
    assert set(norm.example_id) == set(np.argsort(-feats.norm)[:7])
    cover = _baseline("k_center", feats, num_kept=9)
    start = int(np.argmax(feats.norm))
    expected = _brute_k_center(feats.values.astype(np.float64), 9, start)
    assert set(cover.example_id) == set(expected)


@pytest.mark.parametrize(
    "method", ["random", "highest_loss", "largest_norm", "k_center", "stratified"]
)
def test_token_budget_is_met_within_one_example(method):
    feats = planning_cases.features(200)
    clusters = planning_cases.clusters(planning_cases.sized([120, 60, 20]))
    plan = _baseline(method, feats, clusters, budget="tokens", target_fraction=0.4)
    kept = int(feats.num_labels[plan.example_id].sum())
    budget = round(0.4 * int(feats.num_labels.sum()))
    assert abs(kept - budget) <= int(feats.num_labels.max()) / 2 + 20 * (
        method == "stratified"
    )


def test_stratified_is_proportional_and_uniform_is_equal():
    feats = planning_cases.features(100)
    clusters = planning_cases.clusters(planning_cases.sized([70, 25, 5]))
    stratified = _baseline("stratified", feats, clusters, target_fraction=0.2)
    np.testing.assert_array_equal(stratified.quota, [14, 5, 1])
    uniform = _baseline("uniform", feats, clusters, target_fraction=0.3)
    np.testing.assert_array_equal(uniform.quota, [10, 10, 10])
    small = uniform.cluster_id == 2
    assert np.bincount(uniform.example_id[small]).max() == 2  # 5 examples, 10 draws
    np.testing.assert_allclose(uniform.cluster_share, np.full(3, 1 / 3))
    np.testing.assert_array_equal(np.unique(uniform.copy_number[small]), [0, 1])


def test_near_duplicates_are_dropped():
    rng = np.random.default_rng(1)
    base = rng.normal(size=(20, 8))
    values = np.concatenate([base, base + 1e-3 * rng.normal(size=base.shape)])
    feats = planning_cases.features(40, values=values)
    plan = _baseline("near_duplicate", feats, target_fraction=1.0)
    assert sorted(plan.example_id % 20) == list(range(20))
    assert "20 of 40" in plan.notes[0] and "only 20" in plan.notes[0]
    fewer = _baseline("near_duplicate", feats, num_kept=10)
    assert fewer.num_kept == 10
    forced = _baseline("near_duplicate", feats, must_keep=("s:3", "s:23"))
    assert {3, 23} <= set(forced.example_id.tolist())


def test_target_similarity_takes_the_best_target_source():
    values = np.eye(6)[[0, 1, 2, 3, 4, 5, 0, 1]]
    feats = planning_cases.features(8, values=values)
    target = dataclasses.replace(
        planning_cases.features(4, values=np.eye(6)[[0, 0, 3, 3]]),
        source_id=np.array([0, 0, 1, 1], np.int32),
    )
    cfg = config.SelectionConfig(method="target", num_kept=3)
    plan = selection.select(None, feats, cfg, target=target)
    assert plan.example_id.tolist() == [0, 3, 6]
    with pytest.raises(errors.ConfigError, match="target_source"):
        selection.select(None, feats, cfg)


@pytest.mark.parametrize(
    "settings",
    [
        {"ratio": 0.0},
        {"ratio": 1.5},
        {"target_fraction": -0.1},
        {"min_kept_fraction": 2.0},
        {"num_kept": 0},
        {"num_kept": 5, "budget": "tokens"},
        {"min_per_source": -1},
    ],
)
def test_settings_out_of_range(settings):
    with pytest.raises(errors.ConfigError, match="selection"):
        _baseline("random", **settings)


def test_more_than_there_is():
    with pytest.raises(errors.PlanError, match="num_kept=61"):
        _baseline("random", num_kept=61)


def test_unfitting_clusters_are_refused():
    clusters = planning_cases.clusters(planning_cases.sized([5, 5]))
    with pytest.raises(errors.PlanError, match="cluster again"):
        selection.select(
            clusters, planning_cases.features(12), config.SelectionConfig()
        )


def test_select_changes_none_of_its_inputs():
    label = planning_cases.sized([30, 30])
    feats, clusters = planning_cases.features(60), planning_cases.clusters(label)
    for value in (feats, clusters):
        for field in dataclasses.fields(value):
            array = getattr(value, field.name)
            if isinstance(array, np.ndarray):
                array.setflags(write=False)
    selection.select(clusters, feats, config.SelectionConfig(min_per_source=5))
    assert isinstance(clusters, datatypes.Clustering)

"""K-means against golden data, a NumPy twin, hand-worked cases and other layouts."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clusterjax import clustering, config, datatypes, errors
from clusterjax.clustering import bounded, floor, lloyd, restarts, seeding
from clusterjax.clustering import rows as rows_lib

GOLDEN = pathlib.Path(__file__).parent / "golden" / "selection"
NAMES = ["even_k4", "skewed_k4", "skewed_k8", "tiny_cluster_k3"]


def blobs(rng, num_rows=700, dim=6, clusters=5, spread=0.5):
    centers = 2 * rng.normal(size=(clusters, dim))
    values = centers[rng.integers(0, clusters, num_rows)]
    return (values + spread * rng.normal(size=(num_rows, dim))).astype(np.float32)


def numpy_lloyd(values, centers, weights, iterations):
    """Plain Lloyd in float64; `None` for an empty cluster is not handled."""
    values, centers = values.astype(np.float64), centers.astype(np.float64)
    for _ in range(iterations):
        distance = ((values[:, None] - centers[None]) ** 2).sum(-1)
        label = distance.argmin(1)
        centers = np.stack(
            [
                np.average(values[label == c], axis=0, weights=weights[label == c])
                for c in range(len(centers))
            ]
        )
    distance = ((values[:, None] - centers[None]) ** 2).sum(-1)
    return centers, distance.argmin(1), (weights * distance.min(1)).sum()


def adjusted_rand(a, b):
    table = np.zeros((a.max() + 1, b.max() + 1))
    np.add.at(table, (a, b), 1)

    def pairs(n):
        return (n * (n - 1) / 2).sum()

    expected = pairs(table.sum(0)) * pairs(table.sum(1)) / pairs(np.array([len(a)]))
    most = (pairs(table.sum(0)) + pairs(table.sum(1))) / 2
    return (pairs(table) - expected) / (most - expected)


def features(values, **changes):
    count = len(values)
    feats = datatypes.GradientFeatures(
        values=values,
        norm=np.ones(count, np.float32),
        loss=np.ones(count, np.float32),
        num_labels=np.ones(count, np.int32),
        user_weight=np.ones(count, np.float32),
        example_id=np.arange(count),
        uid=np.array([f"set:{i}:hash" for i in range(count)]),
        source_id=np.zeros(count, np.int32),
        kind="proxy",
        fingerprint="feats",
        corpus_fingerprint="corpus",
        model_fingerprint="model",
        num_corpus=count,
    )
    return dataclasses.replace(feats, **changes)


@pytest.mark.parametrize("name", NAMES)
def test_golden_inertia(name):
    golden = np.load(GOLDEN / f"{name}.npz")
    found = clustering.kmeans(
        golden["features"], len(golden["centroids"]), key=jax.random.key(0)
    )
    assert found.inertia <= float(golden["kmeans_inertia"]) * 1.0001
    assert adjusted_rand(found.cluster_id, golden["kmeans_label"]) == 1
    assert sorted(found.sizes) == sorted(golden["kmeans_sizes"])


@pytest.mark.parametrize("layout", [(2, 1), (2, 2), (4, 2)])
def test_same_partition_on_any_number_of_devices(make_mesh, rng, layout):
    # Sampled starts, a row number that no layout divides, overlapping clusters.
    values = blobs(rng, num_rows=1543, spread=2.0)
    kwargs = dict(key=jax.random.key(3), num_restarts=3, restart_sample=500)
    alone = clustering.kmeans(values, 5, mesh=make_mesh(), **kwargs)
    found = clustering.kmeans(
        values, 5, mesh=make_mesh(data=layout[0], fsdp=layout[1]), **kwargs
    )
    assert adjusted_rand(alone.cluster_id, found.cluster_id) >= 0.999
    assert found.inertia == pytest.approx(alone.inertia, rel=1e-5)


def test_same_seed_gives_the_same_bits(rng):
    values = blobs(rng, spread=2.0)
    first = clustering.kmeans(values, 5, key=jax.random.key(1))
    again = clustering.kmeans(values, 5, key=jax.random.key(1))
    np.testing.assert_array_equal(first.cluster_id, again.cluster_id)
    np.testing.assert_array_equal(first.centroids, again.centroids)


@pytest.mark.parametrize("rows", [1024, 4096])
@pytest.mark.parametrize("module", [lloyd, bounded])
def test_one_all_reduce_of_sums_and_counts_per_iteration(make_mesh, rows, module):
    clusters, dim = 3, 5
    mesh = make_mesh(data=2, fsdp=2)
    options = lloyd.Options(spherical=False, mesh=mesh, block=256, scatter=False)
    state = lloyd.initial(jnp.zeros((1, clusters, dim)))
    vectors = [jnp.ones(rows)] * (1 if module is lloyd else 2)
    lowered = module._run.lower(
        jnp.zeros((rows, dim)), *vectors, state, 0.0, 10, options=options
    )
    text = lowered.compile().as_text()
    collectives = re.findall(
        r"= (\S+) (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)"
        r"(?:-start)?\(",
        text,
    )
    assert len(collectives) == 1, collectives
    shape, kind = collectives[0]
    assert kind == "all-reduce"
    sizes = [int(n) for n in re.findall(r"\d+", shape.split("{")[0].split("[")[1])]
    assert np.prod(sizes) == clusters * dim + clusters


@pytest.mark.parametrize("clusters", [5, 20])
def test_equals_the_numpy_twin_from_equal_starts(rng, clusters):
    # 5 clusters are summed by a product, 20 row by row.
    values = blobs(rng, num_rows=600, clusters=clusters, spread=1.0)
    weights = rng.uniform(0.5, 2, len(values))
    init = values[rng.choice(len(values), clusters, replace=False)]
    centers, label, inertia = numpy_lloyd(values, init, weights, iterations=7)
    found = clustering.kmeans(
        values,
        clusters,
        key=jax.random.key(0),
        init=init,
        weights=weights.astype(np.float32),
        max_iterations=7,
        tol=0,
    )
    assert found.num_iterations == 7
    np.testing.assert_array_equal(found.cluster_id, label)
    np.testing.assert_allclose(found.centroids, centers, rtol=0, atol=2e-5)
    assert found.inertia == pytest.approx(inertia, rel=1e-5)


@pytest.mark.parametrize("clusters", [2, 7, 40])
@pytest.mark.parametrize("layout", [(1, 1), (2, 2)])
def test_bounds_leave_the_iterations_as_they_are(
    make_mesh, rng, clusters, layout, monkeypatch
):
    # 40 clusters share bounds, and their sums are added row by row.
    monkeypatch.setattr(bounded, "_RENEW_EVERY", 5)
    monkeypatch.setattr(bounded, "_CHUNK", 16)
    values = blobs(rng, num_rows=3000, clusters=clusters, spread=1.0)
    weights = np.where(rng.random(3000) < 0.1, 0, rng.uniform(0.5, 2, 3000))
    rows = rows_lib.place(
        values,
        weights.astype(np.float32),
        make_mesh(data=layout[0], fsdp=layout[1]),
        block_rows=256,
    )
    starts = rows.fetch(rng.choice(3000, clusters, replace=False))
    options = restarts.loop_options(rows, clusters)
    for iterations in (1, 2, 4, 17):
        state = lloyd.initial(jnp.asarray(starts)[None])
        plain = lloyd.run(rows, state, 0.0, iterations, options)
        found = bounded.run(rows, state, 0.0, iterations, options)
        assert int(found.iterations_G[0]) == int(plain.iterations_G[0])
        np.testing.assert_allclose(
            found.centers_GKD, plain.centers_GKD, rtol=0, atol=1e-5
        )
        np.testing.assert_allclose(found.weight_GK, plain.weight_GK, rtol=1e-5)


def test_rows_that_cannot_change_are_not_read(rng):
    values = blobs(rng, num_rows=1024, clusters=3, spread=0.05)
    rows = rows_lib.place(values, None, None, block_rows=256)
    options = restarts.loop_options(rows, 3)
    centers, label, _ = numpy_lloyd(values, values[:3], np.ones(1024), iterations=5)
    centers = jnp.asarray(centers, jnp.float32)

    def read(x, centers, bounds):
        return bounded._read(x, rows.weight_N, rows.square_N, centers, bounds, options)

    nothing = bounded._Bounds(
        label_n=jnp.full(1024, -1),
        upper_n=jnp.zeros(1024),
        lower_nT=jnp.zeros((1024, 3)),
        moved_K=jnp.zeros(3),
        fled_T=jnp.zeros(3),
        total_KE=jnp.zeros((3, 7)),
    )
    bounds, total = read(rows.values_ND, centers, nothing)
    np.testing.assert_array_equal(bounds.label_n, label)
    np.testing.assert_allclose(total[:, -1], np.bincount(label, minlength=3))
    # A short step, after which rows that are read again would spoil the sums.
    moved = bounded._moved(bounds, jnp.full((3, 6), 1e-3))
    spoilt, change = read(rows.values_ND * np.nan, centers + 1e-3, moved)
    np.testing.assert_array_equal(change, 0)
    np.testing.assert_array_equal(spoilt.label_n, label)
    # After a long one all are read.
    moved = bounded._moved(bounds, jnp.full((3, 6), 10.0))
    assert np.isnan(read(rows.values_ND * np.nan, centers + 10, moved)[0].upper_n).all()


def test_the_last_row_counts_once_when_it_is_picked_out():
    # Only the last of 512 rows is between the centres; it goes over when they move.
    values = np.where(np.arange(512) % 2, 10.0, 0.0)[:, None].astype(np.float32)
    values[-1] = 4.9
    rows = rows_lib.place(values, None, None, block_rows=256)
    assert len(rows.values_ND) == 512
    options = restarts.loop_options(rows, 2)
    nothing = bounded._Bounds(
        label_n=jnp.full(512, -1),
        upper_n=jnp.zeros(512),
        lower_nT=jnp.zeros((512, 2)),
        moved_K=jnp.zeros(2),
        fled_T=jnp.zeros(2),
        total_KE=jnp.zeros((2, 2)),
    )
    # Where the rows lie far from the origin, both move along.
    centers = jnp.array([[0.0], [10.0]]) - rows.offset_D[None]
    data = rows.values_ND, rows.weight_N, rows.square_N
    bounds, _ = bounded._read(*data, centers, nothing, options)
    moved = bounded._moved(bounds, jnp.full((2, 1), -1.0))
    bounds, change = bounded._read(*data, centers - 1, moved, options)
    assert list(bounds.label_n[-3:]) == [1, 0, 1]
    last = 4.9 - float(rows.offset_D[0])
    np.testing.assert_allclose(change, [[-last, -1], [last, 1]], rtol=1e-5)


@pytest.mark.parametrize("far", [False, True])
def test_rows_move_only_where_they_lie_far_from_the_origin(rng, far):
    values = (rng.normal(size=(500, 4)) + (50 if far else 0.3)).astype(np.float32)
    weights = rng.uniform(0.5, 2, 500).astype(np.float32)
    rows = rows_lib.place(values, weights, None)
    mean = np.average(values.astype(np.float64), axis=0, weights=weights)
    expected = mean if far else np.zeros(4)
    np.testing.assert_allclose(rows.offset_D, expected, rtol=1e-5)
    np.testing.assert_allclose(
        rows.fetch(np.arange(500)), values - expected, rtol=0, atol=2e-5
    )
    variance = np.average((values - mean) ** 2, axis=0, weights=weights).mean()
    assert rows.variance == pytest.approx(variance, rel=1e-4)
    squares = rows_lib.to_host(rows.square_N, 500)
    np.testing.assert_allclose(squares, ((values - expected) ** 2).sum(1), rtol=1e-3)


def test_four_points_by_hand():
    # Starts 0 and 1: {0}, {1, 9, 10} → 0 and 20/3 → {0, 1}, {9, 10} → 1/2 and 19/2.
    values = np.array([[0.0], [1.0], [9.0], [10.0]], np.float32)
    found = clustering.kmeans(
        values, 2, key=jax.random.key(0), init=np.array([[0.0], [1.0]])
    )
    np.testing.assert_array_equal(found.cluster_id, [0, 0, 1, 1])
    np.testing.assert_allclose(found.centroids, [[0.5], [9.5]], atol=1e-6)
    assert found.inertia == pytest.approx(1.0, rel=1e-6)
    assert found.converged


def test_empty_cluster_takes_the_farthest_point():
    # The centre at 1000 is nobody's; 40 is farthest from its own centre.
    values = np.array([[0.0], [1.0], [2.0], [40.0], [10.0], [11.0]], np.float32)
    init = np.array([[0.0], [10.0], [1000.0]])
    found = clustering.kmeans(values, 3, key=jax.random.key(0), init=init)
    np.testing.assert_array_equal(found.cluster_id, [0, 0, 0, 2, 1, 1])


def test_fewer_distinct_points_than_clusters():
    # 17 points, 9 of them distinct, K = 10 (CASES 19).
    values = np.repeat(np.arange(9.0), 2)[:17, None].astype(np.float32)
    with pytest.warns(UserWarning, match="9 distinct rows give 9 clusters"):
        found = clustering.kmeans(values, 10, key=jax.random.key(0))
    assert found.num_clusters == 9
    assert found.inertia == 0
    assert (found.sizes > 0).all()


def test_as_many_clusters_as_points_and_more(rng):
    values = rng.normal(size=(6, 3)).astype(np.float32)
    found = clustering.kmeans(values, 6, key=jax.random.key(0))
    assert sorted(found.cluster_id) == list(range(6))
    assert found.inertia == pytest.approx(0, abs=1e-9)
    with pytest.warns(UserWarning, match="6 distinct rows"):
        assert clustering.kmeans(values, 9, key=jax.random.key(0)).num_clusters == 6


def test_one_cluster_one_feature_one_point():
    values = np.array([[1.0], [2.0], [6.0]], np.float32)
    found = clustering.kmeans(values, 1, key=jax.random.key(0))
    np.testing.assert_allclose(found.centroids, [[3.0]], rtol=1e-6)
    assert found.inertia == pytest.approx(4 + 1 + 9, rel=1e-6)
    alone = clustering.kmeans(values[:1], 1, key=jax.random.key(0))
    assert (alone.inertia, list(alone.cluster_id)) == (0, [0])


def test_far_from_the_origin_distances_stay_exact(rng):
    values = blobs(rng, num_rows=300, clusters=3) + np.float32(1000)
    init = values[:3]
    near = clustering.kmeans(
        values - np.float32(1000), 3, key=jax.random.key(0), init=init - 1000
    )
    far = clustering.kmeans(values, 3, key=jax.random.key(0), init=init)
    np.testing.assert_array_equal(near.cluster_id, far.cluster_id)
    assert far.inertia == pytest.approx(near.inertia, rel=1e-4)


def test_integer_weights_equal_repeated_rows(rng):
    values = blobs(rng, num_rows=200, clusters=3, spread=1.5)
    weights = rng.integers(0, 4, len(values))
    init = values[:3]
    weighted = clustering.kmeans(
        values, 3, key=jax.random.key(0), init=init, weights=weights.astype(float)
    )
    repeated = clustering.kmeans(
        np.repeat(values, weights, axis=0), 3, key=jax.random.key(0), init=init
    )
    np.testing.assert_allclose(
        weighted.centroids, repeated.centroids, rtol=0, atol=1e-5
    )
    assert weighted.inertia == pytest.approx(repeated.inertia, rel=1e-5)


def test_spherical_ignores_lengths(rng):
    values = blobs(rng, num_rows=300, clusters=3) + 0.1
    scaled = values * rng.uniform(0.1, 10, (len(values), 1)).astype(np.float32)
    kwargs = dict(key=jax.random.key(0), metric="spherical", num_restarts=3)
    found = clustering.kmeans(values, 3, **kwargs)
    again = clustering.kmeans(scaled, 3, **kwargs)
    assert adjusted_rand(found.cluster_id, again.cluster_id) == 1
    np.testing.assert_allclose(np.linalg.norm(found.centroids, axis=1), 1, rtol=1e-5)
    unit = values / np.linalg.norm(values, axis=1, keepdims=True)
    cosine = (unit * found.centroids[found.cluster_id]).sum(1)
    np.testing.assert_allclose(found.distance, 2 - 2 * cosine, atol=1e-5)


def test_rows_that_are_not_finite_are_named(rng):
    values = blobs(rng, num_rows=50)
    values[7, 2], values[31, 0] = np.nan, np.inf
    with pytest.raises(errors.UserError, match="2 of 50 rows .*: 7, 31"):
        clustering.kmeans(values, 3, key=jax.random.key(0))
    cfg = config.ClusteringConfig(num_clusters=3)
    with pytest.raises(errors.UserError, match="set:7:hash, set:31:hash"):
        clustering.fit(features(values), cfg, None, jax.random.key(0))
    values[[7, 31]] = 0
    with pytest.raises(errors.UserError, match="only zeros.*: 7, 31"):
        clustering.kmeans(values, 3, key=jax.random.key(0), metric="spherical")


def test_seeds_are_drawn_by_weight_and_squared_distance(rng):
    values = np.array([[0.0], [1.0], [3.0]], np.float32)
    weights = np.array([1.0, 2.0, 5.0], np.float32)
    rows = rows_lib.place(values, weights, None)
    draws = 4000
    first = np.asarray(seeding.plus_plus(rows, 1, draws, jax.random.key(0)))[:, 0, 0]
    first = np.round(first + rows.offset_D[0]).astype(int)
    share = [np.mean(first == v) for v in (0, 1, 3)]
    # Standard error below 0.008.
    np.testing.assert_allclose(share, weights / 8, atol=0.03)


def test_greedy_candidates_find_separate_blobs(rng):
    # Ten tight blobs far apart: every greedy start has one centre in each.
    centers = 100 * np.eye(10)
    values = np.repeat(centers, 30, axis=0) + rng.normal(size=(300, 10))
    rows = rows_lib.place(values.astype(np.float32), None, None)
    starts = np.asarray(seeding.plus_plus(rows, 10, 20, jax.random.key(1)))
    blob = ((starts + rows.offset_D)[:, :, None] - centers[None, None]) ** 2
    hit = blob.sum(-1).argmin(-1)
    assert (np.sort(hit, axis=1) == np.arange(10)).all()


def test_sampled_starts_lose_next_to_nothing(rng):
    values = blobs(rng, num_rows=3000, dim=8, clusters=6, spread=1.5)
    full = clustering.kmeans(values, 6, key=jax.random.key(0), restart_sample=0)
    sampled = clustering.kmeans(values, 6, key=jax.random.key(0), restart_sample=700)
    assert sampled.inertia <= full.inertia * 1.001


def test_fit_applies_floor_then_capacity():
    golden = np.load(GOLDEN / "tiny_cluster_k3.npz")
    cfg = config.ClusteringConfig(num_clusters=3, min_cluster_size=10)
    found = clustering.fit(features(golden["features"]), cfg, None, jax.random.key(0))
    assert sorted(found.kmeans_sizes) == [3, 150, 200]
    assert len(found.floor_sizes) == found.num_clusters == 2
    # K is what the floor leaves: 200 ≤ 1.5 · 353 / 2.
    assert found.capacity is None
    cfg = dataclasses.replace(cfg, min_cluster_size=0)
    found = clustering.fit(features(golden["features"]), cfg, None, jax.random.key(0))
    assert found.capacity == int(golden["capacity"])
    assert sorted(found.sizes) == sorted(golden["capped_sizes"])
    assert adjusted_rand(found.cluster_id, golden["capped_label"]) == 1
    own = found.centroids[found.cluster_id]
    exact = ((golden["features"] - own) ** 2).sum(1)
    np.testing.assert_allclose(found.distance, exact, rtol=0, atol=1e-6)


def test_floor_by_hand():
    # Centre 1 has one point and goes; 4.4 is nearer to 10 than to −2.
    values = np.array([[-2.0], [-2.0], [-2.1], [4.4], [10.0], [10.0]], np.float32)
    centers = np.array([[-2.0], [4.4], [10.0]], np.float32)
    label = np.array([0, 0, 0, 1, 2, 2], np.int32)
    remaining, moved = floor.dissolve_small(values, centers, label, 2)
    np.testing.assert_array_equal(remaining, [0, 2])
    np.testing.assert_array_equal(moved, [0, 0, 0, 1, 1, 1])
    remaining, moved = floor.dissolve_small(values, centers, label, 100)
    assert len(remaining) == 1
    assert (moved == 0).all()


def test_fit_refuses_more_clusters_than_examples(rng):
    cfg = config.ClusteringConfig(num_clusters=64)
    with pytest.raises(errors.UserError, match=r"num_clusters=64 .* 40 examples"):
        clustering.fit(features(blobs(rng, 40)), cfg, None, jax.random.key(0))


def test_fingerprint_follows_settings_and_seed(rng):
    feats = features(blobs(rng, 60))
    cfg = config.ClusteringConfig(num_clusters=2, num_restarts=1)
    first = clustering.fit(feats, cfg, None, jax.random.key(0)).fingerprint
    assert first == clustering.fit(feats, cfg, None, jax.random.key(0)).fingerprint
    assert first != clustering.fit(feats, cfg, None, jax.random.key(1)).fingerprint
    cfg = dataclasses.replace(cfg, tol=1e-3)
    assert first != clustering.fit(feats, cfg, None, jax.random.key(0)).fingerprint


def test_mini_batches_over_a_memory_map(rng, tmp_path):
    values = blobs(rng, num_rows=3000, clusters=4, spread=1.0)
    np.save(tmp_path / "values.npy", values)
    stored = np.load(tmp_path / "values.npy", mmap_mode="r")
    full = clustering.kmeans(values, 4, key=jax.random.key(0))
    found = clustering.mini_batch_kmeans(
        stored, 4, key=jax.random.key(0), batch_rows=512, restart_sample=300
    )
    assert found.inertia <= full.inertia * 1.005
    assert adjusted_rand(found.cluster_id, full.cluster_id) > 0.98
    # 3,000 rows are six batches a pass.
    assert found.num_iterations % 6 == 0


def test_mini_batches_name_bad_rows(rng):
    values = blobs(rng, num_rows=600)
    values[599] = np.nan
    with pytest.raises(errors.UserError, match=": row599"):
        clustering.mini_batch_kmeans(
            values,
            2,
            key=jax.random.key(0),
            batch_rows=256,
            restart_sample=1,
            row_names=np.array([f"row{i}" for i in range(600)]),
        )


def test_silhouette_equals_its_definition(rng):
    values = blobs(rng, num_rows=60, clusters=3, spread=1.5)
    label = rng.integers(0, 3, 60).astype(np.int32)
    label[0] = 3  # alone in its cluster
    distance = np.sqrt(((values[:, None] - values[None]) ** 2).sum(-1))
    scores = []
    for i in range(60):
        own = (label == label[i]) & (np.arange(60) != i)
        if not own.any():
            scores.append(0.0)
            continue
        a = distance[i, own].mean()
        b = min(distance[i, label == c].mean() for c in range(4) if c != label[i])
        scores.append((b - a) / max(a, b))
    assert clustering.silhouette(values, label) == pytest.approx(
        np.mean(scores), abs=1e-5
    )


def test_choose_k_finds_the_true_number(rng):
    values = blobs(rng, num_rows=400, dim=4, clusters=4, spread=0.2)
    choices = clustering.choose_k(
        values, [4, 2, 400], key=jax.random.key(0), sample=300, num_restarts=2
    )
    # More clusters than rows in the sample are left out.
    assert [c.num_clusters for c in choices] == [2, 4]
    assert max(choices, key=lambda c: c.silhouette).num_clusters == 4
    inertia = [c.inertia for c in choices]
    assert inertia == sorted(inertia, reverse=True)


def test_clusters_keep_their_names(rng):
    old = rng.normal(size=(5, 3))
    order = np.array([3, 0, 4, 1, 2])
    new = old[order] + 0.01 * rng.normal(size=(5, 3))
    np.testing.assert_array_equal(clustering.match_centroids(old, new), order)
    more = np.concatenate([new, [[50.0, 50, 50]]])
    np.testing.assert_array_equal(clustering.match_centroids(old, more), [*order, 5])
    assert set(clustering.match_centroids(old, new[:3])) == {3, 0, 4}


def test_distinct_rows_stop_early_and_count_right(rng):
    values = np.concatenate([np.zeros((5000, 2)), rng.normal(size=(3, 2))])
    assert len(restarts.distinct_rows(values, None, 4)) == 4
    assert restarts.distinct_rows(values, None, 3) is None
    weights = np.ones(len(values))
    weights[-1] = 0
    assert len(restarts.distinct_rows(values, weights, 3)) == 3

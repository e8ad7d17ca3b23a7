"""The feature pass: golden values, invariances, rejects, the store."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import feature_cases as cases
import jax
import numpy as np
import pytest

from clusterjax import config, errors, features
from clusterjax.features import (
    agreement,
    batches,
    diagnostics,
    extraction,
    extractors,
    model_state,
)

PERF = config.PerfConfig(feature_buckets=1, vocab_chunk=64)
KINDS = {
    "proxy": config.FeaturesConfig(),
    "head": config.FeaturesConfig(kind="head", k_in=4, k_out=6, dim=8),
    "probe": config.FeaturesConfig(kind="probe", k_in=4, k_out=4, dim=48),
    "per_example": config.FeaturesConfig(
        kind="per_example", dim=32, parameters=("blocks/(q|down)/kernel",)
    ),
}


@pytest.fixture(scope="module")
def model():
    return cases.tiny_model(num_layers=2)


@pytest.fixture(scope="module")
def corpus():
    return cases.random_corpus(np.random.default_rng(3), 13, 96, longest=40)


class Alone(dict):
    """kind → features with every example in a batch of its own, made when asked for."""

    def __init__(self, model, corpus):
        super().__init__()
        self._model, self._corpus = model, corpus

    def __missing__(self, kind):
        perf = config.PerfConfig(
            feature_batch_tokens=1, feature_buckets=1, feature_micro_batch=1
        )
        with pytest.MonkeyPatch.context() as patch:
            # One number of slots, so that one program serves all.
            patch.setattr(batches, "_slots", lambda labels, positions: positions)
            found = features.compute(self._model, self._corpus, KINDS[kind], perf=perf)
        return self.setdefault(kind, found)


@pytest.fixture(scope="module")
def alone(model, corpus):
    return Alone(model, corpus)


@pytest.mark.parametrize("name", cases.GOLDEN_NAMES)
def test_proxy_equals_the_reference(name):
    model, corpus, expected = cases.golden(name)
    feats = features.compute(model, corpus, config.FeaturesConfig(), perf=PERF)
    rows = feats.example_id
    cases.assert_same_features(features.raw(feats), expected["feature_raw"][rows])
    cases.assert_same_features(feats.values, expected["feature_unit"][rows])
    np.testing.assert_allclose(feats.loss, expected["example_nll"][rows], rtol=1e-5)
    assert len(rows) == corpus.num_examples


@pytest.mark.parametrize("kind", KINDS)
def test_features_do_not_depend_on_the_batch(model, corpus, alone, kind):
    # CASES 11: the same example alone, and beside shorter and longer ones.
    perf = config.PerfConfig(
        feature_batch_tokens=200,
        feature_buckets=2,
        feature_block=7,
        feature_micro_batch=3,
        feature_turn_tokens=90,
        vocab_chunk=40,
    )
    cfg = dataclasses.replace(KINDS[kind], block_size=100)
    found = features.compute(model, corpus, cfg, perf=perf)
    cases.assert_same_features(features.raw(found), features.raw(alone[kind]))
    np.testing.assert_allclose(found.loss, alone[kind].loss, rtol=1e-5)
    assert found.example_id.tolist() == list(range(13))
    assert found.fingerprint == alone[kind].fingerprint


MESHES = [(2, 1, 1), (4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 2, 2)]


@pytest.mark.parametrize("shape", MESHES)
def test_proxy_does_not_depend_on_the_mesh(make_mesh, model, corpus, alone, shape):
    on_mesh(make_mesh, model, corpus, alone, "proxy", shape)


@pytest.mark.parametrize("kind", ["probe", "per_example"])
def test_whole_model_features_on_a_mesh(make_mesh, model, corpus, alone, kind):
    on_mesh(make_mesh, model, corpus, alone, kind, (2, 2, 1))


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("kind", ["head", "probe", "per_example"])
def test_every_kind_on_every_mesh(make_mesh, model, corpus, alone, kind, shape):
    on_mesh(make_mesh, model, corpus, alone, kind, shape)


def on_mesh(make_mesh, model, corpus, alone, kind, shape):
    mesh = make_mesh(*shape)
    perf = config.PerfConfig(feature_buckets=1, vocab_chunk=64, feature_turn_tokens=40)
    found = features.compute(
        cases.sharded(model, mesh), corpus, KINDS[kind], mesh, perf=perf
    )
    cases.assert_same_features(features.raw(found), features.raw(alone[kind]))
    np.testing.assert_allclose(found.loss, alone[kind].loss, rtol=1e-5)
    assert found.example_id.tolist() == list(range(13))
    assert found.fingerprint == alone[kind].fingerprint


def test_remat_changes_nothing(model, corpus, alone):
    perf = dataclasses.replace(PERF, remat="full")
    found = features.compute(model, corpus, KINDS["probe"], perf=perf)
    cases.assert_same_features(features.raw(found), features.raw(alone["probe"]))


def test_label_slots_hold_all_labels():
    for positions in (1, 15, 16, 100):
        sizes = {batches._slots(n, positions) for n in range(positions + 1)}
        assert len(sizes) <= 8
        for labels in range(positions + 1):
            assert labels <= batches._slots(labels, positions) <= positions


def test_turns_take_every_row_once(rng):
    rows = rng.integers(0, 9, (24, 5))
    for shards, turns in ((1, 1), (1, 4), (2, 3), (4, 6)):
        split = batches.by_turn(rows, shards, turns)
        assert split.shape == (turns, 24 // turns, 5)
        np.testing.assert_array_equal(batches.from_turns(split, shards), rows)
        # A shard keeps its rows: nothing crosses the network.
        of_shard = split.reshape(turns, shards, -1, 5)[:, 0].reshape(-1, 5)
        first = rows[: 24 // shards]
        assert sorted(map(tuple, of_shard)) == sorted(map(tuple, first))


def test_turns_are_of_the_wanted_size():
    for length in (16, 100, 512):
        for rows in range(1, 40):
            bucket = batches.in_turns(length, rows, 1024)
            size = bucket.rows // bucket.turns
            assert bucket.rows == size * bucket.turns >= rows
            assert bucket.rows - rows < size
            assert size * length <= 1.25 * 1024
            if bucket.turns > 1:
                assert size > 1024 // length // 2
    assert batches.in_turns(512, 7, 100) == batches.Bucket(512, 7, 7)
    assert batches.in_turns(256, 5, 1024) == batches.Bucket(256, 5, 1)


def test_batches_of_a_bucket_are_alike_in_size():
    # Nine examples with room for eight: five and four, not eight and one.
    (bucket,) = batches.choose_buckets(np.full(9, 100), 1, 8 * 112, 1)
    assert bucket == batches.Bucket(112, 5)
    (bucket,) = batches.choose_buckets(np.full(9, 100), 1, 8 * 112, 2)
    assert bucket == batches.Bucket(112, 5)


class Started(Exception):
    """A step would run now."""


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_predicted_before_the_first_step(
    model, corpus, kind, monkeypatch, capsys
):
    # CASES 15: what a pass will need is printed first, for every kind.
    predicted = []
    honest = extractors.Extractor.programs

    def note(self, *arguments):
        programs = honest(self, *arguments)
        predicted.append(self.memory)
        return programs

    def start(self, params, rows, sizes):
        raise Started

    monkeypatch.setattr(extractors.Extractor, "programs", note)
    monkeypatch.setattr(extractors.Extractor, "__call__", start)
    with pytest.raises(Started):
        features.compute(model, corpus, KINDS[kind], perf=PERF)
    (memory,) = predicted
    text = capsys.readouterr().out
    assert f"predicted peak {memory.peak / 2**30:.2f} GiB" in text
    blocks = [
        array.nbytes
        for path, array in model_state.split(model).params.flat().items()
        if path[0] == "blocks"
    ]
    assert memory.arguments > sum(blocks)
    assert memory.temporaries > 0
    assert memory.peak == memory.arguments + memory.temporaries + memory.outputs


def test_a_pass_that_cannot_fit_stops():
    limit = {"bytes_limit": 10 * 2**30}
    extraction._check_memory("probe", 9 * 2**30, limit)
    extraction._check_memory("probe", 99 * 2**30, None)
    with pytest.raises(errors.UserError, match=r"11.0 GiB.*10.0.*feature_turn_tokens"):
        extraction._check_memory("probe", 11 * 2**30, limit)


def test_examples_without_labels_or_direction_are_listed(model):
    rng = np.random.default_rng(0)
    whole = cases.random_corpus(rng, 6, 96)
    mask = whole.label_mask.copy()
    mask[whole.offsets[1] : whole.offsets[2]] = False
    lost = dataclasses.replace(whole, label_mask=mask)
    feats = features.compute(model, lost, config.FeaturesConfig(), perf=PERF)
    assert feats.example_id.tolist() == [0, 2, 3, 4, 5]
    assert [(r.reason, r.uid) for r in feats.rejects] == [
        ("no_label_tokens", whole.uid[1])
    ]
    assert feats.num_corpus == 6
    nothing = dataclasses.replace(whole, label_mask=np.zeros_like(mask))
    with pytest.raises(errors.DataError, match="0 of 6 examples"):
        features.compute(model, nothing, config.FeaturesConfig(), perf=PERF)


def test_zero_features_are_rejected():
    # Only the label's own logit is finite-sized: p_y rounds to 1 for its bias alone.
    model = cases.tiny_model(num_layers=1)
    model.norm.scale[...] = model.norm.scale[...] * 0
    corpus = cases.random_corpus(np.random.default_rng(1), 3, 96)
    with pytest.raises(errors.DataError, match="below 1e-12"):
        features.compute(model, corpus, config.FeaturesConfig(), perf=PERF)


def test_long_prompts_keep_a_place_for_the_answer(model):
    # CASES 1 for the feature pass: 30 prompt tokens, a limit of 12.
    tokens = np.arange(40) % 96
    corpus = cases.corpus([(tokens, np.arange(40) >= 30), (tokens[:8], tokens[:8] > 2)])
    where = batches.windows(corpus, 12)
    assert where.start.tolist() == [24, 40]
    assert where.length.tolist() == [12, 8]
    assert where.num_labels.tolist() == [6, 5]
    cfg = config.FeaturesConfig(max_tokens=12)
    feats = features.compute(model, corpus, cfg, perf=PERF)
    cut = cases.corpus(
        [(tokens[24:36], np.arange(24, 36) >= 30), (tokens[:8], tokens[:8] > 2)]
    )
    expected = features.compute(model, cut, config.FeaturesConfig(), perf=PERF)
    cases.assert_same_features(feats.values, expected.values)
    assert feats.num_labels.tolist() == [10, 5]


def test_centring_subtracts_the_mean_raw_feature(model, corpus, alone):
    cfg = config.FeaturesConfig(center="mean")
    found = features.compute(model, corpus, cfg, perf=PERF)
    raw = features.raw(alone["proxy"])
    expected = raw - raw.mean(axis=0)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(found.values, expected, atol=1e-4)
    np.testing.assert_allclose(found.norm, alone["proxy"].norm, rtol=1e-5)


def test_fewer_layers_are_the_shallower_model(model, corpus):
    cfg = config.FeaturesConfig(num_layers=1)
    found = features.compute(model, corpus, cfg, perf=PERF)
    state = model_state.split(model)
    flat = {
        path: array[:1] if path[0] == "blocks" else array
        for path, array in state.params.flat().items()
    }
    shallow = cases.assemble(dataclasses.replace(model.config, num_layers=1), flat)
    expected = features.compute(shallow, corpus, config.FeaturesConfig(), perf=PERF)
    cases.assert_same_features(features.raw(found), features.raw(expected))


@pytest.mark.parametrize("shape", [None, (2, 2, 1)])
@pytest.mark.parametrize("kind", ["proxy", "probe"])
def test_each_shape_is_compiled_once(make_mesh, model, kind, shape):
    mesh = shape and make_mesh(*shape)
    placed = model if mesh is None else cases.sharded(model, mesh)
    state = model_state.split(placed, mesh=mesh)
    extractor = extractors.Extractor(state, KINDS[kind], config.PerfConfig(), mesh)
    bucket, sizes = batches.Bucket(32, 4, 2), batches.Sizes(64, 16, 2, 32)
    rows = extraction.put(extractors.empty_rows(bucket, extractor.shards), mesh)
    extractor.programs(state.params, rows, sizes)  # the prediction before a pass
    for _ in range(3):
        jax.block_until_ready(extractor(state.params, rows, sizes))
    # The body and the output layer, or one program.
    assert extractor.num_programs == (2 if kind == "proxy" else 1)


def test_buckets_waste_the_least(rng):
    lengths = rng.integers(1, 400, 1000)
    exact = batches.choose_lengths(lengths, 3)

    def waste(ends):
        return sum(ends[np.searchsorted(ends, n)] for n in lengths)

    top = exact[-1]
    others = [
        waste([a, b, top]) for a in range(16, top, 16) for b in range(a + 16, top, 16)
    ]
    assert waste(exact) == min(others)
    assert all(n % 16 == 0 for n in exact)


def test_only_new_rows_cost(model, corpus, alone, tmp_path, monkeypatch):
    cfg = KINDS["proxy"]
    features.compute(model, corpus, cfg, perf=PERF, directory=tmp_path)
    more = cases.corpus(
        [corpus.example(i) for i in (4, 2)]
        + [(np.arange(9) + 3, np.arange(9) > 4)]
        + [corpus.example(0)]
    )
    computed = []
    honest = extractors.Extractor.__call__

    def count(self, params, rows, *sizes):
        computed.append(int((np.asarray(rows.slot) >= 0).any(axis=1).sum()))
        return honest(self, params, rows, *sizes)

    monkeypatch.setattr(extractors.Extractor, "__call__", count)
    found = features.compute(model, more, cfg, perf=PERF, directory=tmp_path)
    assert sum(computed) == 1
    cases.assert_same_features(
        found.values[[0, 1, 3]], alone["proxy"].values[[4, 2, 0]]
    )
    computed.clear()
    again = features.compute(model, more, cfg, perf=PERF, directory=tmp_path)
    assert not computed
    np.testing.assert_array_equal(again.values, found.values)
    # Another model or setting is another store.
    other = dataclasses.replace(cfg, max_tokens=6)
    features.compute(model, more, other, perf=PERF, directory=tmp_path)
    assert sum(computed) == 4


KILLED = """
import sys, time
sys.path.insert(0, sys.argv[2])
inside = int(sys.argv[3])
import jax, numpy as np
import feature_cases as cases
from clusterjax import config, features
from clusterjax.features import store
writes = 0
class Slow:  # stops half-way through the rows, in the write that is told to
    def __init__(self, file): self.file = file
    def __getattr__(self, name): return getattr(self.file, name)
    def write(self, part):
        if writes == inside and len(part) > 500:
            self.file.write(part[: len(part) // 2])
            self.file.flush()
            print("inside", flush=True)
            time.sleep(600)
        return self.file.write(part)
    def __enter__(self): return self
    def __exit__(self, *_): self.file.close()
plain, honest = store.open_new, store.Store.write
store.open_new = lambda path: Slow(plain(path))
def write(self, block):
    global writes
    honest(self, block)
    writes += 1
    print("block", flush=True)
store.Store.write = write
corpus = cases.random_corpus(np.random.default_rng(3), 96, 96, longest=40)
perf = config.PerfConfig(feature_buckets=2, feature_block=6, feature_batch_tokens=64)
print("ready", flush=True)
features.compute(cases.tiny_model(num_layers=1), corpus, config.FeaturesConfig(),
                 perf=perf, directory=sys.argv[1])
"""


@pytest.mark.slow
def test_a_killed_pass_resumes_to_the_same_bits(tmp_path, rng):
    """kill -9 at ten random moments, three of them inside a write."""

    def start(folder, inside=-1):
        tests = os.path.dirname(__file__)
        return subprocess.Popen(
            [sys.executable, "-c", KILLED, str(folder), tests, str(inside)],
            stdout=subprocess.PIPE,
            env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
            text=True,
        )

    def wait_for(process, word):
        while word not in process.stdout.readline():
            assert process.poll() is None

    assert start(tmp_path / "calm").wait() == 0
    for kill in range(10):
        if kill in (1, 4, 7):
            process = start(tmp_path / "wild", inside=kill % 2)
            wait_for(process, "inside")
        else:
            process = start(tmp_path / "wild")
            wait_for(process, ("ready", "block")[kill % 2])
            time.sleep(rng.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start(tmp_path / "wild").wait() == 0

    def contents(folder):
        found = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder): path.read_bytes() for path in found}

    assert contents(tmp_path / "wild") == contents(tmp_path / "calm")


def test_fingerprint_follows_every_parameter(make_mesh, model):
    state = model_state.split(model)
    first = model_state.fingerprint(state)
    on_mesh = model_state.split(cases.sharded(model, make_mesh(2, 2, 2)))
    assert model_state.fingerprint(on_mesh) == first
    for path, array in state.params.flat().items():
        flipped = array.at[(0,) * array.ndim].multiply(1.0000002)
        changed = state.params.replace({path: flipped})
        other = dataclasses.replace(state, params=changed)
        assert model_state.fingerprint(other) != first, path
    swapped = state.params.flat()["embedding",][::-1]
    other = dataclasses.replace(
        state, params=state.params.replace({("embedding",): swapped})
    )
    assert model_state.fingerprint(other) != first


def test_agreement_of_equal_and_of_cheaper_features(model, corpus, alone):
    full = alone["proxy"]
    same = features.compare(
        full,
        full,
        cluster=lambda f: (f.values[:, 0] > 0).astype(int),
        keep=lambda f: f.uid[:3],
    )
    assert same.sample == 13
    assert abs(same.cosine - 1) < 1e-5
    assert (same.rand_index, same.kept_overlap) == (1.0, 1.0)
    cfg = config.FeaturesConfig(num_layers=1, agreement_sample=9)
    cheap = features.compute(model, corpus, cfg, perf=PERF)
    found = features.measure(model, corpus, cheap, cfg, perf=PERF)
    assert found.sample == 9
    ids = agreement.sample(13, 9, cfg.seed)
    expected = np.mean(np.sum(cheap.values[ids] * full.values[ids], axis=1))
    assert abs(found.cosine - expected) < 1e-5


def test_adjusted_rand_index_by_hand():
    # Six points, {0,1,2}{3,4,5} against {0,1}{2,3}{4,5}: (2 − 18/15) / (9/2 − 18/15).
    index = agreement.adjusted_rand_index(
        np.array([0, 0, 0, 1, 1, 1]), np.array([7, 7, 5, 5, 2, 2])
    )
    assert abs(index - (2 - 1.2) / (4.5 - 1.2)) < 1e-12


def test_features_of_another_tokenisation_follow_their_rows(model, corpus, alone):
    order = np.array([5, 0, 9])
    target = features.take(corpus, order)
    moved = features.align(alone["proxy"], target)
    np.testing.assert_array_equal(moved.values, alone["proxy"].values[order])
    assert moved.uid.tolist() == target.uid.tolist()
    assert moved.example_id.tolist() == [0, 1, 2]
    back = features.align(moved, corpus)
    assert back.example_id.tolist() == [0, 5, 9]
    assert len(back.rejects) == 10


def test_diagnostics_by_hand(alone):
    feats = alone["proxy"]
    found = features.diagnose(feats)
    cosines = feats.values @ feats.values.T
    upper = np.triu_indices(13, 1)
    assert abs(found.mean_cosine - cosines[upper].mean()) < 1e-5
    even = cosines[::2, ::2][np.triu_indices(7, 1)].mean()
    assert abs(found.sources["even"].inside - even) < 1e-5
    assert abs(found.sources["odd"].outside - cosines[1::2, ::2].mean()) < 1e-5
    assert found.sources["even"].count == 7
    assert 1 < found.effective_rank <= 13


def test_effective_rank_of_known_spectra():
    assert abs(diagnostics.effective_rank(np.eye(7)) - 7) < 1e-9
    assert abs(diagnostics.effective_rank(np.ones((7, 3))) - 1) < 1e-9
    rows = np.repeat(np.eye(3), [4, 4, 4], axis=0)
    assert abs(diagnostics.effective_rank(rows) - 3) < 1e-9


def test_noise_ratio_is_what_simulated_steps_show(rng):
    centres = rng.normal(size=(3, 5)) * 2
    labels = np.repeat([0, 1, 2], [60, 30, 30])
    sketch = centres[labels] + rng.normal(size=(120, 5))
    ratio = diagnostics.noise_ratio(sketch, labels)
    mean = sketch.mean(axis=0)

    def noise(draw):
        return np.mean(
            [np.sum((sketch[draw()].mean(axis=0) - mean) ** 2) for _ in range(4000)]
        )

    groups = [np.flatnonzero(labels == c) for c in range(3)]
    stratified = noise(
        lambda: np.concatenate([rng.choice(g, n) for g, n in zip(groups, (6, 3, 3))])
    )
    random = noise(lambda: rng.choice(120, 12))
    assert abs(ratio - stratified / random) < 0.03


def test_worth_of_perfect_and_of_random_features(rng):
    sketch = rng.normal(size=(40, 6))
    unit = sketch / np.linalg.norm(sketch, axis=1, keepdims=True)
    assert features.worth(unit, sketch).cosine_correlation > 0.999999
    other = rng.normal(size=(40, 6))
    other /= np.linalg.norm(other, axis=1, keepdims=True)
    assert abs(features.worth(other, sketch).cosine_correlation) < 0.2

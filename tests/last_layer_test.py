"""`proxy` and `head`: golden gradients, packing, precision, memory."""

import feature_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clusterjax import config, features
from clusterjax.features import (
    batches,
    extractors,
    last_layer,
    model_state,
    projection,
)

PERF = config.PerfConfig(feature_buckets=1, vocab_chunk=64)
UNTIED = [name for name in cases.GOLDEN_NAMES if not cases.is_tied(name)]


@pytest.mark.parametrize("name", UNTIED)
def test_head_is_the_projected_gradient_of_the_output_matrix(name):
    model, corpus, expected = cases.golden(name)
    cfg = config.FeaturesConfig(kind="head", k_in=8, k_out=12)
    feats = features.compute(model, corpus, cfg, perf=PERF)
    gradient_NVH = expected["grad_output_embedding"]
    _, vocab, width = gradient_NVH.shape
    p_v = projection.matrix(
        projection.Projection("rademacher", 12, 0, "head/out"), vocab
    )
    p_h = projection.matrix(projection.Projection("rademacher", 8, 0, "head/in"), width)
    oracle = np.einsum("nvh,vk,hj->nkj", gradient_NVH, p_v, p_h)
    cases.assert_same_features(
        features.raw(feats), oracle.reshape(len(gradient_NVH), -1)[feats.example_id]
    )


def packed_rows(examples, shape):
    """Rows with gaps: (row, first place, example) of each; segments in row order."""
    tokens = np.full(shape, 5, np.int32)
    targets = np.zeros(shape, np.int32)
    slot = np.full(shape, -1, np.int32)
    segments = np.zeros(shape, np.int32)
    positions = np.zeros(shape, np.int32)
    for number, (row, first, (ids, mask)) in enumerate(examples):
        span = slice(first, first + len(ids) - 1)
        tokens[row, span] = ids[:-1]
        targets[row, span] = ids[1:]
        slot[row, span] = np.where(mask[1:], number, -1)
        segments[row, span] = segments[row].max() + 1
        positions[row, span] = np.arange(len(ids) - 1)
    return jax.tree.map(
        jnp.asarray, batches.Rows(tokens, targets, slot, segments, positions)
    )


def test_left_right_and_packed_rows_give_the_same_features(rng):
    # CASES 12: left- and right-padded twins; and three examples in one row.
    model = cases.tiny_model(qk_norm=True, sliding_window=7)
    corpus = cases.random_corpus(rng, 4, 96, longest=14)
    expected = features.compute(model, corpus, config.FeaturesConfig(), perf=PERF)
    head = config.FeaturesConfig(kind="head", k_in=5, k_out=7)
    expected_head = features.compute(model, corpus, head, perf=PERF)
    rules = (
        projection.Projection("rademacher", 7, 0, "head/out"),
        projection.Projection("rademacher", 5, 0, "head/in"),
    )
    examples = [corpus.example(i) for i in range(4)]
    layouts = {
        "left": ([(i, 20 - len(examples[i][0]) + 1) for i in range(4)], (4, 20)),
        "right": ([(i, 0) for i in range(4)], (4, 20)),
        "packed": ([(0, 3), (0, 20), (1, 0), (0, 40)], (2, 60)),
    }
    for places, shape in layouts.values():
        rows = packed_rows(
            [(r, first, examples[i]) for i, (r, first) in enumerate(places)], shape
        )
        hidden = model.hidden(rows.tokens, rows.segment_ids, rows.positions)
        labels = last_layer.label_positions(hidden, rows, 4, 60, 1)
        raw, loss = last_layer.proxy(labels, model.output_matrix(), 40, 1)
        cases.assert_same_features(raw, features.raw(expected))
        np.testing.assert_allclose(loss, expected.loss, rtol=1e-5)
        raw, _ = last_layer.head(labels, model.output_matrix(), *rules, 40, 1)
        cases.assert_same_features(raw, features.raw(expected_head))


def test_features_are_float32_from_narrow_activations():
    # CASES 10: entries of 1e5 overflow half precision, not these.
    model = cases.tiny_model()
    model.norm.scale[...] = model.norm.scale[...] * 1e5
    corpus = cases.random_corpus(np.random.default_rng(1), 6, 96)
    for dtype in ("bfloat16", "float32"):
        cfg = config.FeaturesConfig(compute_dtype=dtype)
        feats = features.compute(model, corpus, cfg, perf=PERF)
        assert feats.values.dtype == np.float32
        assert np.isfinite(feats.values).all()
        assert not feats.rejects or {r.reason for r in feats.rejects} == {
            "zero_feature"
        }
        assert feats.norm.max() > 7e4


def test_one_broken_example_stays_alone(rng):
    corpus = cases.random_corpus(rng, 6, 96)
    model = cases.tiny_model()
    clean = features.compute(model, corpus, config.FeaturesConfig(), perf=PERF)
    tokens = corpus.tokens.copy()
    begin = int(corpus.offsets[2])
    tokens[begin] = 95
    tokens[np.arange(len(tokens)) != begin] %= 95
    model.embedding[...] = model.embedding[...].at[95].set(jnp.nan)
    import dataclasses

    broken = dataclasses.replace(corpus, tokens=tokens)
    feats = features.compute(model, broken, config.FeaturesConfig(), perf=PERF)
    # The embedding is also not the output matrix here, so only example 2 sees it.
    assert feats.example_id.tolist() == [0, 1, 3, 4, 5]
    (reject,) = feats.rejects
    assert reject.reason == "non_finite_feature"
    assert reject.uid == corpus.uid[2]
    assert np.isfinite(feats.values).all()
    assert len(clean.norm) == 6


def step_memory(kind, vocab):
    model = cases.tiny_model(vocab_size=vocab, hidden_size=16, num_layers=1)
    state = model_state.split(model)
    cfg = config.FeaturesConfig(
        kind=kind, k_in=4, k_out=4, dim=8, parameters=("blocks/.*",)
    )
    perf = config.PerfConfig(vocab_chunk=2048)
    extractor = extractors.Extractor(state, cfg, perf, None)
    rows = extractors.empty_rows(batches.Bucket(64, 8), 1)
    extractor.programs(state.params, rows, batches.Sizes(256, 32, 1, 256))
    return extractor.memory.temporaries


@pytest.mark.parametrize("kind", ["proxy", "head", "probe", "per_example"])
def test_temporaries_are_flat_in_the_vocabulary(kind):
    # CASES 17: no [B, T, V] array, in any kind.
    small, large = step_memory(kind, 32_000), step_memory(kind, 152_064)
    assert large <= 1.1 * small
    assert large < 8 * 64 * 152_064 * 4 / 4

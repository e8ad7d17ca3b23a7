"""The feature pass: golden values, invariances, rejects."""

import feature_cases as cases
import numpy as np
import pytest

from clusterjax import config, features


@pytest.mark.parametrize("name", cases.GOLDEN_NAMES)
def test_proxy_equals_the_reference(name):
    model, corpus, expected = cases.golden(name)
    feats = features.compute(model, corpus, config.FeaturesConfig())
    rows = feats.example_id
    cases.assert_same_features(features.raw(feats), expected["feature_raw"][rows])
    cases.assert_same_features(feats.values, expected["feature_unit"][rows])
    np.testing.assert_allclose(feats.loss, expected["example_nll"][rows], rtol=1e-5)
    assert len(rows) == corpus.num_examples


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 2, 2)]
)
def test_features_do_not_depend_on_the_mesh_or_batch(make_mesh, rng, shape):
    model = cases.tiny_model()
    corpus = cases.random_corpus(rng, 23, 96)
    cfg = config.FeaturesConfig()
    alone = features.compute(
        model, corpus, cfg, perf=config.PerfConfig(feature_batch_tokens=1)
    )
    mesh = make_mesh(*shape)
    perf = config.PerfConfig(
        feature_batch_tokens=256, feature_buckets=2, vocab_chunk=40
    )
    found = features.compute(model, corpus, cfg, mesh, perf=perf)
    cases.assert_same_features(features.raw(found), features.raw(alone))
    np.testing.assert_allclose(found.loss, alone.loss, rtol=1e-5)
    assert found.example_id.tolist() == list(range(23))
    assert found.fingerprint == alone.fingerprint

"""A smaller feature model, and the figures that judge a pass."""

import dataclasses

import jax
import numpy as np
import pytest

from clusterjax import clustering, config, data, errors, features, models
from clusterjax.models import checkpoints, lora
from experiments import feature_pass

SOURCE = config.SourceConfig(path="builtin:skills", max_examples=60)


@pytest.fixture(scope="module")
def inputs():
    tokenizer, model = models.load("builtin")
    settings = config.Config(
        data=config.DataConfig(sources=(SOURCE,)),
        features=config.FeaturesConfig(
            num_layers=2, agreement_sample=40, worth_sample=40
        ),
        clustering=config.ClusteringConfig(num_clusters=3, num_restarts=2),
        perf=config.PerfConfig(feature_buckets=1),
    )
    return model, data.load(settings.data, tokenizer), settings


def test_figures_of_a_shortened_pass(inputs, make_mesh, tmp_path):
    model, corpus, settings = inputs
    mesh = make_mesh(2)
    feats = feature_pass.compute(model, corpus, settings, mesh, tmp_path)
    clusters = clustering.fit(feats, settings.clustering, mesh, jax.random.key(0))
    found = feature_pass.figures(model, corpus, feats, clusters, settings, mesh)
    full = features.compute(
        model,
        corpus,
        dataclasses.replace(settings.features, num_layers=None),
        perf=settings.perf,
    )
    chosen = np.random.default_rng(0).choice(corpus.num_examples, 40, replace=False)
    cosine = np.mean(np.sum(full.values[chosen] * feats.values[chosen], axis=1))
    assert found["agreement"]["cosine"] == pytest.approx(cosine, abs=1e-5)
    assert 0 < found["agreement"]["kept_overlap"] <= 1
    assert found["worth"]["sketch_seed"] != settings.features.seed
    assert -1 <= found["worth"]["cosine_correlation"] <= 1
    assert found["worth"]["noise_ratio"] > 0
    assert 1 <= found["diagnostics"]["effective_rank"] <= 60


def test_another_model_makes_the_features(inputs, make_mesh, tmp_path):
    model, corpus, settings = inputs
    tokenizer, _ = models.load("builtin")
    models.save(model, tokenizer, tmp_path / "copy")
    assert checkpoints.read_config(tmp_path / "copy").hidden_size
    plain = dataclasses.replace(
        settings, features=config.FeaturesConfig(model=str(tmp_path / "copy"))
    )
    mesh = make_mesh(1)
    there = feature_pass.compute(model, corpus, plain, mesh, tmp_path / "a")
    here = features.compute(model, corpus, config.FeaturesConfig(), perf=settings.perf)
    np.testing.assert_array_equal(there.uid, here.uid)
    np.testing.assert_allclose(there.values, here.values, atol=1e-5)


def test_adapters_give_the_features_when_they_are_what_is_trained(
    inputs, make_mesh, tmp_path
):
    model, corpus, settings = inputs
    some = features.take(corpus, np.arange(12))
    trained = config.LoraConfig(rank=2, targets=("q", "down"))
    changed = dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, lora=trained),
        features=config.FeaturesConfig(kind="per_example", dim=64),
    )
    mesh = make_mesh(1)
    found = feature_pass.compute(model, some, changed, mesh, tmp_path)
    factors = lora.initialize(model.config, trained, jax.random.key(0))
    expected = features.compute(
        model,
        some,
        changed.features,
        perf=settings.perf,
        factors=factors,
        lora_config=trained,
    )
    np.testing.assert_allclose(found.values, expected.values, atol=1e-5)
    plain = features.compute(model, some, changed.features, perf=settings.perf)
    assert np.abs(found.values - plain.values).max() > 0.05
    renewed = dataclasses.replace(
        changed, selection=config.SelectionConfig(refresh_every=5)
    )
    with pytest.raises(errors.ConfigError, match="refresh_every"):
        feature_pass.compute(model, some, renewed, mesh, tmp_path / "b")

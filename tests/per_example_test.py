"""`per_example` against the reference framework's gradients."""

import feature_cases as cases
import jax
import numpy as np
import pytest

from clusterjax import config, errors, features
from clusterjax.features import model_state, projection
from clusterjax.models import checkpoints, lora, parameters

PERF = config.PerfConfig(feature_buckets=1, vocab_chunk=64)


def gradients(model, corpus):
    """path → per-example gradients [N, ...] by the identity projection."""
    cfg = config.FeaturesConfig(kind="per_example", projection="identity")
    feats = features.compute(model, corpus, cfg, perf=PERF)
    raw_ND, result, first = features.raw(feats), {}, 0
    for path, array in model_state.split(model).params.flat().items():
        part = raw_ND[:, first : first + array.size]
        result[path] = part.reshape(-1, *array.shape)
        first += array.size
    assert first == raw_ND.shape[1]
    return result


@pytest.mark.parametrize("name", cases.GOLDEN_NAMES)
def test_every_gradient_equals_the_reference(name):
    model, corpus, expected = cases.golden(name)
    found = gradients(model, corpus)
    names = expected["grad_names"].tolist()
    seen = set()
    for path, item in parameters.table(model.config).items():
        grads = found[path]
        layers = np.moveaxis(grads, 1, 0) if item.stacked else grads[None]
        for tensor, layer in zip(item.tensor_names(), layers, strict=True):
            norm = np.linalg.norm(layer.reshape(len(layer), -1), axis=1)
            wanted = expected["grad_norms"][:, names.index(tensor)]
            assert np.abs(norm - wanted).max() <= 1e-5 * wanted.max(), tensor
            seen.add(tensor)
    assert seen == set(names)
    query = found["blocks", "q", "kernel"][:, 1].transpose(0, 2, 1)
    assert cases.relative(query, expected["grad_layer1_q_proj"]) < 1e-5
    output = found[("embedding",) if cases.is_tied(name) else ("head",)]
    assert cases.relative(output, expected["grad_output_embedding"]) < 1e-5


@pytest.mark.parametrize("kind", ["rademacher", "sparse"])
def test_projection_of_chosen_parameters(kind):
    model, corpus, _ = cases.golden("llama_untied")
    patterns = ("blocks/(q|o)/kernel", "norm/scale")
    exact = config.FeaturesConfig(
        kind="per_example", projection="identity", parameters=patterns
    )
    raw_ND = features.raw(features.compute(model, corpus, exact, perf=PERF))
    cfg = config.FeaturesConfig(
        kind="per_example", projection=kind, parameters=patterns, dim=40, block_size=777
    )
    feats = features.compute(
        model, corpus, cfg, perf=config.PerfConfig(feature_micro_batch=2)
    )
    oracle, first = 0, 0
    for path, array in model_state.split(model).params.flat().items():
        name = "/".join(path)
        if name in ("blocks/q/kernel", "blocks/o/kernel", "norm/scale"):
            rule = projection.Projection(kind, 40, 0, name)
            matrix = np.asarray(projection.matrix(rule, array.size))
            oracle = oracle + raw_ND[:, first : first + array.size] @ matrix
            first += array.size
    assert first == raw_ND.shape[1]
    cases.assert_same_features(features.raw(feats), oracle)


def test_adapter_gradients_equal_those_of_the_matrices():
    model, corpus, expected = cases.golden("llama_untied")
    cfg = config.LoraConfig(rank=2, alpha=6.0, targets=("q",))
    factors = lora.initialize(model.config, cfg, jax.random.key(0))
    feats = features.compute(
        model,
        corpus,
        config.FeaturesConfig(
            kind="per_example", projection="identity", parameters=("lora/q/b",)
        ),
        perf=PERF,
        factors=factors,
        lora_config=cfg,
    )
    # With B = 0: ∂loss/∂B = alpha/rank · Aᵀ ∂loss/∂W.
    gradient_NIO = expected["grad_layer1_q_proj"].transpose(0, 2, 1)
    oracle = 3.0 * np.einsum("ir,nio->nro", factors["q"]["a"][1], gradient_NIO)
    found = features.raw(feats).reshape(len(oracle), *factors["q"]["b"].shape)[:, 1]
    assert cases.relative(found, oracle[feats.example_id]) < 1e-5


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"parameters": ("blocks/query",)}, "blocks/query"),
        ({"parameters": ("(",)}, "regular expression"),
        ({}, "needs features.dim"),
        ({"projection": "identity", "dim": 7}, "features.dim=7"),
    ],
)
def test_impossible_settings_stop_first(rng, changes, match):
    cfg = config.FeaturesConfig(**{"kind": "per_example", **changes})
    with pytest.raises(errors.ConfigError, match=match):
        features.compute(cases.tiny_model(), cases.random_corpus(rng, 2, 96), cfg)


def test_golden_models_are_read_whole():
    model = checkpoints.load_decoder(cases.GOLDEN / "qwen3_qknorm")
    flat = model_state.split(model).params.flat()
    assert set(flat) == set(parameters.table(model.config))

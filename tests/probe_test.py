"""`probe` against exact per-example gradients with the same projections."""

import feature_cases as cases
import jax
import numpy as np
import pytest

from clusterjax import config, errors, features
from clusterjax.features import batches, extractors, model_state, probe, projection
from clusterjax.models import decoder

PERF = config.PerfConfig(feature_buckets=1, vocab_chunk=64)


def kronecker(found: probe.Probe, site: probe.Site, layer: int, gradient_NIO):
    """P_inᵀ G P_out of one matrix, [N, k_in · k_out]."""
    sides = []
    for side, rows, width in (
        ("in", site.width_in, site.k_in),
        ("out", site.width_out, site.k_out),
    ):
        key = projection.stream(f"{site.name}/{layer}/{side}")
        sides.append(np.asarray(found.tap.entries(key, rows, width)) / np.sqrt(width))
    both = np.einsum("nio,ik,om->nkm", gradient_NIO, *sides)
    return both.reshape(len(both), -1)


def exact_kernels(model, corpus):
    """linear name → per-example gradients [N, layers, in, out]."""
    cfg = config.FeaturesConfig(
        kind="per_example", projection="identity", parameters=("blocks/.*/kernel",)
    )
    raw_ND = features.raw(features.compute(model, corpus, cfg, perf=PERF))
    paths = {
        path: array.shape
        for path, array in model_state.split(model).params.flat().items()
        if path[-1] == "kernel"
    }
    result, first = {}, 0
    for path, shape in paths.items():
        size = int(np.prod(shape))
        result[path[1]] = raw_ND[:, first : first + size].reshape(-1, *shape)
        first += size
    assert first == raw_ND.shape[1]
    return result


def check_all_layers(name, **changes):
    model, corpus, _ = cases.golden(name)
    cfg = config.FeaturesConfig(kind="probe", k_in=8, k_out=6, **changes)
    found = probe.build(model_state.split(model), cfg)
    raw_ND = features.raw(features.compute(model, corpus, cfg, perf=PERF))
    exact = exact_kernels(model, corpus)
    oracle = [
        kronecker(found, site, layer, exact[site.name][:, layer])
        for site in found.sites
        for layer in found.layers
    ]
    cases.assert_same_features(raw_ND, np.concatenate(oracle, axis=1))
    return found


def test_every_linear_layer_equals_its_projected_gradient():
    found = check_all_layers("llama_tied")
    assert found.covered() == [
        f"blocks/{name}/kernel[{layer}]"
        for name in decoder.LINEAR_NAMES
        for layer in range(3)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.GOLDEN_NAMES)
def test_every_linear_layer_of_every_golden_model(name):
    check_all_layers(name)
    check_all_layers(
        name,
        projection="normal",
        layers=(0, 2),
        matrices=("v", "down"),
        matrix_sizes=("down=3x5",),
    )


@pytest.mark.parametrize("name", cases.GOLDEN_NAMES)
def test_reference_gradient_of_one_matrix(name):
    model, corpus, expected = cases.golden(name)
    cfg = config.FeaturesConfig(
        kind="probe", k_in=9, k_out=7, layers=(1,), matrices=("q",)
    )
    feats = features.compute(model, corpus, cfg, perf=PERF)
    found = probe.build(model_state.split(model), cfg)
    gradient_NIO = expected["grad_layer1_q_proj"].transpose(0, 2, 1)
    oracle = kronecker(found, found.sites[0], 1, gradient_NIO)
    cases.assert_same_features(features.raw(feats), oracle[feats.example_id])


def test_blocks_below_the_lowest_chosen_one_have_no_backward_pass(rng):
    model = cases.tiny_model(num_layers=16)
    corpus = cases.random_corpus(rng, 6, 96)
    whole = config.FeaturesConfig(kind="probe", k_in=4, k_out=3)
    some = config.FeaturesConfig(kind="probe", k_in=4, k_out=3, layers=(15, 13))
    found = probe.build(model_state.split(model), whole)
    raw_ND = features.raw(features.compute(model, corpus, whole, perf=PERF))
    parts = raw_ND.reshape(6, len(found.sites), 16, 12)[:, :, [13, 15]]
    upper = features.compute(model, corpus, some, perf=PERF)
    cases.assert_same_features(features.raw(upper), parts.reshape(6, -1))

    def step(cfg):
        state = model_state.split(model, remat="dots")
        extractor = extractors.Extractor(state, cfg, PERF, None)
        rows = extractors.empty_rows(batches.Bucket(64, 64), 1)
        sizes = batches.Sizes(512, 8, 1, 512)
        (program,) = extractor.programs(state.params, rows, sizes)
        return extractor.memory.temporaries, program.as_text().count(" while(")

    (all_bytes, all_loops), (few_bytes, few_loops) = step(whole), step(some)
    # What a backward pass needs of a block is kept for three of sixteen, and the lower
    # blocks are one more loop: forward only.
    assert few_bytes < 0.5 * all_bytes
    assert few_loops == all_loops + 1


def test_packed_rows_give_the_same_probes(rng):
    from last_layer_test import packed_rows

    model = cases.tiny_model()
    corpus = cases.random_corpus(rng, 4, 96, longest=14)
    cfg = config.FeaturesConfig(kind="probe", k_in=4, k_out=3)
    expected = features.compute(model, corpus, cfg, perf=PERF)
    state = model_state.split(model)
    examples = [corpus.example(i) for i in range(4)]
    rows = packed_rows(
        [
            (0, 3, examples[0]),
            (0, 20, examples[1]),
            (1, 0, examples[2]),
            (1, 17, examples[3]),
        ],
        (2, 40),
    )
    raw, loss = jax.jit(
        lambda params, rows: probe.build(state, cfg)(
            params, rows, size=40, shards=1, per_row=2, vocab_chunk=64, vocab_shards=1
        )
    )(state.params, rows)
    cases.assert_same_features(raw, features.raw(expected))
    np.testing.assert_allclose(loss, expected.loss, rtol=1e-5)


def test_final_width_is_a_second_projection(rng):
    model = cases.tiny_model()
    corpus = cases.random_corpus(rng, 5, 96)
    cfg = config.FeaturesConfig(kind="probe", k_in=4, k_out=4)
    raw_ND = features.raw(features.compute(model, corpus, cfg, perf=PERF))
    narrow = config.FeaturesConfig(kind="probe", k_in=4, k_out=4, dim=32, block_size=50)
    found = features.compute(model, corpus, narrow, perf=PERF)
    rule = projection.Projection("rademacher", 32, 0, "features.dim")
    oracle = raw_ND @ np.asarray(projection.matrix(rule, raw_ND.shape[1]))
    assert found.values.shape == (5, 32)
    cases.assert_same_features(features.raw(found), oracle)


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"matrices": ("q", "query")}, "query"),
        ({"layers": (0, 3)}, "0 to 2"),
        ({"projection": "sparse"}, "rademacher or normal"),
        ({"k_in": 0}, "k_in=0"),
        ({"matrix_sizes": ("down=8",)}, "down=8"),
        ({"matrix_sizes": ("q=8x8",), "matrices": ("up",)}, "q=8x8"),
        ({"dim": 10**6}, "features.dim=1000000"),
        ({"num_layers": 4}, "has 3 layers"),
    ],
)
def test_impossible_settings_stop_first(rng, changes, match):
    cfg = config.FeaturesConfig(**{"kind": "probe", **changes})
    with pytest.raises(errors.ConfigError, match=match):
        features.compute(cases.tiny_model(), cases.random_corpus(rng, 2, 96), cfg)

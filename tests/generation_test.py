"""Generation with a cache against the whole model run anew for every token."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from clusterjax import models
from clusterjax.models import checkpoints, decoder

GOLDEN = pathlib.Path(__file__).parent / "golden" / "models"
PROMPTS = [[5, 17, 130], [8] * 20, list(range(40, 81))]
NUM_NEW = 12


@functools.partial(jax.jit, static_argnums=0)
def next_logits(graph, params, tokens_T, length, adapters):
    model = nnx.merge(graph, params)
    hidden_BTH = model.hidden(tokens_T[None], adapters=adapters)
    return model.logits(hidden_BTH[0, length - 1])


def greedy_without_cache(model, prompt, num_new, adapters=None):
    tokens, graph_params = list(prompt), nnx.split(model)
    row = np.zeros(64, np.int32)
    for _ in range(num_new):
        row[: len(tokens)] = tokens
        logits_V = next_logits(*graph_params, row, len(tokens), adapters)
        tokens.append(int(jnp.argmax(logits_V)))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", ["mistral_window", "qwen3_qknorm"])
def test_greedy_equals_the_model_without_cache(name):
    model = checkpoints.load_decoder(GOLDEN / name)
    found = models.generate(model, PROMPTS, NUM_NEW)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        assert tokens.dtype == np.int32
        assert tokens.tolist() == greedy_without_cache(model, prompt, NUM_NEW)


def test_a_window_in_some_layers_only():
    model = checkpoints.load_decoder(GOLDEN / "mistral_window")
    config = dataclasses.replace(model.config, windowed_layers=(True, False, True))
    flat = nnx.to_flat_state(nnx.state(model))
    model = checkpoints.assemble(config, {path: value[...] for path, value in flat})
    found = models.generate(model, PROMPTS, NUM_NEW)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        assert tokens.tolist() == greedy_without_cache(model, prompt, NUM_NEW)


def test_stops_at_the_end_token_row_by_row():
    model = checkpoints.load_decoder(GOLDEN / "llama3_rope")
    free = models.generate(model, PROMPTS, NUM_NEW)
    ends = [int(free[0][2]), int(free[1][6])]
    found = models.generate(model, PROMPTS, NUM_NEW, end_ids=ends)
    for tokens, all_tokens in zip(found, free, strict=True):
        hits = np.flatnonzero(np.isin(all_tokens, ends))
        stop = hits[0] + 1 if hits.size else NUM_NEW
        np.testing.assert_array_equal(tokens, all_tokens[:stop])
    assert len(found[0]) <= 3


def test_adapters_take_part():
    model = checkpoints.load_decoder(GOLDEN / "llama_tied")
    change = jax.random.normal(jax.random.key(0), (3, 48, 80))
    adapters = decoder.Adapters({"up": change}, add_matrix)
    found = models.generate(model, PROMPTS[:1], NUM_NEW, adapters=adapters)
    want = greedy_without_cache(model, PROMPTS[0], NUM_NEW, adapters)
    assert found[0].tolist() == want
    assert want != greedy_without_cache(model, PROMPTS[0], NUM_NEW)


def add_matrix(x, y, value, shared):
    return y + x @ value


def test_draws_follow_the_probabilities():
    model = checkpoints.load_decoder(GOLDEN / "llama_untied")
    count, temperature = 4000, 0.7
    draws = models.generate(
        model, [PROMPTS[0]] * count, 1, temperature=temperature, key=jax.random.key(1)
    )
    row = np.zeros(64, np.int32)
    row[:3] = PROMPTS[0]
    logits_V = next_logits(*nnx.split(model), row, 3, None)
    want = np.asarray(jax.nn.softmax(logits_V / temperature))
    found = np.bincount([int(tokens[0]) for tokens in draws], minlength=199) / count
    # The expected total variation of this many draws from the right distribution is
    # at most 0.5 · sqrt(V / count) = 0.11.
    assert 0.5 * np.abs(found - want).sum() < 0.12
    again = models.generate(
        model, [PROMPTS[0]] * count, 1, temperature=temperature, key=jax.random.key(1)
    )
    np.testing.assert_array_equal(draws, again)


def test_rows_may_be_sharded(make_mesh):
    model = checkpoints.load_decoder(GOLDEN / "llama3_rope")
    rows = jax.sharding.NamedSharding(
        make_mesh(data=2), jax.sharding.PartitionSpec("data")
    )
    prompts = [*PROMPTS, [3, 4]]
    want = models.generate(model, prompts, 5)
    graph, params = nnx.split(model)
    replicated = jax.sharding.NamedSharding(rows.mesh, jax.sharding.PartitionSpec())
    model = nnx.merge(graph, jax.device_put(params, replicated))
    found = models.generate(model, prompts, 5, row_sharding=rows)
    np.testing.assert_array_equal(found, want)


def test_mistakes_are_refused():
    model = checkpoints.load_decoder(GOLDEN / "llama_tied")
    assert models.generate(model, [], 3) == []
    with pytest.raises(ValueError, match="at least one token"):
        models.generate(model, [[1], []], 3)
    with pytest.raises(ValueError, match="needs a key"):
        models.generate(model, [[1]], 3, temperature=1.0)

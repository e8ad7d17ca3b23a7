"""Whole little runs: same curves on any mesh, evaluation, bad steps, adapters."""

import dataclasses
import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training_cases
from flax import nnx
from tensorboardX.proto import event_pb2

from clusterjax import config, diagnostics, errors, evaluate, train
from clusterjax import input as input_lib
from clusterjax import mesh as mesh_lib
from clusterjax import step as step_lib
from clusterjax.models import checkpoints, lora

OPTIMIZER = config.OptimizerConfig(learning_rate=1e-2, warmup_steps=1)
CONFIG = config.TrainConfig(
    optimizer=OPTIMIZER, log_every=1, checkpoint_every=0, save_model=False
)


def _fit(mesh, folder, *, cfg=CONFIG, model=None, corpus=None, schedule=None, **more):
    corpus = corpus or training_cases.corpus()
    return train.fit(
        model or training_cases.model(),
        corpus,
        schedule or training_cases.schedule(corpus),
        cfg,
        mesh,
        folder,
        perf=config.PerfConfig(vocab_chunk=25, async_checkpoints=False),
        **more,
    )


def _losses(result):
    return [line["loss"] for line in result.history if line["kind"] == "train"]


def test_same_curve_and_figures_on_any_mesh(make_mesh, tmp_path):
    """1 device, and 2 × 2 × 2 with sharded parameters and two micro-steps."""
    held_out = training_cases.corpus(12, seed=5)
    corpus = training_cases.corpus()
    one = _fit(make_mesh(1), tmp_path / "one", eval_corpus=held_out)
    many = _fit(
        make_mesh(2, 2, 2),
        tmp_path / "many",
        eval_corpus=held_out,
        schedule=training_cases.schedule(corpus, accumulation_steps=2),
    )
    np.testing.assert_allclose(_losses(many), _losses(one), rtol=1e-5)
    assert many.final_eval["loss"] == pytest.approx(one.final_eval["loss"], rel=1e-5)
    assert one.final_eval["loss"] < one.initial_eval["loss"] - 0.01
    kernel = many.state.params["blocks.up.kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 8, 16)
    for a, b in zip(one.history, many.history, strict=True):
        assert a["step"] == b["step"]
        if a["kind"] == "train":
            assert (a["tokens"], a["labels"]) == (b["tokens"], b["labels"])
    _check_groups(one, corpus)


def _check_groups(result, corpus):
    """Losses by source and by cluster add up to the loss of all label tokens."""
    seen = 0
    for line in result.history:
        if line["kind"] != "train":
            continue
        for kind in ("sources", "clusters"):
            parts = line[kind].values()
            labels = sum(part["labels"] for part in parts)
            total = sum(part["loss"] * part["labels"] for part in parts)
            assert labels == line["labels"] - seen
            assert total / labels == pytest.approx(line["token_loss"], rel=1e-5)
        seen = line["labels"]
    assert seen == corpus.num_labels.sum()


def test_evaluation_is_the_plain_loss_of_every_example(make_mesh):
    corpus = training_cases.corpus(13, seed=3)
    model = training_cases.model()
    tmpl, params = step_lib.split(model)
    perf = config.PerfConfig(vocab_chunk=25, eval_batch_tokens=64)
    evaluator = evaluate.Evaluator(
        tmpl, corpus, make_mesh(2), config.EvalConfig(), perf
    )
    found = evaluator(params, {})
    for i in range(corpus.num_examples):
        tokens, is_label = corpus.example(i)
        padded = np.pad(tokens, (0, 41 - len(tokens)))
        logp = np.asarray(jax.nn.log_softmax(model(jnp.asarray(padded)[None, :-1]))[0])
        picked = logp[np.arange(len(tokens) - 1), tokens[1:]][is_label[1:]]
        assert found.nll[i] == pytest.approx(-picked.sum(), rel=1e-5)
    summary = found.summary()
    for s, name in enumerate(corpus.source_names):
        mine = corpus.source_id == s
        assert summary["sources"][name]["loss"] == pytest.approx(
            found.nll[mine].sum() / corpus.num_labels[mine].sum(), rel=1e-6
        )
    assert summary["loss"] == pytest.approx(found.nll.sum() / corpus.num_labels.sum())


def test_evaluation_takes_an_even_sample():
    corpus = training_cases.corpus(10)
    np.testing.assert_array_equal(evaluate.choose(corpus, 4), [0, 2, 5, 7])
    np.testing.assert_array_equal(evaluate.choose(corpus, None), np.arange(10))
    lengths = np.array([2, 3, 100, 40, 41, 500, 33])
    found = evaluate.row_lengths(lengths)
    assert len(found) <= 6 and found.max() == 512 and (found % 32 == 0).all()


def _poisoned():
    """A model that is not finite on one example: token 60 has a NaN embedding."""
    corpus = training_cases.corpus()
    tokens = np.minimum(corpus.tokens, 59)
    tokens[corpus.offsets[7] + 1] = 60
    corpus = dataclasses.replace(corpus, tokens=tokens)
    model = training_cases.model(tie_embeddings=False)
    model.embedding[...] = model.embedding[...].at[60].set(jnp.nan)
    return model, corpus, training_cases.schedule(corpus, packing=False)


def test_nonfinite_step_stops_and_names_the_example(make_mesh, tmp_path):
    model, corpus, schedule = _poisoned()
    with pytest.raises(errors.UserError, match=r"example\(s\) 7 \(s:7\) is not finite"):
        _fit(make_mesh(1), tmp_path, model=model, corpus=corpus, schedule=schedule)


def test_nonfinite_step_may_be_passed_over(make_mesh, tmp_path):
    model, corpus, schedule = _poisoned()
    cfg = dataclasses.replace(CONFIG, nonfinite="skip")
    found = _fit(
        make_mesh(2), tmp_path, cfg=cfg, model=model, corpus=corpus, schedule=schedule
    )
    assert found.history[-1]["skipped"] == 1
    head = np.asarray(found.state.params["head"])
    assert np.isfinite(head).all()
    assert np.abs(head - np.asarray(model.head[...])).max() > 1e-3
    # JSON has no NaN: such numbers are null.
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["loss"] is None for line in lines) == 1


def test_adapters_alone_are_trained_and_saved(make_mesh, tmp_path):
    model = training_cases.model()
    before = {p: np.asarray(v) for p, v in step_lib.split(model)[1].items()}
    settings = config.LoraConfig(rank=2, dropout=0.1, targets=("q", "down"))
    cfg = dataclasses.replace(CONFIG, save_model=True)
    model_cfg = config.ModelConfig(lora=settings)
    found = _fit(make_mesh(2), tmp_path, cfg=cfg, model=model, model_cfg=model_cfg)
    assert set(found.state.params) == {
        f"lora.{name}.{side}" for name in ("q", "down") for side in "ab"
    }
    assert _losses(found)[-1] != _losses(found)[0]
    after = step_lib.split(found.model)[1]
    changed = {p for p in before if not np.array_equal(before[p], np.asarray(after[p]))}
    assert changed == {"blocks.q.kernel", "blocks.down.kernel"}
    factors, read = lora.load(tmp_path / "adapters", model.config)
    np.testing.assert_array_equal(
        np.asarray(factors["q"]["b"]), np.asarray(found.state.params["lora.q.b"])
    )
    assert (read.rank, read.alpha) == (2, settings.alpha)
    loaded = checkpoints.load_decoder(tmp_path / "model")
    np.testing.assert_allclose(
        np.asarray(loaded.blocks.q.kernel[...]),
        np.asarray(found.model.blocks.q.kernel[...]),
        rtol=1e-6,
    )


def test_dropout_does_not_depend_on_the_placement(make_mesh):
    corpus = training_cases.corpus()
    settings = config.LoraConfig(rank=2, dropout=0.3, targets=("q", "v"))
    base, frozen = step_lib.split(training_cases.model())
    tmpl, params = step_lib.with_lora(base, settings)
    params = {n: x + 0.1 for n, x in params.items()}
    found = []
    for size, packing in ((1, True), (4, False)):
        mesh = make_mesh(size)
        schedule = training_cases.schedule(corpus, packing=packing)
        layout = input_lib.Layout(schedule, corpus, mesh)
        shards = mesh_lib.local_shards(mesh)
        batch = input_lib.put(layout.rows(0, shards).batch, mesh, shards)
        sizes = step_lib.Sizes(layout.label_slots, 25)
        gradient = jax.jit(step_lib.make_gradient(tmpl, mesh, sizes))
        found.append(gradient(params, frozen, batch, 3)[:2])
        other = gradient(params, frozen, batch, 4)[0]
        assert abs(float(other) - float(found[-1][0])) > 1e-6
    (loss_a, grads_a), (loss_b, grads_b) = found
    assert float(loss_a) == pytest.approx(float(loss_b), rel=1e-6)
    for name in grads_a:
        a, b = np.asarray(grads_a[name]), np.asarray(grads_b[name])
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(a).max())


def test_worker_statistics_equal_those_of_explicit_gradients(make_mesh):
    corpus = training_cases.corpus()
    schedule = training_cases.schedule(corpus)
    mesh = make_mesh(4)
    tmpl, params = step_lib.split(training_cases.model())
    layout = input_lib.Layout(schedule, corpus, mesh)
    sizes = step_lib.Sizes(layout.label_slots, 25)
    rows = layout.rows(0, (0, 1, 2, 3)).batch
    alone = make_mesh(1)
    gradient = jax.jit(step_lib.make_gradient(tmpl, alone, sizes))
    per_shard = rows.inputs.shape[1] // 4
    vectors = []
    for r in range(4):
        part = jax.tree.map(
            lambda x, r=r: x[:, r * per_shard : (r + 1) * per_shard], rows
        )
        grads = gradient(params, {}, part)[1]
        vectors.append(np.concatenate([np.ravel(g) for g in grads.values()]))
    g = np.stack(vectors).astype(np.float64)
    unit = g / np.linalg.norm(g, axis=1, keepdims=True)
    cosines = (unit @ unit.T)[np.triu_indices(4, 1)]
    diversity = 4 * (g**2).sum() / (g.sum(0) ** 2).sum()
    batch = input_lib.put(rows, mesh, (0, 1, 2, 3))
    found = diagnostics.make_worker_statistics(tmpl, mesh, sizes)(params, {}, batch, 0)
    assert float(found["worker_cosine"]) == pytest.approx(cosines.mean(), abs=1e-5)
    assert float(found["gradient_diversity"]) == pytest.approx(diversity, rel=1e-4)


def test_low_precision_masters_are_warned_about(make_mesh, tmp_path, capsys):
    """CASES 13."""
    model = training_cases.model(dtype="bfloat16")
    schedule = training_cases.schedule(training_cases.corpus(), max_steps=1)
    _fit(make_mesh(1), tmp_path, model=model, schedule=schedule)
    assert "warning: master weights are bfloat16" in capsys.readouterr().out


def test_the_given_model_stays_as_it_was(make_mesh, tmp_path):
    model = training_cases.model()
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    schedule = training_cases.schedule(training_cases.corpus(), max_steps=2)
    _fit(make_mesh(2), tmp_path, model=model, schedule=schedule)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_profile_steps_of_another_form_are_refused(make_mesh, tmp_path):
    report = config.ReportConfig(profile_steps="ten")
    with pytest.raises(errors.ConfigError, match=r"report\.profile_steps='ten'"):
        _fit(make_mesh(1), tmp_path, report=report)


def test_profile_and_tensorboard_files_are_written(make_mesh, tmp_path):
    report = config.ReportConfig(profile_steps="2:2", tensorboard=True)
    found = _fit(make_mesh(1), tmp_path, report=report)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    (path,) = (tmp_path / "tensorboard").glob("events.out.*")
    values = dict(_events(path.read_bytes()))
    lines = [line for line in found.history if line["kind"] == "train"]
    for line in lines:
        for name in ("loss", "grad_norm", "lr", "tokens"):
            assert values[f"train/{name}", line["step"]] == np.float32(line[name])
    losses = lines[-1]["clusters"]
    for cluster, part in losses.items():
        key = f"train/clusters/{cluster}/loss", lines[-1]["step"]
        assert values[key] == np.float32(part["loss"])


def _events(content):
    """((tag, step), value) of the records of an events file."""
    while content:
        (size,) = struct.unpack("<Q", content[:8])
        event = event_pb2.Event.FromString(content[12 : 12 + size])
        for value in event.summary.value:
            yield (value.tag, event.step), value.simple_value
        content = content[16 + size :]

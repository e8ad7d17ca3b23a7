"""HLO costs by hand and closed form, against a run's own program, and the figures."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import training_cases
from jax.sharding import NamedSharding, PartitionSpec

from clusterjax import config, errors, train
from clusterjax import loop as loop_lib
from clusterjax.models import decoder
from experiments import budget, estimate, hlo_cost, hlo_text, programs, topology

CORPUS = budget.Data(num_examples=1000, mean_tokens=30.0, mean_labels=15.0)


def _analysed(function, *arguments, num_devices=1):
    compiled = jax.jit(function).lower(*arguments).compile()
    return hlo_cost.analyse(compiled.as_text(), num_devices)


def test_loops_count_as_often_as_they_run():
    """3 × 5 products [8, 16] × [16, 16] in nested scans, and one [8, 16] × [16, 4]."""

    def function(x, w, v):
        def inner(x, w):
            return jnp.tanh(x @ w), None

        def outer(x, _):
            return jax.lax.scan(inner, x, w)[0], None

        return jax.lax.scan(outer, x, length=3)[0] @ v

    shapes = ((8, 16), (5, 16, 16), (16, 4))
    found = _analysed(function, *(jax.ShapeDtypeStruct(s, "float32") for s in shapes))
    assert found.flops == 3 * 5 * 2 * 8 * 16 * 16 + 2 * 8 * 16 * 4
    assert found.uncounted_loops == 0


def test_loops_of_unknown_length_are_told():
    def function(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x @ x + 1, x)

    found = _analysed(function, jax.ShapeDtypeStruct((4, 4), "float32"))
    assert found.uncounted_loops == 1
    assert found.flops == 2 * 4**3


def test_collectives_inside_loops(make_mesh):
    """A matrix of 4 shards is gathered in each of 6 rounds; 3/4 of it is received."""
    mesh = make_mesh(fsdp=4)

    def function(x, w):
        def body(x, layer):
            return jnp.tanh(x @ layer), None

        return jax.lax.scan(body, x, w)[0]

    def shape(size, *spec):
        placed = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(size, jnp.float32, sharding=placed)

    arguments = shape((64, 64), "fsdp"), shape((6, 64, 64), None, "fsdp")
    found = _analysed(function, *arguments, num_devices=4)
    assert found.collectives == {"all-gather": 6 * 64 * 64 * 4 * 3 / 4}
    assert found.flops == 6 * 2 * 64**3 / 4


# The forms of the TPU compiler: no noted trip count, products as convolutions, kernels.
TPU_TEXT = """HloModule jit_f, is_scheduled=true

%fused (p.1: bf16[8,32], p.2: bf16[32,64]) -> f32[8,64] {
  %p.1 = bf16[8,32]{1,0:T(8,128)(2,1)} parameter(0)
  %p.2 = bf16[32,64]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %c = f32[8,64]{1,0} convolution(%p.1, %p.2), dim_labels=bf_io->bf
}

%all-reduce-scatter.1 (p.3: f32[16]) -> f32[4] {
  %p.3 = f32[16]{0} parameter(0)
  %zero = s32[] constant(0)
  %r = f32[16]{0} all-reduce(%p.3), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %s = f32[4]{0} dynamic-slice(%r, %zero), dynamic_slice_sizes={4}
}

%body (state.1: (s32[], bf16[8,32])) -> (s32[], bf16[8,32]) {
  %state.1 = (s32[], bf16[8,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state.1), index=0
  %x = bf16[8,32]{1,0} get-tuple-element(%state.1), index=1
  %w = bf16[32,64]{1,0} constant({...})
  %f = f32[8,64]{1,0} fusion(%x, %w), kind=kOutput, calls=%fused
  %g = f32[16]{0} constant({...})
  %scattered = f32[4]{0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %t = (s32[], bf16[8,32]{1,0}) tuple(%i, %x)
}

%condition (state.2: (s32[], bf16[8,32])) -> pred[] {
  %state.2 = (s32[], bf16[8,32]{1,0}) parameter(0)
  %limit = s32[]{:T(128)} constant(12)
  %j = s32[]{:T(128)} get-tuple-element(%state.2), index=0
  ROOT %lt = pred[]{:T(512)} compare(%j, %limit), direction=LT
}

ENTRY %main (a: (s32[], bf16[8,32]), q: bf16[2,4,256,16]) -> bf16[2,4,256,16] {
  %a = (s32[], bf16[8,32]{1,0}) parameter(0)
  %q = bf16[2,4,256,16]{3,2,1,0} parameter(1)
  %tiles = s8[1,2,2]{2,1,0} constant({...})
  %loop = (s32[], bf16[8,32]{1,0}) while(%a), condition=%condition, body=%body
  ROOT %splash_mha_fwd.1 = bf16[2,4,256,16]{3,2,1,0} custom-call(%tiles, %q, %q, %q), \
custom_call_target="tpu_custom_call"
}
"""


def test_forms_of_the_tpu_compiler():
    found = hlo_cost.analyse(TPU_TEXT, 8)
    product = 2 * 8 * 32 * 64
    attention = 2 * 2 * 2 * 4 * 256 * 256 * 16 * 3 / 4  # 3 of 4 tiles of a causal mask
    assert found.flops == 12 * product + attention
    assert found.collectives == {"reduce-scatter": 12 * 16 * 4 * 3 / 4}
    assert found.uncounted_loops == found.silent_kernels == 0


def test_loops_unrolled_by_the_compiler_count_in_larger_steps():
    """A body that adds 3 to its counter runs 4 times below 12."""
    unrolled = TPU_TEXT.replace(
        "ROOT %t = (s32[], bf16[8,32]{1,0}) tuple(%i, %x)",
        """%three = s32[]{:T(128)} constant(3)
  %next = s32[]{:T(128)} add(%i, %three)
  %copied = s32[]{:T(128)} copy(%next)
  ROOT %t = (s32[], bf16[8,32]{1,0}) tuple(%copied, %x)""",
    )
    found, whole = (hlo_cost.analyse(text, 8) for text in (unrolled, TPU_TEXT))
    assert whole.flops - found.flops == 8 * 2 * 8 * 32 * 64
    assert found.collectives == {"reduce-scatter": 4 * 16 * 4 * 3 / 4}


def test_batched_product_written_as_a_convolution():
    """[3, 8, 5] × [3, 5, 7] with the batch as a padded, dilated spatial axis."""
    text = """ENTRY %main (a: f32[3,8,5], b: f32[3,5,7]) -> f32[3,8,7] {
  %a = f32[3,8,5]{2,1,0} parameter(0)
  %b = f32[3,5,7]{2,1,0} parameter(1)
  ROOT %c = f32[3,8,7]{2,1,0} convolution(%a, %b), window={size=3 stride=2 pad=0_2 \
lhs_dilate=3}, dim_labels=0bf_0io->0bf
}
"""
    assert hlo_cost.analyse(text, 1).flops == 2 * 3 * 8 * 5 * 7


@pytest.mark.parametrize(
    "groups",
    ["{{0,1},{2,3}}", "[2,2]<=[4]", "[2,2]<=[2,2]T(1,0)", "mesh['a'=2,'b'=2] {'b'}"],
)
def test_group_sizes(groups):
    assert hlo_text.group_size(f", replica_groups={groups}, x", 4) == 2


def test_updates_of_a_slice_are_traffic_of_the_slice():
    """Writing 1 of 1,000 rows in place moves a row, not the matrix."""

    def function(rows, row):
        return jax.lax.fori_loop(0, 9, lambda i, r: r.at[i].set(row), rows)

    shapes = (
        jax.ShapeDtypeStruct((1000, 64), "float32"),
        jax.ShapeDtypeStruct((64,), "float32"),
    )
    compiled = jax.jit(function, donate_argnums=0).lower(*shapes).compile()
    found = hlo_cost.analyse(compiled.as_text(), 1)
    assert found.traffic < 1000 * 64 * 4


def _run_program(monkeypatch, tmp_path, mesh, settings):
    """The program that a real training run compiles, and the shape of its batches."""
    kept = []
    original = loop_lib.Loop._compile

    def compile_and_keep(self, item):
        shape = item.batch.inputs.shape
        kept.append((original(self, item), shape, item.label_slots))
        return kept[-1][0]

    monkeypatch.setattr(loop_lib.Loop, "_compile", compile_and_keep)
    corpus, model = training_cases.corpus(), training_cases.model()
    schedule = training_cases.schedule(corpus, accumulation_steps=2)
    train.fit(
        model, corpus, schedule, settings.train, mesh, tmp_path, perf=settings.perf
    )
    return model.config, schedule.num_steps, *kept[0]


def test_step_is_that_of_a_run_and_obeys_the_closed_form(
    make_mesh, monkeypatch, tmp_path
):
    mesh = make_mesh(data=2, fsdp=2)
    settings = dataclasses.replace(
        config.Config(),
        train=config.TrainConfig(
            optimizer=config.OptimizerConfig(name="adafactor"), save_model=False
        ),
        perf=config.PerfConfig(vocab_chunk=61),
    )
    cfg, num_steps, program, shape, labels = _run_program(
        monkeypatch, tmp_path, mesh, settings
    )
    micro_steps, num_rows, length = shape
    rows = programs.Rows(micro_steps, num_rows // 4, length, labels)
    found = programs.train_step(cfg, settings, mesh, rows, num_steps)
    ran = hlo_cost.analyse(program.as_text(), mesh.size)
    assert found.cost.flops == ran.flops
    assert found.cost.collectives == ran.collectives
    memory = program.memory_analysis()
    assert found.arguments == memory.argument_size_in_bytes

    # 6 × matrix parameters × positions; scores and values 2 + 4 products; the output
    # layer 4 products (its logits are made twice) and the label's own logit.
    positions = micro_steps * num_rows * length
    matrices = cfg.num_layers * sum(a * b for a, b in cfg.linear_shapes().values())
    width = cfg.num_layers * cfg.num_heads * cfg.head_dim
    slots = micro_steps * 4 * labels
    expected = (
        6 * positions * matrices
        + 12 * positions * length * width
        + slots * cfg.hidden_size * (8 * cfg.vocab_size + 2)
    )
    assert found.cost.flops * mesh.size == pytest.approx(expected, rel=0.01)


def _settings(**changes):
    selection = config.SelectionConfig(ratio=0.5)
    allocation = config.AllocationConfig(batch_size=32, packing=False)
    data = config.DataConfig(max_length=48)
    base = config.Config(data=data, selection=selection, allocation=allocation)
    return dataclasses.replace(base, **changes)


TINY = decoder.DecoderConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
)


def test_whole_estimate_without_weights_or_data():
    where = topology.get("gpu:4x80GB@400TFLOPs@3350GB/s@450GB/s")
    cfg = _settings()
    found = budget.estimate(cfg, TINY, where, CORPUS, efficiency=0.5, small_model=TINY)
    assert (found.num_kept, found.num_steps, found.full_steps) == (500, 32, 64)
    assert found.rows == programs.Rows(1, 8, 48, 144)
    assert found.train_seconds == 32 * found.times.roofline / 0.5
    assert found.full_seconds == 2 * found.train_seconds
    assert found.small_feature_seconds == found.feature_seconds > 0
    lines = "\n".join(estimate.describe(found, cfg, where, CORPUS, 0.5))
    assert "kept        500 of 1,000 examples, 32 steps (all examples: 64)" in lines
    assert "simulated CPU devices" in lines


def test_a_step_that_does_not_fit_says_what_to_change():
    where = topology.get("gpu:4x0.0001GB@400TFLOPs")
    with pytest.raises(programs.DoesNotFit) as caught:
        budget.estimate(_settings(), TINY, where, CORPUS)
    message = str(caught.value)
    assert "perf.remat=full, allocation.accumulation_steps=2" in message
    assert "model.compute_dtype=bfloat16" in message


def test_packed_rows_and_steps_by_hand():
    """32 examples of 30 tokens fill 960 / (48 · 0.95) = 21.05 rows: 6 on each shard."""
    cfg = _settings(allocation=config.AllocationConfig(batch_size=32))
    assert budget.batch_rows(cfg, CORPUS, 4) == programs.Rows(1, 6, 48, 144)
    steps = config.AllocationConfig(batch_size=32, num_epochs=3)
    assert budget.count_steps(steps, 100) == 12
    assert budget.count_steps(dataclasses.replace(steps, last_step="drop"), 100) == 9
    assert budget.count_steps(dataclasses.replace(steps, max_steps=5), 100) == 5


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({"method": "full"}, 1.0),
        ({"ratio": 0.5}, 0.5),
        ({"quota": "waterfill", "target_fraction": 0.3}, 0.3),
        ({"method": "random", "target_fraction": 0.2}, 0.2),
    ],
)
def test_bound_on_what_is_kept(changes, share):
    selection = config.SelectionConfig(**changes)
    assert budget.kept_bound(_settings(selection=selection)) == share


@pytest.mark.parametrize("name", ["v5e", "v9:2x2", "gpu:8", "v5e:4", "gpu:8x80@400"])
def test_unknown_topologies(name):
    with pytest.raises(errors.ConfigError, match="for example v5e:4x4"):
        topology.get(name)


def test_links_of_lines_and_rings():
    """v5e: 4 × 4 is a plane without rings, 16 × 16 a torus; v5p: 4 closes a ring."""
    assert topology._links([4, 4], 16) == 2
    assert topology._links([16, 16], 16) == 4
    assert topology._links([2, 2, 4], 4) == 4

"""The train step: ℒ = Σ u_it ℓ_it of METHOD §4, its gradient, one update.

The step multiplies per-token weights and sums, over micro-steps by a scan and over
data shards by sharding annotations. There is no mean anywhere, so the gradient is the
same for every placement of the examples. It knows rows and weights, never clusters.

Parameters are a flat dict from dotted path (`blocks.q.kernel`) to array. What is
trained (`params`) and what is not (`frozen`, with LoRA) are separate arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from clusterjax import collection, datatypes
from clusterjax import config as config_lib
from clusterjax import loss as loss_lib
from clusterjax import mesh as mesh_lib
from clusterjax import optimizer as optimizer_lib
from clusterjax.models import decoder, parameters
from clusterjax.models import lora as lora_lib

Params = dict[str, Any]

_LORA = "lora"


@dataclasses.dataclass(frozen=True)
class Template:
    """A decoder without its parameters.

    Attributes:
      graph: NNX graph definition.
      variables: path and abstract variable of every parameter.
      config: of the decoder.
      dimensions: dotted path → dimension names, LoRA factors included.
      lora: adapters that are trained in place of the decoder's parameters, or None.
      seed: of the adapters' dropout.
    """

    graph: Any
    variables: tuple[tuple[Any, Any], ...]
    config: decoder.DecoderConfig
    dimensions: dict[str, optimizer_lib.Names]
    lora: config_lib.LoraConfig | None = None
    seed: int = 0

    def merge(
        self,
        params: Params,
        frozen: Params,
        micro: datatypes.Batch | None = None,
        step: Any = 0,
    ) -> tuple[decoder.Decoder, decoder.Adapters | None]:
        """The decoder with these parameters (arrays or tracers), and its adapters.

        Args:
          params, frozen: what is trained, and the rest.
          micro: rows [R·L, T] whose ids fix the dropout; None: no dropout.
          step: optimiser step, for the dropout as well.
        """
        values = {**frozen, **params}
        filled = [(p, v.replace(values[_dotted(p)])) for p, v in self.variables]
        model = nnx.merge(self.graph, nnx.from_flat_state(filled))
        if self.lora is None:
            return model, None
        factors = lora_factors(params)
        if micro is None or self.lora.dropout == 0:
            return model, lora_lib.adapters(factors, self.lora)
        return model, lora_lib.adapters(
            factors,
            self.lora,
            dropout_key=jax.random.fold_in(jax.random.key(self.seed), step),
            example_id=micro.example_id,
            positions=micro.positions,
        )


def split(
    model: decoder.Decoder,
    remat: str = "none",
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Template, Params]:
    """Takes a decoder apart.

    Args:
      model: the decoder; it stays whole.
      remat: what its backward pass recomputes.
      mesh: where batches will be spread; None: as the model says.
    """
    state = nnx.state(model, nnx.Param)
    arrays = {_dotted(path): v[...] for path, v in nnx.to_flat_state(state)}
    model_config = dataclasses.replace(model.config, remat=remat)
    return template(model_config, mesh or model.mesh), arrays


def _dotted(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))


def template(
    model_config: decoder.DecoderConfig, mesh: jax.sharding.Mesh | None = None
) -> Template:
    """The template of a decoder, without any parameter in memory."""
    abstract = nnx.eval_shape(lambda: decoder.Decoder(model_config, nnx.Rngs(0), mesh))
    graph, state = nnx.split(abstract, nnx.Param)
    names = parameters.dimension_names(model_config)
    dimensions = {_dotted(p): optimizer_lib.Names(d) for p, d in names.items()}
    return Template(graph, tuple(nnx.to_flat_state(state)), model_config, dimensions)


def with_lora(
    tmpl: Template, cfg: config_lib.LoraConfig, seed: int = 0
) -> tuple[Template, Params]:
    """A template that trains adapters, and their factors before the first step."""
    factors = lora_lib.initialize(tmpl.config, cfg, jax.random.key(seed))
    params = {
        f"{_LORA}.{name}.{side}": value
        for name, pair in factors.items()
        for side, value in pair.items()
    }
    names = lora_lib.dimension_names(tmpl.config, factors)
    dimensions = {
        f"{_LORA}.{_dotted(p)}": optimizer_lib.Names(d) for p, d in names.items()
    }
    dimensions = {**tmpl.dimensions, **dimensions}
    return dataclasses.replace(tmpl, lora=cfg, dimensions=dimensions, seed=seed), params


def lora_factors(params: Params) -> lora_lib.Factors:
    """The factors in the form of `models.lora`."""
    factors: lora_lib.Factors = {}
    for path, value in params.items():
        _, name, side = path.split(".")
        factors.setdefault(name, {})[side] = value
    return factors


class Metrics(NamedTuple):
    """What a step reports; device values, fetched one step late.

    Attributes:
      loss: float32 scalar, ℒ.
      grad_norm: float32 scalar, of the whole gradient, before clipping.
      is_finite: bool scalar; false: the update was left out.
      nll_sum: float32 scalar, Σ of `nll`: the loss without weights.
      nll: float32 [A, P], −log p of each label token, in nats.
      example_id: int32 [A, P], whose label it is, −1 = unused slot.
      collected: `collection.Collected` [A, E, …], or None.
    """

    loss: Any
    grad_norm: Any
    is_finite: Any
    nll_sum: Any
    nll: Any
    example_id: Any
    collected: Any = None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of the step's loss.

    Attributes:
      labels: most label tokens of one data shard in one micro-step.
      vocab_chunk: vocabulary entries whose logits exist at once.
      collected: most examples of one data shard in one micro-step, whose features the
        step collects; 0 = it collects none.
    """

    labels: int
    vocab_chunk: int
    collected: int = 0


def vocab_shards(tmpl: Template, mesh: jax.sharding.Mesh) -> int:
    """Devices over which the rows of the output matrix are split."""
    tensor = mesh.shape.get("tensor", 1)
    return 1 if tmpl.config.vocab_size % tensor else tensor


def make_loss(
    tmpl: Template, mesh: jax.sharding.Mesh, sizes: Sizes
) -> Callable[..., tuple[jax.Array, tuple[Any, ...]]]:
    """Returns `loss(params, frozen, micro, step) → ℒ part, aux`.

    `aux` is (nll_P, example_P), and what is collected when `sizes` ask for it. `micro`
    is a batch without its leading axis A; its rows lie over the data shards.
    """
    num_shards = mesh_lib.num_shards(mesh)
    matrix_shards = vocab_shards(tmpl, mesh)

    def loss(params, frozen, micro, step):
        model, adapters = tmpl.merge(params, frozen, micro, step)
        hidden_BTH = model.hidden(
            micro.inputs, micro.segment_ids, micro.positions, adapters=adapters
        )
        labels = loss_lib.find_labels(micro.loss_weights != 0, sizes.labels, num_shards)
        weights_P = jnp.where(labels.valid_P, labels.take(micro.loss_weights), 0)
        # More labels than slots would make the loss smaller in silence.
        weights_P = jnp.where(jnp.any(labels.overflow), jnp.nan, weights_P)
        hidden_PH = labels.take(hidden_BTH)
        nll_P: Any = loss_lib.token_nll(
            hidden_PH,
            jnp.where(labels.valid_P, labels.take(micro.targets), 0),
            model.output_matrix(),
            sizes.vocab_chunk,
            matrix_shards,
        )
        example_P = jnp.where(labels.valid_P, labels.take(micro.example_id), -1)
        aux: tuple[Any, ...] = (nll_P, example_P)
        if sizes.collected:
            found = collection.collect(
                hidden_PH, nll_P, example_P, sizes.collected, num_shards
            )
            aux = (*aux, found)
        return jnp.sum(weights_P * nll_P), aux

    return loss


def make_gradient(
    tmpl: Template, mesh: jax.sharding.Mesh, sizes: Sizes
) -> Callable[..., tuple[Any, ...]]:
    """Returns `gradient(params, frozen, batch, step=0) → ℒ, grads, nll, example_id`.

    The last two are as in `Metrics`, and `collected` follows them when `sizes` ask for
    it; `step` counts for dropout only.
    """
    value_and_grad = jax.value_and_grad(make_loss(tmpl, mesh, sizes), has_aux=True)

    def one(params, frozen, micro, step):
        (loss, aux), grads = value_and_grad(params, frozen, micro, step)
        return loss, _like_params(grads, tmpl, mesh), aux

    def gradient(params, frozen, batch, step=0):
        if batch.inputs.shape[0] == 1:  # no loop, and no zeros to add to
            micro = jax.tree.map(lambda x: x[0], batch)
            loss, grads, aux = one(params, frozen, micro, step)
            return loss, grads, *jax.tree.map(lambda x: x[None], aux)

        def add(carry, micro):
            loss, grads, aux = one(params, frozen, micro, step)
            return jax.tree.map(jnp.add, carry, (loss, grads)), aux

        zero = jnp.zeros((), loss_lib.accumulator_dtype(tmpl.config.compute_dtype))
        zeros = _like_params(jax.tree.map(jnp.zeros_like, params), tmpl, mesh)
        start = (zero, zeros)
        (loss, grads), aux = jax.lax.scan(add, start, batch)
        return loss, grads, *aux

    return gradient


def _like_params(grads: Params, tmpl: Template, mesh: jax.sharding.Mesh) -> Params:
    """Splits gradients as their parameters are.

    Each micro-step then scatters its sum over the devices, and none of them ever holds
    a whole gradient.
    """
    if mesh.shape.get("fsdp", 1) * mesh.shape.get("tensor", 1) == 1:
        return grads
    return {
        name: jax.lax.with_sharding_constraint(
            grad,
            NamedSharding(
                mesh,
                mesh_lib.parameter_spec(tmpl.dimensions[name], grad.shape, mesh)[0],
            ),
        )
        for name, grad in grads.items()
    }


def make_step(
    tmpl: Template,
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    sizes: Sizes,
) -> Callable[..., tuple[datatypes.TrainState, Metrics]]:
    """Returns `step(state, frozen, batch) → state, metrics`, not yet jitted.

    A step whose loss or gradient is not finite leaves parameters and optimiser as they
    were (only `step` counts on) and says so in its metrics.
    """
    gradient = make_gradient(tmpl, mesh, sizes)

    def step(state, frozen, batch):
        loss, grads, nll_AP, example_AP, *collected = gradient(
            state.params, frozen, batch, state.step
        )
        grad_norm = optimizer_lib.global_norm(grads)
        is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # Chosen on the device, so that the host need not wait before the next step.
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(is_finite, new, old),
            (params, opt_state),
            (state.params, state.opt_state),
        )
        nll_sum = jnp.sum(jnp.where(example_AP >= 0, nll_AP, 0))
        metrics = Metrics(
            loss, grad_norm, is_finite, nll_sum, nll_AP, example_AP, *collected
        )
        return datatypes.TrainState(state.step + 1, params, opt_state), metrics

    return step


@dataclasses.dataclass(frozen=True)
class Shardings:
    """Where the step's arguments lie.

    Attributes:
      state: TrainState of shardings.
      frozen: dotted path → sharding.
      batch: of every leaf of the batch, [A, R·L, T].
    """

    state: datatypes.TrainState
    frozen: dict[str, NamedSharding]
    batch: NamedSharding


def shardings(
    tmpl: Template,
    tx: optax.GradientTransformation,
    params: Params,
    frozen: Params,
    mesh: jax.sharding.Mesh,
    allow_replication: bool = False,
) -> Shardings:
    """Places parameters, optimiser state and batch by the rules of `mesh`.

    Raises:
      errors.ConfigError: the mesh does not fit the model's sizes.
    """
    mesh_lib.check_heads(tmpl.config.num_heads, tmpl.config.num_kv_heads, mesh)
    shapes = {name: x.shape for name, x in {**frozen, **params}.items()}
    placed = mesh_lib.parameter_shardings(
        tmpl.dimensions, shapes, mesh, allow_replication
    )
    own = {name: placed[name] for name in params}
    whole = mesh_lib.replicated(mesh)
    opt_state = optimizer_lib.state_shardings(
        jax.eval_shape(tx.init, params), own, {n: shapes[n] for n in params}, whole
    )
    return Shardings(
        datatypes.TrainState(whole, own, opt_state),
        {name: placed[name] for name in frozen},
        NamedSharding(mesh, PartitionSpec(None, mesh_lib.BATCH_AXES)),
    )


def jit(
    step: Callable[..., Any],
    places: Shardings,
    mesh: jax.sharding.Mesh,
    collects: bool = False,
) -> Any:
    """Jits a step from `make_step`: fixed shardings, donated state.

    `collects` says that the step's sizes ask for features; all processes get them.
    """
    whole = mesh_lib.replicated(mesh)
    labels = NamedSharding(mesh, PartitionSpec(None, mesh_lib.BATCH_AXES))
    found = collection.Collected(whole, whole, whole) if collects else None
    metrics = Metrics(whole, whole, whole, whole, labels, labels, found)
    batch = datatypes.Batch(*(places.batch,) * len(datatypes.Batch._fields))
    return jax.jit(
        step,
        in_shardings=(places.state, places.frozen, batch),
        out_shardings=(places.state, metrics),
        donate_argnums=0,
    )

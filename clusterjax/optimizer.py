"""Optax optimisers and learning-rate schedules from the config.

Parameters of a scanned decoder carry a leading layer axis. Everything an optimiser
does *per matrix* (Adafactor's factored moments, RMS clip and parameter scale) is done
per layer here, as if the layers were separate matrices (METHOD §6 item 8).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from clusterjax import config

# Adafactor constants of arXiv 1804.04235, as in Hugging Face's and optax's versions.
_DECAY_EXPONENT = 0.8
_EPSILON = 1e-30


def learning_rate(cfg: config.OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Learning rate by step (from 0): linear warm-up, then the decay.

    The warm-up reaches the peak after `warmup_steps` steps (cut to `num_steps`); the
    decay ends at `final_scale` × peak after `num_steps`.
    """
    peak, end = cfg.learning_rate, cfg.learning_rate * cfg.final_scale
    warmup = min(cfg.warmup_steps, num_steps)
    length = max(num_steps - warmup, 1)
    if cfg.schedule == "constant":
        decay = optax.constant_schedule(peak)
    elif cfg.schedule == "linear":
        decay = optax.linear_schedule(peak, end, length)
    else:
        decay = optax.cosine_decay_schedule(peak, length, alpha=cfg.final_scale)
    if warmup == 0:
        return decay
    # Step 0 already moves: it uses 1/warmup of the peak.
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, decay], [warmup])


def build(
    cfg: config.OptimizerConfig, num_steps: int, dimensions: Any
) -> optax.GradientTransformation:
    """The optimiser: clip the global norm → method → weight decay → learning rate.

    Args:
      cfg: the settings.
      num_steps: steps of the whole run, for the learning-rate schedule.
      dimensions: pytree shaped like the parameters whose leaves are `Names`, the
        dimension names of each parameter; `layer` marks a stacked axis.
    """
    is_matrix = jax.tree.map(lambda d: d.is_matrix, dimensions, is_leaf=_is_names)
    parts = []
    if cfg.clip_norm is not None:
        parts.append(optax.clip_by_global_norm(cfg.clip_norm))
    if cfg.name == "adamw":
        parts.append(optax.scale_by_adam(cfg.beta1, cfg.beta2, cfg.eps))
    elif cfg.name == "adafactor":
        is_stacked = jax.tree.map(lambda d: d.is_stacked, dimensions, is_leaf=_is_names)
        parts.append(per_layer(_adafactor(cfg), is_stacked))
    if cfg.weight_decay:
        parts.append(optax.add_decayed_weights(cfg.weight_decay, mask=is_matrix))
    parts.append(optax.scale_by_learning_rate(learning_rate(cfg, num_steps)))
    return optax.chain(*parts)


class Names(tuple):
    """Dimension names of one parameter, a leaf of a pytree."""

    @property
    def is_stacked(self) -> bool:
        """Whether the first axis counts layers."""
        return bool(self) and self[0] == "layer"

    @property
    def is_matrix(self) -> bool:
        """Whether a layer of it has two axes (norm scales and biases have one)."""
        return len(self) - self.is_stacked >= 2


def _is_names(value: Any) -> bool:
    return isinstance(value, Names)


def _adafactor(cfg: config.OptimizerConfig) -> optax.GradientTransformation:
    """Adafactor of one matrix, without the learning rate (arXiv 1804.04235)."""
    parts = [optax.scale_by_factored_rms(decay_rate=_DECAY_EXPONENT, epsilon=_EPSILON)]
    if cfg.adafactor_clip is not None:
        parts.append(optax.clip_by_block_rms(cfg.adafactor_clip))
    if cfg.adafactor_parameter_scale:
        parts.append(optax.scale_by_param_block_rms())
    return optax.chain(*parts)


def per_layer(
    transformation: optax.GradientTransformation, is_stacked: Any
) -> optax.GradientTransformation:
    """Applies a transformation to every layer of the stacked parameters by itself.

    Guarantees: updates and state equal those of the same model with one parameter per
    layer (the state merely has a leading layer axis).

    Args:
      transformation: an optax transformation that works parameter by parameter.
      is_stacked: pytree of bools shaped like the parameters.
    """

    def init(params):
        return jax.vmap(transformation.init)(params)

    def update(updates, state, params=None):
        return jax.vmap(transformation.update)(updates, state, params)

    stacked = optax.GradientTransformation(init, update)
    labels = jax.tree.map(lambda s: "stacked" if s else "single", is_stacked)
    return optax.partition({"stacked": stacked, "single": transformation}, labels)


def state_shardings(
    state: Any,
    shardings: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    whole: Any,
) -> Any:
    """Where the optimiser's state lies: full-size moments with their parameters.

    Args:
      state: abstract optimiser state; parameters are a flat dict by name.
      shardings: name → sharding of each parameter.
      shapes: name → shape of each parameter.
      whole: sharding of everything else: counters, and Adafactor's row and column
        means, which are small.
    """

    def place(path, leaf):
        keys = (k.key for k in path if isinstance(k, jax.tree_util.DictKey))
        name = next((key for key in keys if key in shapes), None)
        if name is not None and leaf.shape == shapes[name]:
            return shardings[name]
        return whole

    return jax.tree_util.tree_map_with_path(place, state)


def global_norm(tree: Any) -> jax.Array:
    """Euclidean norm over all leaves, float32."""
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum((jnp.sum(x * x) for x in leaves), jnp.float32(0)))

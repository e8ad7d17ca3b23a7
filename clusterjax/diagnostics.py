"""Figures about a step that training itself does not need.

Losses by group come from numbers that the step returns anyway. Gradient diversity and
the agreement between workers cost one more gradient of the step, so they are taken
every `train.statistics_every` steps only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from clusterjax import mesh as mesh_lib
from clusterjax import step as step_lib


class GroupLosses:
    """Unweighted loss of a step by group of its examples: by source, by cluster."""

    def __init__(
        self,
        groups: Mapping[str, tuple[np.ndarray, Sequence[str]]],
        mesh: jax.sharding.Mesh,
    ):
        """Args:
        groups: name of the grouping → (int [N] group of each example, −1 = none;
          names of the groups).
        mesh: the mesh.
        """
        whole = mesh_lib.replicated(mesh)
        self._groups = {
            kind: (jax.device_put(table.astype(np.int32), whole), tuple(names))
            for kind, (table, names) in groups.items()
        }
        self._sums = jax.jit(
            _group_sums, static_argnames="count", out_shardings=(whole, whole)
        )

    def __call__(self, metrics: step_lib.Metrics) -> dict[str, dict[str, Any]]:
        """Grouping → group → loss (nats per label token) and label tokens."""
        result = {}
        for kind, (table, names) in self._groups.items():
            total, labels = self._sums(
                metrics.nll, metrics.example_id, table, count=len(names)
            )
            total, labels = np.asarray(total), np.asarray(labels)
            result[kind] = {
                name: {"loss": float(total[i] / labels[i]), "labels": int(labels[i])}
                for i, name in enumerate(names)
                if labels[i]
            }
        return result


def _group_sums(
    nll_AP: jax.Array, example_AP: jax.Array, table_N: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Σ ℓ and number of label tokens of each group, both [G]."""
    group_AP = jnp.where(example_AP >= 0, table_N[jnp.maximum(example_AP, 0)], -1)
    # The group of no example is one more segment at the end.
    slot = jnp.where(group_AP >= 0, group_AP, count).reshape(-1)
    is_label = (group_AP >= 0).reshape(-1)
    nll = jnp.where(is_label, nll_AP.reshape(-1), 0)
    total = jax.ops.segment_sum(nll, slot, num_segments=count + 1)
    labels = jax.ops.segment_sum(
        is_label.astype(jnp.int32), slot, num_segments=count + 1
    )
    return total[:-1], labels[:-1]


def make_worker_statistics(
    tmpl: step_lib.Template, mesh: jax.sharding.Mesh, sizes: step_lib.Sizes
) -> Callable[..., dict[str, jax.Array]]:
    """Returns `statistics(params, frozen, batch, step) → figures`, jitted.

    With g_r the gradient of data shard r's part of ℒ, so that Σ_r g_r is the step's
    gradient:

    - `gradient_diversity`: Σ_r ‖g_r‖² / ‖Σ_r g_r‖² (arXiv 1706.05699), R times over:
      1 when all workers agree, R when their gradients are orthogonal.
    - `worker_cosine`: mean cosine between the gradients of two workers.

    Each device holds one whole gradient meanwhile, also when parameters are sharded.
    """
    num_shards = mesh_lib.num_shards(mesh)
    alone = jax.sharding.Mesh(
        np.array(mesh.devices.flat[:1]).reshape(1, 1, 1), mesh_lib.AXES
    )
    plain = step_lib.template(tmpl.config)
    plain = dataclasses.replace(
        plain, dimensions=tmpl.dimensions, lora=tmpl.lora, seed=tmpl.seed
    )
    gradient = step_lib.make_gradient(plain, alone, sizes)
    by_shard = NamedSharding(mesh, PartitionSpec(mesh_lib.BATCH_AXES))

    def split_rows(x):
        rows = x.shape[1] // num_shards
        parts = x.reshape(x.shape[0], num_shards, rows, *x.shape[2:])
        return jax.lax.with_sharding_constraint(jnp.moveaxis(parts, 1, 0), by_shard)

    def statistics(params, frozen, batch, step):
        parts = jax.tree.map(split_rows, batch)

        def one(part):
            return gradient(params, frozen, part, step)[1]

        grads = jax.tree.leaves(jax.vmap(one)(parts))
        grads = [jax.lax.with_sharding_constraint(g, by_shard) for g in grads]
        square_R = sum(jnp.sum(g.reshape(num_shards, -1) ** 2, axis=1) for g in grads)
        length_R = jnp.sqrt(jnp.maximum(square_R, 1e-30))
        total = sum(jnp.sum(jnp.sum(g, axis=0) ** 2) for g in grads)
        units = sum(jnp.sum(jnp.tensordot(1 / length_R, g, axes=1) ** 2) for g in grads)
        pairs = max(num_shards * (num_shards - 1), 1)
        return {
            "gradient_diversity": num_shards * jnp.sum(square_R) / total,
            "worker_cosine": (units - num_shards) / pairs,
        }

    return jax.jit(statistics, out_shardings=mesh_lib.replicated(mesh))

"""Exact per-example gradients of any parameters, then a seeded projection.

`jax.vmap(jax.grad(loss))` over the parameters whose path matches, a few examples at a
time, each gradient projected block by block before the next is made. It is the oracle
for the cheaper kinds, and the kind for parameters that no linear layer holds.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from clusterjax import config as config_lib
from clusterjax import errors, loss
from clusterjax.features import batches, model_state, projection
from clusterjax.models import parameters

Path = parameters.Path


@dataclasses.dataclass(frozen=True)
class PerExample:
    """Gradients of chosen parameters.

    Attributes:
      state: the model.
      sizes: path → entries of each chosen parameter, in the order of the model.
      kind: of the projection.
      width: D.
      seed: of the projection.
      block_size: gradient entries projected at a time.
    """

    state: model_state.ModelState
    sizes: Mapping[Path, int]
    kind: projection.Kind
    width: int
    seed: int
    block_size: int

    def covered(self) -> list[str]:
        """Paths of the chosen parameters."""
        return ["/".join(path) for path in self.sizes]

    def __call__(
        self,
        params: model_state.Params,
        rows: batches.Rows,
        *,
        row_size: int,
        shards: int,
        micro_batch: int,
        vocab_chunk: int,
        vocab_shards: int,
    ) -> tuple[jax.Array, jax.Array]:
        """Raw features [B, D] and mean losses [B], float32; one example a row.

        Args:
          params: of the model.
          rows: a batch.
          row_size: label slots of a row.
          shards: R; each shard works through its own rows.
          micro_batch: gradients of a shard that are held at once.
          vocab_chunk, vocab_shards: as in `loss.token_nll`.
        """
        flat = params.flat()
        chosen = {path: flat[path] for path in self.sizes}

        def mean_nll(chosen, row: batches.Rows):
            filled = params.replace(chosen)
            return self._mean_nll(filled, row, row_size, vocab_chunk, vocab_shards)

        def one(row: batches.Rows):
            value, gradients = jax.value_and_grad(mean_nll)(chosen, row)
            return self.project(gradients), value

        # The shard axis stays an array axis, so that each device keeps its own rows.
        over_shards = jax.vmap(one)
        by_turn = jax.tree.map(
            lambda leaf: jnp.moveaxis(leaf.reshape(shards, -1, leaf.shape[1]), 0, 1),
            rows,
        )
        turns = rows.tokens.shape[0] // shards
        raw, value = jax.lax.map(
            over_shards, by_turn, batch_size=min(micro_batch, turns)
        )
        raw_BD = jnp.moveaxis(raw, 0, 1).reshape(-1, raw.shape[-1])
        return raw_BD, jnp.moveaxis(value, 0, 1).reshape(-1)

    def project(self, gradients: Mapping[Path, jax.Array]) -> jax.Array:
        """One example's gradient, [D] float32.

        Every parameter has its own stream of random numbers, named after its path, so
        that its share does not depend on which others are chosen.
        """
        flat = {
            path: gradients[path].reshape(1, -1).astype(jnp.float32)
            for path in self.sizes
        }
        if self.kind == "identity":
            return jnp.concatenate(list(flat.values()), axis=1)[0]
        total = jnp.zeros((1, self.width), jnp.float32)
        for path, values in flat.items():
            name = projection.Projection(
                self.kind, self.width, self.seed, "/".join(map(str, path))
            )
            total = total + projection.project(values, name, self.block_size)
        return total[0]

    def _mean_nll(
        self,
        params: model_state.Params,
        row: batches.Rows,
        row_size: int,
        vocab_chunk: int,
        vocab_shards: int,
    ) -> jax.Array:
        """Mean loss of the one example of a row [T]."""
        model = self.state.merge(params)
        row = jax.tree.map(lambda leaf: leaf[None], row)
        hidden_BTH = model.hidden(
            row.tokens,
            row.segment_ids,
            row.positions,
            adapters=self.state.adapters(params),
            num_layers=self.state.num_layers,
        )
        labels = loss.find_labels(row.slot >= 0, row_size)
        nll_P = loss.token_nll(
            labels.take(hidden_BTH),
            jnp.where(labels.valid_P, labels.take(row.targets), 0),
            model.output_matrix(),
            vocab_chunk,
            vocab_shards,
        )
        count = jnp.sum(labels.valid_P, dtype=jnp.float32)
        total = jnp.sum(jnp.where(labels.valid_P, nll_P, 0))
        mean = total / jnp.maximum(count, 1)
        return jnp.where(labels.overflow[0], jnp.nan, mean)


def build(state: model_state.ModelState, cfg: config_lib.FeaturesConfig) -> PerExample:
    """Chooses the parameters and the projection that `cfg` asks for.

    Raises:
      errors.ConfigError: a pattern that matches nothing, or a missing width.
    """
    paths = {path: array.size for path, array in state.params.flat().items()}
    if state.params.factors is not None:
        # With adapters only they are trained, so only they have a gradient to show.
        paths = {path: size for path, size in paths.items() if path[0] == "lora"}
    chosen = {path: size for path, size in paths.items() if _matches(path, cfg)}
    for pattern in cfg.parameters:
        if not any(_full(pattern, path) for path in paths):
            names = ", ".join("/".join(path) for path in paths)
            raise errors.ConfigError(
                f"features.parameters: {pattern!r} matches none of {names}"
            )
    total = sum(chosen.values())
    if cfg.projection == "identity":
        if cfg.dim not in (None, total):
            raise errors.ConfigError(
                f"features.dim={cfg.dim} with features.projection='identity': the"
                f" chosen parameters have {total:,} entries; choose a random projection"
            )
        width = total
    elif cfg.dim is None:
        raise errors.ConfigError(
            "features.kind='per_example' needs features.dim, the width that"
            f" {total:,} gradient entries are projected to (1024, for example), or"
            " features.projection='identity'"
        )
    else:
        width = cfg.dim
    return PerExample(state, chosen, cfg.projection, width, cfg.seed, cfg.block_size)


def _matches(path: Path, cfg: config_lib.FeaturesConfig) -> bool:
    return any(_full(pattern, path) for pattern in cfg.parameters)


def _full(pattern: str, path: Path) -> bool:
    try:
        return re.fullmatch(pattern, "/".join(map(str, path))) is not None
    except re.error as error:
        raise errors.ConfigError(
            f"features.parameters: {pattern!r} is no regular expression: {error}"
        ) from None

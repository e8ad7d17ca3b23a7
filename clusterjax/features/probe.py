"""Whole-model gradient sketches from one backward pass over the activations.

Every linear layer y = W x gets, for each example, a zero bottleneck Z between two
fixed random projections, y = W x + P_out Z P_in x (METHOD §1). Then

    ∂loss_i / ∂Z_i = Σ_t (P_outᵀ δ_t)(P_in x_t)ᵀ

is the Kronecker-projected weight gradient of example i, for all examples and layers
at once, without a single weight gradient. Since Z = 0 the forward pass only has to
keep P_in x_t: the tap below adds nothing to y and nothing to the gradient of x.

The loss enters as its gradient with respect to the hidden states, which comes out of
the same pass over the vocabulary as the loss (`loss.expected_rows`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clusterjax import config as config_lib
from clusterjax import errors, loss
from clusterjax.features import batches, last_layer, model_state, projection
from clusterjax.models import decoder


@dataclasses.dataclass(frozen=True)
class Site:
    """The probes of one linear layer, in every block.

    Attributes:
      name: `q k v o gate up down`.
      width_in, width_out: of the linear layer.
      k_in, k_out: widths of P_in and P_out.
    """

    name: str
    width_in: int
    width_out: int
    k_in: int
    k_out: int


@dataclasses.dataclass(frozen=True)
class Tap:
    """`Adapters.apply`: y unchanged; the gradient of `value` is the probe.

    Attributes:
      kind: `rademacher` or `normal`.
      seed: of the projections; each layer and side has its own.
    """

    kind: projection.Kind
    seed: int

    def __call__(
        self, x: jax.Array, y: jax.Array, value: Any, shared: Any
    ) -> jax.Array:
        """Adds the probe.

        Args:
          x, y: [B, T, I] and [B, T, O].
          value: zeros [B, S, k_in, k_out] float32, and the keys of the projections,
            uint32 [2].
          shared: member_BTS float32: 1 where the token belongs to example S of its
            row; None: S = 1 and it always does.
        """
        zero_BSKM, keys = value
        return typing.cast(jax.Array, _tap(self, x, y, zero_BSKM, keys, shared))

    def entries(
        self, key: jax.typing.ArrayLike, num_rows: int, width: int
    ) -> jax.Array:
        """A projection without its factor 1/√width, [num_rows, width] float32."""
        make = projection.signs if self.kind == "rademacher" else projection.normals
        rows = jnp.arange(num_rows, dtype=jnp.uint32)
        return make((self.seed % 2**32, key), rows, width)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(tap: Tap, x, y, zero_BSKM, keys, member_BTS):
    return y


def _tap_forward(tap: Tap, x, y, zero_BSKM, keys, member_BTS):
    k_in = zero_BSKM.shape[2]
    # Signs are exact in every type, so the product is as exact as the activations.
    p_in = tap.entries(keys[0], x.shape[-1], k_in).astype(x.dtype)
    seen_BTK = jnp.matmul(x, p_in, preferred_element_type=jnp.float32)
    return y, (seen_BTK, zero_BSKM, keys, member_BTS)


def _tap_backward(tap: Tap, kept, d_y_BTO):
    seen_BTK, zero_BSKM, keys, member_BTS = kept
    k_in, k_out = zero_BSKM.shape[2:]
    p_out = tap.entries(keys[1], d_y_BTO.shape[-1], k_out).astype(d_y_BTO.dtype)
    error_BTM = jnp.matmul(d_y_BTO, p_out, preferred_element_type=jnp.float32)
    scale = 1.0 / np.sqrt(k_in * k_out)
    exact = jax.lax.Precision.HIGHEST
    if member_BTS is None:
        found = jnp.einsum("btk,btm->bkm", seen_BTK, error_BTM, precision=exact)
        d_zero = found[:, None] * scale
    else:
        seen_BTSK = member_BTS[:, :, :, None] * seen_BTK[:, :, None, :]
        d_zero = scale * jnp.einsum(
            "btsk,btm->bskm", seen_BTSK, error_BTM, precision=exact
        )
    return None, d_y_BTO, d_zero, None, None


_tap.defvjp(_tap_forward, _tap_backward)


@dataclasses.dataclass(frozen=True)
class Probe:
    """The probes of a model.

    Attributes:
      state: the model.
      sites: linear layers that are looked at.
      layers: blocks that are looked at, ascending.
      tap: what is added to the linear layers.
    """

    state: model_state.ModelState
    sites: tuple[Site, ...]
    layers: tuple[int, ...]
    tap: Tap

    @property
    def width(self) -> int:
        """Numbers of a raw feature."""
        return len(self.layers) * sum(site.k_in * site.k_out for site in self.sites)

    def covered(self) -> list[str]:
        """Paths of the matrices whose gradient the feature sketches."""
        return [
            f"blocks/{site.name}/kernel[{layer}]"
            for site in self.sites
            for layer in self.layers
        ]

    def keys(self, site: Site) -> np.ndarray:
        """uint32 [num_layers, 2], streams of (P_in, P_out) in every block."""
        count = self.state.num_layers or self.state.config.num_layers
        names = [
            [f"{site.name}/{layer}/{s}" for s in ("in", "out")]
            for layer in range(count)
        ]
        streams = [[projection.stream(n) for n in pair] for pair in names]
        return np.array(streams, np.uint32)

    def __call__(
        self,
        params: Any,
        rows: batches.Rows,
        *,
        size: int,
        shards: int,
        per_row: int,
        vocab_chunk: int,
        vocab_shards: int,
    ) -> tuple[jax.Array, jax.Array]:
        """Raw features and mean losses, [R · slots, width] and [R · slots] float32.

        Args:
          params: of the model.
          rows: a batch; slots of a shard = its rows · per_row, the examples of row r
            in slots r · per_row … (in the order of their segment ids).
          size: label slots of a shard.
          shards: R.
          per_row: S, most examples of a row.
          vocab_chunk, vocab_shards: as in `loss.token_nll`.
        """
        model = self.state.merge(params)
        num_slots = rows.tokens.shape[0] // shards * per_row
        keys = {site.name: jnp.asarray(self.keys(site)) for site in self.sites}
        shared = {}
        if per_row > 1:
            number = jnp.arange(1, per_row + 1, dtype=rows.segment_ids.dtype)
            member = rows.segment_ids[:, :, None] == number[None, None, :]
            shared = dict.fromkeys(keys, member.astype(jnp.float32))

        def packed(zeros):
            values = {name: (zeros[name], keys[name]) for name in zeros}
            hidden_BTH = model.hidden(
                rows.tokens,
                rows.segment_ids,
                rows.positions,
                adapters=decoder.Adapters(values, self.tap, shared),
                num_layers=self.state.num_layers,
                num_frozen=self.layers[0],
            )
            labels = last_layer.label_positions(
                hidden_BTH, rows, num_slots, size, shards
            )
            return labels.hidden_PH, labels

        hidden_PH, pull, labels = jax.vjp(
            packed, self.zeros(rows.tokens.shape[0], per_row), has_aux=True
        )
        margin_P, error_PH = loss.expected_rows(
            hidden_PH,
            labels.targets_P,
            model.output_matrix(),
            lambda chunk: chunk.rows_CH,
            hidden_PH.shape[1],
            vocab_chunk,
            vocab_shards,
        )
        weight_P1 = last_layer.mean_weights(labels)[:, None]
        cotangent_PH = jnp.where(weight_P1 > 0, weight_P1 * error_PH, 0)
        (gradients,) = pull(cotangent_PH.astype(hidden_PH.dtype))
        raw_BD = self.flatten(gradients)
        nll_P = jax.nn.softplus(margin_P)
        loss_B = last_layer.example_means(labels, nll_P[:, None])[:, 0]
        return raw_BD, loss_B

    def zeros(self, num_rows: int, per_row: int) -> dict[str, jax.Array]:
        """The bottlenecks, [num_layers, rows, S, k_in, k_out] of every site."""
        count = self.state.num_layers or self.state.config.num_layers
        return {
            s.name: jnp.zeros((count, num_rows, per_row, s.k_in, s.k_out), jnp.float32)
            for s in self.sites
        }

    def flatten(self, gradients: dict[str, jax.Array]) -> jax.Array:
        """[rows · S, width], sites in order, in each the chosen blocks in order."""
        chosen = np.asarray(self.layers)
        parts = []
        for site in self.sites:
            grads = gradients[site.name]
            if len(chosen) != len(grads):
                grads = grads[chosen]
            by_row = jnp.moveaxis(grads, 0, 2)
            parts.append(by_row.reshape(by_row.shape[0] * by_row.shape[1], -1))
        return jnp.concatenate(parts, axis=1)


def build(state: model_state.ModelState, cfg: config_lib.FeaturesConfig) -> Probe:
    """Chooses the probes that `cfg` asks for.

    Raises:
      errors.ConfigError: a matrix or layer that the model has not, or a projection
        that probes can't use.
    """
    if state.params.factors is not None:
        raise errors.ConfigError(
            "features.kind='probe' looks at the matrices themselves; fold the adapters"
            " in first (models.lora.merge), or choose kind='per_example'"
        )
    shapes = state.config.linear_shapes()
    unknown = sorted(set(cfg.matrices) - set(shapes))
    if unknown or not cfg.matrices:
        raise errors.ConfigError(
            f"features.matrices={list(cfg.matrices)}: expected some of"
            f" {', '.join(shapes)}" + (f", found {unknown[0]!r}" if unknown else "")
        )
    count = state.num_layers or state.config.num_layers
    layers = tuple(sorted(set(cfg.layers))) or tuple(range(count))
    if layers[0] < 0 or layers[-1] >= count:
        raise errors.ConfigError(
            f"features.layers={list(cfg.layers)}: expected layers from 0 to {count - 1}"
        )
    if cfg.projection not in ("rademacher", "normal"):
        raise errors.ConfigError(
            f"features.projection={cfg.projection!r} can't be used by kind=probe;"
            " choose rademacher or normal"
        )
    sizes = matrix_sizes(cfg)
    sites = tuple(
        Site(
            name,
            *shapes[name],
            min(sizes[name][0], shapes[name][0]),
            min(sizes[name][1], shapes[name][1]),
        )
        for name in decoder.LINEAR_NAMES
        if name in cfg.matrices
    )
    return Probe(state, sites, layers, Tap(cfg.projection, cfg.seed))


def matrix_sizes(cfg: config_lib.FeaturesConfig) -> dict[str, tuple[int, int]]:
    """Linear layer → (k_in, k_out).

    Raises:
      errors.ConfigError: sizes below 1, or an entry of another form.
    """
    if min(cfg.k_in, cfg.k_out) < 1:
        raise errors.ConfigError(
            f"features.k_in={cfg.k_in}, features.k_out={cfg.k_out}: expected 1 or more"
        )
    result = dict.fromkeys(cfg.matrices, (cfg.k_in, cfg.k_out))
    for entry in cfg.matrix_sizes:
        found = re.fullmatch(r"(\w+)=([1-9]\d*)x([1-9]\d*)", entry)
        if found is None or found[1] not in result:
            raise errors.ConfigError(
                f"features.matrix_sizes: {entry!r}; expected entries like 'down=32x16'"
                f" with one of features.matrices ({', '.join(cfg.matrices)})"
            )
        result[found[1]] = int(found[2]), int(found[3])
    return result

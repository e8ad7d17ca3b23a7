"""The model as the feature pass sees it: a graph, parameters and their hash."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from clusterjax import config as config_lib
from clusterjax import distributed, errors
from clusterjax import mesh as meshes
from clusterjax.models import decoder, lora


class Params(NamedTuple):
    """All arrays of a model, a pytree.

    Attributes:
      base: the decoder's parameters.
      factors: LoRA factors, or None.
    """

    base: nnx.State
    factors: lora.Factors | None = None

    def flat(self) -> dict[tuple[str, ...], jax.Array]:
        """Path → array; LoRA factors are at ("lora", linear, "a" or "b")."""
        result = {
            path: variable[...] for path, variable in nnx.to_flat_state(self.base)
        }
        for name, pair in (self.factors or {}).items():
            result.update({("lora", name, side): pair[side] for side in pair})
        return result  # pyright: ignore[reportReturnType]

    def replace(self, changes: Mapping[tuple[str, ...], jax.Array]) -> Params:
        """The same with other arrays at some paths."""
        base = [
            (path, variable.replace(changes[path]) if path in changes else variable)  # pyright: ignore[reportArgumentType]
            for path, variable in nnx.to_flat_state(self.base)
        ]
        factors = self.factors and {
            name: {s: changes.get(("lora", name, s), pair[s]) for s in pair}
            for name, pair in self.factors.items()
        }
        return Params(nnx.from_flat_state(base), factors)


@dataclasses.dataclass(frozen=True)
class ModelState:
    """A decoder split for jit.

    Attributes:
      graph: static part.
      params: arrays, passed to every jitted function as an argument: closed over, they
        would be compiled in as constants.
      config: of the decoder, with the compute type and remat of the pass.
      num_layers: blocks that the pass runs; None: all.
      lora_config: rank and alpha of the factors; their dropout is not applied.
    """

    graph: nnx.GraphDef
    params: Params
    config: decoder.DecoderConfig
    num_layers: int | None = None
    lora_config: config_lib.LoraConfig | None = None

    def merge(self, params: Params) -> decoder.Decoder:
        """The decoder with these parameters (used inside jit)."""
        return nnx.merge(self.graph, params.base)

    def on(self, mesh: Mesh | None) -> ModelState:
        """The same with all arrays on the mesh.

        An array that lies on one device is copied to all, once; otherwise every step
        would copy it again.
        """
        if mesh is None or mesh.size == 1:
            return self
        everywhere = meshes.replicated(mesh)

        def place(array: jax.Array) -> jax.Array:
            alone = len(array.sharding.device_set) == 1
            return distributed.place(array, everywhere) if alone else array

        return dataclasses.replace(self, params=jax.tree.map(place, self.params))

    def adapters(self, params: Params) -> decoder.Adapters | None:
        """What the LoRA factors add to the linear layers."""
        if params.factors is None or self.lora_config is None:
            return None
        return lora.adapters(params.factors, self.lora_config)


def split(
    model: decoder.Decoder,
    compute_dtype: str = "",
    remat: str = "none",
    num_layers: int | None = None,
    factors: lora.Factors | None = None,
    lora_config: config_lib.LoraConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> ModelState:
    """Splits a decoder, with another compute type ('' = its own) and remat.

    `mesh` is where the rows of the pass are spread: fused attention has to be told.

    Raises:
      errors.ConfigError: more layers than the model has.
    """
    count = model.config.num_layers
    if num_layers is not None and not 1 <= num_layers <= count:
        raise errors.ConfigError(
            f"features.num_layers={num_layers}: the model has {count} layers"
        )
    config = dataclasses.replace(
        model.config,
        compute_dtype=compute_dtype or model.config.compute_dtype,
        remat=remat,
    )
    abstract = nnx.eval_shape(lambda: decoder.Decoder(config, nnx.Rngs(0), mesh))
    params = Params(nnx.split(model)[1], factors)
    return ModelState(nnx.split(abstract)[0], params, config, num_layers, lora_config)


def fingerprint(state: ModelState) -> str:
    """24 hex digits that identify the function the model computes.

    The parameters are hashed where they lie, by sums of mixed integers modulo 2³²,
    which no sharding changes; so equal parameters hash equally on every mesh.
    """
    config = dataclasses.replace(
        state.config, remat="none", source_json="", initializer_range=0.0
    )
    digest = hashlib.blake2b(repr(config).encode(), digest_size=12)
    digest.update(f"{state.num_layers}{state.lora_config}".encode())
    for path, array in sorted(state.params.flat().items()):
        digest.update(f"{path}{array.shape}{array.dtype}".encode())
        digest.update(np.asarray(_hash(array)).tobytes())
    return digest.hexdigest()


@jax.jit
def _hash(array: jax.Array) -> jax.Array:
    """uint32 [4], sums over the entries of four mixes of (index, bits)."""
    width = jnp.dtype(array.dtype).itemsize
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[width]
    bits = jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        along = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        place = place * jnp.uint32(size) + along
    sums = [
        jnp.sum(_mix(bits ^ _mix(place + jnp.uint32(salt))), dtype=jnp.uint32)
        for salt in (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)
    ]
    return jnp.stack(sums)


def _mix(x: jax.Array) -> jax.Array:
    """Finaliser of MurmurHash3 (A. Appleby, public domain): a bijection of uint32."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)

"""One Flax NNX decoder for the Llama family of language models.

Llama 1/2/3, CodeLlama, DeepSeek-Coder, Mistral, Qwen2, Qwen3 and SmolLM differ only
in the fields of `DecoderConfig`. The blocks are one module whose parameters carry a
leading layer axis; the forward pass is a plain `jax.lax.scan` over them, so that
compile time does not grow with depth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from clusterjax.models import attention, rope

# The linear layers of a block, in the order of the forward pass. These are the names
# that `Adapters.values` may hold.
LINEAR_NAMES = ("q", "k", "v", "o", "gate", "up", "down")

# (q, k, v, window, what belongs to this layer) -> (mixed values, what to keep of it)
AttendFunction = Callable[
    [jax.Array, jax.Array, jax.Array, int | None, Any], tuple[jax.Array, Any]
]

REMAT_POLICIES: dict[str, Callable[..., bool] | None] = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and numerics of a decoder.

    Attributes:
      vocab_size: rows of the token embedding.
      hidden_size: width of the residual stream.
      intermediate_size: width inside the gated MLP.
      num_layers: blocks.
      num_heads: query heads.
      num_kv_heads: key and value heads; divides num_heads.
      head_dim: width of one head; num_heads * head_dim may differ from hidden_size.
      max_positions: context length the model was trained for, tokens.
      rms_norm_eps: added to the mean square in every RMS norm.
      rope: rotary frequencies.
      tie_embeddings: the output matrix is the token embedding.
      qkv_bias, o_bias, mlp_bias: which linear layers have a bias.
      qk_norm: RMS norm over each head of q and k (Qwen3).
      sliding_window: keys that a query of a windowed layer sees, or None.
      windowed_layers: per layer, whether the window holds; () means all layers.
      initializer_range: standard deviation of freshly drawn matrices.
      param_dtype: dtype that the parameters are kept in.
      compute_dtype: dtype of the activations and of the matrices in a product.
      remat: "none" keeps every activation for the backward pass, "dots" only the
        results of matrix products, "full" only the input of each block.
      source_json: text of the Hugging Face config.json this came from ("" if new);
        the fields we do not use are written back by `checkpoints.save`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 2048
    rms_norm_eps: float = 1e-5
    rope: rope.RopeConfig = dataclasses.field(default_factory=rope.RopeConfig)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    windowed_layers: tuple[bool, ...] = ()
    initializer_range: float = 0.02
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    remat: str = "none"
    source_json: str = dataclasses.field(default="", repr=False)

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.remat not in REMAT_POLICIES:
            raise ValueError(
                f"remat={self.remat!r} is not one of {', '.join(REMAT_POLICIES)}"
            )
        if len(self.windowed_layers) not in (0, self.num_layers):
            raise ValueError(
                f"windowed_layers has {len(self.windowed_layers)} entries for "
                f"{self.num_layers} layers"
            )

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Returns (input width, output width) of each linear layer of a block."""
        hidden, mlp = self.hidden_size, self.intermediate_size
        heads = self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        return {
            "q": (hidden, heads),
            "k": (hidden, kv),
            "v": (hidden, kv),
            "o": (heads, hidden),
            "gate": (hidden, mlp),
            "up": (hidden, mlp),
            "down": (mlp, hidden),
        }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapters:
    """What is added to the outputs of the linear layers, without the decoder knowing.

    For each linear layer named in `values`, the block computes

        y = apply(x_BTI, x_BTI @ kernel + bias, values[name][layer], shared[name])

    so LoRA (B A x, shared by all examples) and gradient probes (P_out Z_i P_in x, one
    Z for each row of the batch, METHOD §1) are the same mechanism. An `Adapters` is a
    pytree: it goes through jit, grad and vmap, and `apply` is static.

    Attributes:
      values: linear name (`LINEAR_NAMES`) to any pytree whose leaves have a leading
        axis [num_layers], which the scan over the blocks slices.
      apply: (x_BTI, y_BTO, value, shared) -> y_BTO. A module-level function or a
        frozen dataclass with `__call__`, so that jit recognises it.
      shared: linear name to any pytree that is the same for every layer; optional.

    Example, one probe Z [num_layers, B, k, k] on every q, with shared projections:

        def apply(x, y, z, shared):
            p_in, p_out = shared  # [I, k], [k, O]
            return y + jnp.einsum("btk,bkm->btm", x @ p_in, z) @ p_out
        adapters = Adapters({"q": z}, apply, {"q": (p_in, p_out)})
        hidden_BTH = model.hidden(tokens_BT, adapters=adapters)
    """

    values: dict[str, Any]
    apply: Callable[[jax.Array, jax.Array, Any, Any], jax.Array] = dataclasses.field(
        metadata={"static": True}
    )
    shared: dict[str, Any] = dataclasses.field(default_factory=dict)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x²) + eps) · scale, over the last axis, in float32 or wider."""

    def __init__(self, shape: tuple[int, ...], config: DecoderConfig):
        self.scale = nnx.Param(jnp.ones(shape, config.param_dtype))
        self.eps = config.rms_norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(mean_square + self.eps)).astype(x.dtype)
        return normed * _last_axis(self.scale[...].astype(x.dtype), x.ndim)


class Linear(nnx.Module):
    """y = x @ kernel + bias, with whatever an adapter adds to y."""

    def __init__(
        self,
        shape: tuple[int, ...],
        use_bias: bool,
        config: DecoderConfig,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.normal(config.initializer_range)
        zeros = jnp.zeros(shape[:-2] + shape[-1:], config.param_dtype)
        self.kernel = nnx.Param(init(rngs.params(), shape, config.param_dtype))
        self.bias = nnx.Param(zeros) if use_bias else None

    def __call__(
        self, x: jax.Array, adapt: Callable[[jax.Array, jax.Array], jax.Array] | None
    ) -> jax.Array:
        y = x @ self.kernel[...].astype(x.dtype)
        if self.bias is not None:
            y = y + _last_axis(self.bias[...].astype(x.dtype), x.ndim)
        return y if adapt is None else adapt(x, y)


class Block(nnx.Module):
    """All blocks at once: every parameter has a leading layer axis.

    `__call__` runs one block and expects the parameters without that axis, which is
    what a scan over `nnx.split(blocks)` merges back.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        stack = (config.num_layers,)
        has_bias = {
            **dict.fromkeys(("q", "k", "v"), config.qkv_bias),
            "o": config.o_bias,
            **dict.fromkeys(("gate", "up", "down"), config.mlp_bias),
        }
        shapes = config.linear_shapes()

        def linear(name: str) -> Linear:
            return Linear(stack + shapes[name], has_bias[name], config, rngs)

        self.config = config
        self.attention_norm = RMSNorm((*stack, config.hidden_size), config)
        self.q = linear("q")
        self.k = linear("k")
        self.v = linear("v")
        self.o = linear("o")
        self.mlp_norm = RMSNorm((*stack, config.hidden_size), config)
        self.gate = linear("gate")
        self.up = linear("up")
        self.down = linear("down")
        head_norm = (*stack, config.head_dim)
        self.q_norm = RMSNorm(head_norm, config) if config.qk_norm else None
        self.k_norm = RMSNorm(head_norm, config) if config.qk_norm else None

    def __call__(
        self,
        x_BTH: jax.Array,
        cos_sin: tuple[jax.Array, jax.Array],
        attend: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]],
        adapt: Callable[[str], Callable[[jax.Array, jax.Array], jax.Array] | None],
    ) -> tuple[jax.Array, Any]:
        config = self.config
        batch, length, _ = x_BTH.shape
        head_shape = (batch, length, -1, config.head_dim)
        normed_BTH = self.attention_norm(x_BTH)
        q = self.q(normed_BTH, adapt("q")).reshape(head_shape)
        k = self.k(normed_BTH, adapt("k")).reshape(head_shape)
        v = self.v(normed_BTH, adapt("v")).reshape(head_shape)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed, kept = attend(rope.rotate(q, *cos_sin), rope.rotate(k, *cos_sin), v)
        x_BTH = x_BTH + self.o(mixed.reshape(batch, length, -1), adapt("o"))
        normed_BTH = self.mlp_norm(x_BTH)
        gate = jax.nn.silu(self.gate(normed_BTH, adapt("gate")))
        up = self.up(normed_BTH, adapt("up"))
        return x_BTH + self.down(gate * up, adapt("down")), kept


class Decoder(nnx.Module):
    """The whole model: embedding, blocks, final norm, output matrix."""

    def __init__(
        self,
        config: DecoderConfig,
        rngs: nnx.Rngs,
        mesh: jax.sharding.Mesh | None = None,
    ):
        """Draws fresh parameters.

        Args:
          config: shape and numerics.
          rngs: `nnx.Rngs(seed)`.
          mesh: where batches will be spread; the parameters are not moved there. None
            for one device, or when XLA is to find out alone.
        """
        init = nnx.initializers.normal(config.initializer_range)

        def matrix() -> nnx.Param:
            shape = (config.vocab_size, config.hidden_size)
            return nnx.Param(init(rngs.params(), shape, config.param_dtype))

        self.config = config
        self.mesh = mesh
        self.embedding = matrix()
        self.blocks = Block(config, rngs)
        self.norm = RMSNorm((config.hidden_size,), config)
        self.head = None if config.tie_embeddings else matrix()

    def output_matrix(self) -> jax.Array:
        """Returns the matrix [V, H] that turns hidden states into logits, as kept."""
        return self.embedding[...] if self.head is None else self.head[...]

    def hidden(
        self,
        tokens_BT: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        adapters: Adapters | None = None,
        num_layers: int | None = None,
        num_frozen: int = 0,
    ) -> jax.Array:
        """Returns the hidden states [B, T, H] after the final norm, in compute_dtype.

        Args:
          tokens_BT: int32 token ids.
          segment_ids: int32 [B, T], 0 for padding, 1.. for the examples packed into
            the row; None: the whole row is one example (padding on the right may stay
            unmarked, since attention is causal).
          positions: int32 [B, T]; None: restarting at 0 with every segment.
          adapters: additions to the linear layers (LoRA, probes).
          num_layers: run only the first so many blocks; None: all. An adapter's
            values may then have that many layers or all of them.
          num_frozen: the first so many blocks get no adapter and no gradient: a
            backward pass stops before them, and nothing of them is kept for it.
        """
        if positions is None:
            positions = (
                jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
                if segment_ids is None
                else attention.positions_from_segments(segment_ids)
            )

        def attend(q, k, v, window, _):
            mixed = attention.attend(q, k, v, segment_ids, window, mesh=self.mesh)
            return mixed, None

        hidden_BTH, _ = self.run(
            tokens_BT,
            positions,
            attend,
            adapters=adapters,
            num_layers=num_layers,
            num_frozen=num_frozen,
        )
        return hidden_BTH

    def run(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        attend: AttendFunction,
        per_layer: Any = None,
        *,
        adapters: Adapters | None = None,
        num_layers: int | None = None,
        num_frozen: int = 0,
    ) -> tuple[jax.Array, Any]:
        """Runs the blocks with any attention; `hidden` and the cache build on it.

        Args:
          tokens_BT: int32 token ids.
          positions_BT: int32 [B or 1, T].
          attend: (q, k, v, window, per_layer[layer]) -> (mixed values, anything to
            keep of this layer).
          per_layer: pytree with a leading layer axis, sliced for `attend`.
          adapters, num_layers, num_frozen: as in `hidden`.

        Returns:
          The hidden states [B, T, H] after the final norm, and what `attend` kept,
          stacked over layers.
        """
        config = self.config
        cos_sin = rope.rotation(positions_BT, config.rope, config.head_dim)
        blocks_def, blocks = nnx.split(self.blocks)
        values = {} if adapters is None else adapters.values
        windowed = (
            jnp.asarray(config.windowed_layers) if config.windowed_layers else None
        )
        scanned = (blocks, values, windowed, per_layer)
        if num_layers is not None:
            scanned = jax.tree.map(lambda leaf: leaf[:num_layers], scanned)

        def body(x_BTH, layer):
            params, layer_values, is_windowed, extra = layer
            return nnx.merge(blocks_def, params)(
                x_BTH,
                cos_sin,
                lambda q, k, v: _attend(config, attend, q, k, v, is_windowed, extra),
                lambda name: _adapter(adapters, layer_values, name),
            )

        policy = REMAT_POLICIES[config.remat]
        if policy is not None:
            # The scan already keeps the two passes apart, so no barrier is needed.
            body = jax.checkpoint(body, policy=policy, prevent_cse=False)
        x_BTH = jnp.take(self.embedding[...], tokens_BT, axis=0)
        x_BTH = x_BTH.astype(config.compute_dtype)
        x_BTH = attention.constrain_rows(x_BTH, self.mesh)
        if not num_frozen:
            x_BTH, kept = jax.lax.scan(body, x_BTH, scanned)
            return self.norm(x_BTH), kept
        first = jax.tree.map(
            lambda leaf: leaf[:num_frozen], (blocks, windowed, per_layer)
        )
        x_BTH, kept_first = jax.lax.scan(
            lambda x_BTH, layer: body(x_BTH, (layer[0], {}, *layer[1:])), x_BTH, first
        )
        rest = jax.tree.map(lambda leaf: leaf[num_frozen:], scanned)
        x_BTH, kept = jax.lax.scan(body, jax.lax.stop_gradient(x_BTH), rest)
        kept = jax.tree.map(lambda *parts: jnp.concatenate(parts), kept_first, kept)
        return self.norm(x_BTH), kept

    def __call__(
        self,
        tokens_BT: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        adapters: Adapters | None = None,
    ) -> jax.Array:
        """Returns the logits [B, T, V] float32; arguments as in `hidden`."""
        hidden_BTH = self.hidden(tokens_BT, segment_ids, positions, adapters=adapters)
        return self.logits(hidden_BTH)

    def logits(self, hidden_BTH: jax.Array) -> jax.Array:
        """Returns hidden states [..., H] times the output matrix, [..., V] float32."""
        matrix_VH = self.output_matrix().astype(hidden_BTH.dtype)
        wide = jnp.promote_types(hidden_BTH.dtype, jnp.float32)
        return jnp.einsum(
            "...h,vh->...v", hidden_BTH, matrix_VH, preferred_element_type=wide
        )


def _last_axis(vector: jax.Array, ndim: int) -> jax.Array:
    """Gives a vector `ndim` axes, all but the last of size 1."""
    return vector.reshape((1,) * (ndim - 1) + (-1,))


def _attend(
    config: DecoderConfig,
    attend: AttendFunction,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    is_windowed: jax.Array | None,
    extra: Any,
) -> tuple[jax.Array, Any]:
    """Attention of one layer, with the window where it holds (None: everywhere)."""
    if is_windowed is None:
        return attend(q, k, v, config.sliding_window, extra)
    # A kernel needs the window when it is compiled, so both kinds of layers are.
    return jax.lax.cond(
        is_windowed,
        lambda: attend(q, k, v, config.sliding_window, extra),
        lambda: attend(q, k, v, None, extra),
    )


def _adapter(
    adapters: Adapters | None, layer_values: dict[str, Any], name: str
) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
    """Binds the adapter of one linear layer to its values, or returns None."""
    if adapters is None or name not in layer_values:
        return None
    value, shared = layer_values[name], adapters.shared.get(name)
    return lambda x, y: adapters.apply(x, y, value, shared)

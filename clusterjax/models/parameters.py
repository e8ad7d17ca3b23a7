"""Every parameter of a decoder: path, shape, dimension names, Hugging Face name.

One table serves loading, saving, sharding and LoRA, so that they cannot disagree.
"""

from __future__ import annotations

import dataclasses

from clusterjax.models import decoder

# Path of a parameter inside the NNX module, e.g. ("blocks", "q", "kernel").
Path = tuple[str, ...]

_KERNEL_DIMENSIONS = {
    "q": ("embed", "heads"),
    "k": ("embed", "kv"),
    "v": ("embed", "kv"),
    "o": ("heads", "embed"),
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
}

# Hugging Face names of the modules of a block.
MODULE_NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """What is known about one parameter before it is read.

    Attributes:
      shape: shape in our module; blocks have a leading layer axis.
      dimensions: one name per axis: "layer", "embed", "heads", "kv", "mlp", "vocab",
        or "norm" for the short axes that are never sharded.
      tensor_name: Hugging Face name; "{layer}" stands for the number of the layer.
      transposed: a Hugging Face matrix is [out, in], ours [in, out].
    """

    shape: tuple[int, ...]
    dimensions: tuple[str, ...]
    tensor_name: str
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        """Whether the Hugging Face form has one tensor per layer."""
        return self.dimensions[0] == "layer"

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of (each of) the Hugging Face tensor(s)."""
        shape = self.shape[1:] if self.stacked else self.shape
        return shape[::-1] if self.transposed else shape

    def tensor_names(self) -> list[str]:
        """Returns the Hugging Face tensors that make up this parameter, in order."""
        if not self.stacked:
            return [self.tensor_name]
        return [self.tensor_name.format(layer=i) for i in range(self.shape[0])]


def table(config: decoder.DecoderConfig) -> dict[Path, Parameter]:
    """Returns all parameters of a decoder by path."""
    layers, hidden = config.num_layers, config.hidden_size
    matrix = ((config.vocab_size, hidden), ("vocab", "embed"))
    result: dict[Path, Parameter] = {
        ("embedding",): Parameter(*matrix, "model.embed_tokens.weight")
    }
    biased = {
        **dict.fromkeys(("q", "k", "v"), config.qkv_bias),
        "o": config.o_bias,
        **dict.fromkeys(("gate", "up", "down"), config.mlp_bias),
    }
    for name, shape in config.linear_shapes().items():
        prefix = "model.layers.{layer}." + MODULE_NAMES[name]
        dimensions = _KERNEL_DIMENSIONS[name]
        result["blocks", name, "kernel"] = Parameter(
            (layers, *shape), ("layer", *dimensions), prefix + ".weight", True
        )
        if biased[name]:
            result["blocks", name, "bias"] = Parameter(
                (layers, shape[1]), ("layer", dimensions[1]), prefix + ".bias"
            )
    norms = {"attention_norm": hidden, "mlp_norm": hidden}
    if config.qk_norm:
        norms |= {"q_norm": config.head_dim, "k_norm": config.head_dim}
    for name, size in norms.items():
        prefix = "model.layers.{layer}." + MODULE_NAMES[name]
        result["blocks", name, "scale"] = Parameter(
            (layers, size), ("layer", "norm"), prefix + ".weight"
        )
    result["norm", "scale"] = Parameter((hidden,), ("norm",), "model.norm.weight")
    if not config.tie_embeddings:
        result["head",] = Parameter(*matrix, "lm_head.weight")
    return result


def dimension_names(config: decoder.DecoderConfig) -> dict[Path, tuple[str, ...]]:
    """Returns the name of every axis of every parameter, by path, for sharding."""
    return {path: item.dimensions for path, item in table(config).items()}

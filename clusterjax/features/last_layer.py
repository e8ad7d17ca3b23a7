"""Features of the output layer, from one forward pass.

`proxy` (METHOD §1, the published method): (1/|𝒯|) Σ_t (p_t[y_t] − 1) h_t, the
output matrix's gradient seen at the label's own row.

`head`: the exact gradient of the mean loss with respect to the output matrix, between
two random projections, (1/|𝒯|) Σ_t (P_V (p_t − e_{y_t})) ⊗ (P_H h_t). P_V p is summed
along with the log-sum-exp, so that it costs one forward pass as well.

Neither makes a backward pass, and logits never exist as a whole.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from clusterjax import loss
from clusterjax.features import batches, projection


class LabelPositions(NamedTuple):
    """What the output layer needs of a batch. Q = label slots of a shard, P = R · Q.

    Attributes:
      hidden_PH: hidden states of the label positions.
      targets_P: int32, their labels.
      member_RSQ: bool [R, slots, Q], the position predicts a label of that example.
      overflow_R: bool, a label of this shard found no slot.
    """

    hidden_PH: jax.Array
    targets_P: jax.Array
    member_RSQ: jax.Array
    overflow_R: jax.Array


def label_positions(
    hidden_BTH: jax.Array, rows: batches.Rows, num_slots: int, size: int, shards: int
) -> LabelPositions:
    """Packs the label positions of every shard.

    Args:
      hidden_BTH: hidden states after the final norm.
      rows: the rows they were computed from.
      num_slots: examples of a shard.
      size: Q, label slots of a shard.
      shards: R.
    """
    labels = loss.find_labels(rows.slot >= 0, size, shards)
    slot_RQ = jnp.where(labels.valid_P, labels.take(rows.slot), -1).reshape(shards, -1)
    slots = jnp.arange(num_slots, dtype=slot_RQ.dtype)
    return LabelPositions(
        labels.take(hidden_BTH),
        jnp.where(labels.valid_P, labels.take(rows.targets), 0),
        slot_RQ[:, None, :] == slots[None, :, None],
        labels.overflow,
    )


def proxy(
    labels: LabelPositions, matrix_VH: jax.Array, vocab_chunk: int, vocab_shards: int
) -> tuple[jax.Array, jax.Array]:
    """Raw `proxy` features and mean losses of every slot.

    Args:
      labels: the packed label positions.
      matrix_VH: output matrix.
      vocab_chunk, vocab_shards: as in `loss.token_nll`.

    Returns:
      raw_BH float32 and loss_B float32 (nats), B = R · slots. Not finite where the
      example is broken; 0 in empty slots.
    """
    margin_P, _ = loss.log_odds(
        labels.hidden_PH, labels.targets_P, matrix_VH, vocab_chunk, vocab_shards
    )
    miss_P = jax.nn.sigmoid(margin_P)
    return (
        example_means(labels, -miss_P[:, None] * labels.hidden_PH.astype(jnp.float32)),
        example_means(labels, jax.nn.softplus(margin_P)[:, None])[:, 0],
    )


def head(
    labels: LabelPositions,
    matrix_VH: jax.Array,
    project_vocab: projection.Projection,
    project_hidden: projection.Projection,
    vocab_chunk: int,
    vocab_shards: int,
) -> tuple[jax.Array, jax.Array]:
    """Raw `head` features and mean losses of every slot.

    Args:
      labels, matrix_VH, vocab_chunk, vocab_shards: as in `proxy`.
      project_vocab: P_V, of width k_V.
      project_hidden: P_H, of width k_H.

    Returns:
      raw [B, k_V · k_H] float32 and loss_B float32, as in `proxy`.
    """

    def embed(chunk: loss.Chunk) -> jax.Array:
        return projection.rows(
            project_vocab.kind, project_vocab.key, chunk.vocab_C, project_vocab.width
        )

    margin_P, error_PX = loss.expected_rows(
        labels.hidden_PH,
        labels.targets_P,
        matrix_VH,
        embed,
        project_vocab.width,
        vocab_chunk,
        vocab_shards,
    )
    hidden_PY = jnp.matmul(
        labels.hidden_PH.astype(jnp.float32),
        projection.matrix(project_hidden, labels.hidden_PH.shape[1]),
        precision=jax.lax.Precision.HIGHEST,
    )
    both_PXY = error_PX[:, :, None] * hidden_PY[:, None, :]
    return (
        example_means(labels, both_PXY.reshape(len(both_PXY), -1)),
        example_means(labels, jax.nn.softplus(margin_P)[:, None])[:, 0],
    )


def mean_weights(labels: LabelPositions) -> jax.Array:
    """float32 [P], 1/|𝒯| of the example that each slot belongs to; 0 in unused ones."""
    count_RS1 = jnp.sum(labels.member_RSQ, axis=2, keepdims=True, dtype=jnp.float32)
    share_RSQ = labels.member_RSQ / jnp.maximum(count_RS1, 1)
    return jnp.sum(share_RSQ, axis=1).reshape(-1)


def example_means(labels: LabelPositions, values_PX: jax.Array) -> jax.Array:
    """Means over each example's label positions, [R · slots, X] float32.

    NaN for an example with a value that is not finite; 0 for an empty slot.
    """
    shards, slots, size = labels.member_RSQ.shape
    finite_P = jnp.all(jnp.isfinite(values_PX), axis=1)
    broken_RS = jnp.any(labels.member_RSQ & ~finite_P.reshape(shards, 1, size), axis=2)
    broken_RS = broken_RS | labels.overflow_R[:, None]
    count_RS1 = jnp.sum(labels.member_RSQ, axis=2, keepdims=True, dtype=jnp.float32)
    # One example that overflows must not reach its neighbours through 0 · inf.
    values_PX = jnp.where(finite_P[:, None], values_PX, 0)
    means_RSX = jnp.einsum(
        "rsq,rqx->rsx",
        labels.member_RSQ / jnp.maximum(count_RS1, 1),
        values_PX.reshape(shards, size, -1),
        precision=jax.lax.Precision.HIGHEST,
    )
    means_RSX = jnp.where(broken_RS[:, :, None], jnp.nan, means_RSX)
    return means_RSX.reshape(shards * slots, -1)

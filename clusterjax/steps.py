"""One optimiser step as the planner hands it to whoever fills its rows."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Step:
    """The examples of one optimiser step; those of a cluster lie side by side.

    Attributes:
      step: optimiser step, from 0.
      epoch: from 0.
      entry: int32 [B'], kept entries of the plan (B' = B but in a last, padded step).
      example_id: int64 [B'], rows of the corpus.
      cluster_id: int32 [B'].
      weight: float64 [B'], u_i: what the loss of each label token is multiplied with;
        the losses are then summed, never averaged.
    """

    step: int
    epoch: int
    entry: np.ndarray
    example_id: np.ndarray
    cluster_id: np.ndarray
    weight: np.ndarray


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the examples of a step lie in the arrays [A, R·L, T] of its batch.

    Example j begins at `[micro_step[j], shard[j] * num_rows + row[j], start[j]]`.

    Attributes:
      step: the examples.
      length: int64 [B'], tokens.
      shard: int32 [B'], in [0, R).
      micro_step: int32 [B'], in [0, A).
      row: int32 [B'], in [0, L), inside the shard and micro-step.
      start: int32 [B'], first position in the row.
      segment: int32 [B'], 1, 2, … inside the row.
      num_shards: R.
      num_micro_steps: A.
      num_rows: L.
      row_length: T.
      num_labels: label tokens of a shard and micro-step that the loss has room for.
    """

    step: Step
    length: np.ndarray
    shard: np.ndarray
    micro_step: np.ndarray
    row: np.ndarray
    start: np.ndarray
    segment: np.ndarray
    num_shards: int
    num_micro_steps: int
    num_rows: int
    row_length: int
    num_labels: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """(A, R·L, T)."""
        rows = self.num_shards * self.num_rows
        return self.num_micro_steps, rows, self.row_length

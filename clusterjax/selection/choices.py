"""What a method decided about every candidate."""

from __future__ import annotations

import dataclasses

import numpy as np

from clusterjax import plan as plans
from clusterjax.selection import forced


@dataclasses.dataclass(frozen=True)
class Choice:
    """Copies and reasons.

    Attributes:
      copies: int32 [n], how often each candidate is kept.
      kept_by: int8 [n], index into `plan.KEPT_BY_NAMES`.
      notes: sentences for people.
    """

    copies: np.ndarray
    kept_by: np.ndarray
    notes: tuple[str, ...] = ()


def from_mask(kept_n: np.ndarray, forced_n: forced.Forced) -> Choice:
    """Every candidate of the mask once."""
    kept_by_n = np.where(kept_n, plans.RULE, plans.PRUNED).astype(np.int8)
    kept_by_n[forced_n.must & kept_n] = plans.MUST_KEEP
    return Choice(kept_n.astype(np.int32), kept_by_n)

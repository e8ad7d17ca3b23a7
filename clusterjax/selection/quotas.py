"""Quotas: how many examples of each cluster are kept (METHOD §3). Exact integers."""

from __future__ import annotations

import numpy as np

from clusterjax import errors, rational


def minimum(sizes_K: np.ndarray, ratio: float) -> np.ndarray:
    """⌊ratio · min_c n_c⌋ for every cluster (the paper's rule).

    Args:
      sizes_K: int [K], examples that may be kept.
      ratio: in (0, 1].

    Returns:
      int64 [K], all equal.
    """
    quota = int(rational.from_decimal(ratio) * int(sizes_K.min()))
    return np.full(len(sizes_K), quota, np.int64)


def target_count(fraction: float, total: int) -> int:
    """round(fraction · total), halves to even, in rational arithmetic."""
    return round(rational.from_decimal(fraction) * total)


def waterfill(
    sizes_K: np.ndarray, total: int, lowest_K: np.ndarray | None = None
) -> np.ndarray:
    """Integers min(n_c, q) that sum to `total`; the remainder goes by cluster id.

    As balanced as the total allows: no quota can grow without another, not larger
    one, shrinking.

    Args:
      sizes_K: int [K], examples that may be kept.
      total: sum of the quotas, at most the sum of the sizes.
      lowest_K: int [K], least quota of each cluster (0 by default).

    Returns:
      int64 [K].

    Raises:
      errors.PlanError: the total lies outside what sizes and lower limits allow.
    """
    sizes_K = np.asarray(sizes_K, np.int64)
    lowest_K = np.zeros_like(sizes_K) if lowest_K is None else np.asarray(lowest_K)
    if not lowest_K.sum() <= total <= sizes_K.sum():
        raise errors.PlanError(
            f"{total:,} examples to keep, but the clusters allow {lowest_K.sum():,}"
            f" (must_keep) to {sizes_K.sum():,}; change selection.target_fraction"
        )
    low, high = 0, int(sizes_K.max())
    while low < high:  # the largest level whose quotas do not exceed the total
        level = (low + high + 1) // 2
        if np.clip(level, lowest_K, sizes_K).sum() <= total:
            low = level
        else:
            high = level - 1
    quota_K = np.clip(low, lowest_K, sizes_K)
    open_K = np.flatnonzero((quota_K == low) & (sizes_K > low))
    quota_K[open_K[: total - int(quota_K.sum())]] += 1
    return quota_K


def proportional(
    sizes_K: np.ndarray, total: int, lowest_K: np.ndarray | None = None
) -> np.ndarray:
    """Quotas as n_c/N by largest remainders; at least 1 each when the total allows.

    Args:
      sizes_K: int [K], examples that may be kept.
      total: sum of the quotas, at most the sum of the sizes.
      lowest_K: int [K], least quota of each cluster (1, or 0 below K in all).

    Returns:
      int64 [K].
    """
    sizes_K = np.asarray(sizes_K, np.int64)
    one = int(total >= len(sizes_K))
    lowest_K = np.maximum(0 if lowest_K is None else lowest_K, np.minimum(one, sizes_K))
    if not lowest_K.sum() <= total <= sizes_K.sum():
        raise errors.PlanError(
            f"{total:,} examples to keep, but the clusters allow {lowest_K.sum():,} to"
            f" {sizes_K.sum():,}; change selection.target_fraction"
        )
    product_K = sizes_K * int(total)
    whole = int(sizes_K.sum())
    quota_K = np.clip(product_K // whole, lowest_K, sizes_K)
    remainder_K = product_K - quota_K * whole  # in units of 1/N, negative if raised
    difference = total - int(quota_K.sum())
    while difference:
        step = 1 if difference > 0 else -1
        free_K = quota_K < sizes_K if step > 0 else quota_K > lowest_K
        order_K = np.argsort(-step * remainder_K, kind="stable")
        chosen = order_K[free_K[order_K]][: abs(difference)]
        quota_K[chosen] += step
        remainder_K[chosen] -= step * whole
        difference -= step * len(chosen)
    return quota_K

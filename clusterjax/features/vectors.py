"""Directions and lengths of raw features, safe at the ends of float32."""

from __future__ import annotations

import numpy as np

from clusterjax import datatypes

# An example whose raw feature is shorter has no direction.
MIN_NORM = 1e-12


def unit_rows(raw_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unit rows [n, D] and raw lengths [n], float32.

    The length is taken after scaling by the largest entry, so that squares neither
    over- nor underflow. A row with an entry that is not finite has length NaN and,
    like a zero row, a unit row of zeros.
    """
    raw_ND = np.asarray(raw_ND, np.float32)
    top = np.abs(raw_ND).max(axis=1, keepdims=True, initial=0.0)
    usable = np.isfinite(top) & (top > 0)
    top = np.where(usable, top, 1)
    scaled = np.where(usable, raw_ND, 0) / top
    length = np.linalg.norm(scaled, axis=1, keepdims=True)
    unit = scaled / np.where(usable, length, 1)
    finite = np.isfinite(raw_ND).all(axis=1)
    norm = np.where(finite, (top * length)[:, 0], np.nan)
    return unit.astype(np.float32), norm.astype(np.float32)


def raw(feats: datatypes.GradientFeatures) -> np.ndarray:
    """The raw features [n, D] of uncentred features (`features.center = none`)."""
    return raw_rows(np.asarray(feats.values), feats.norm)


def raw_rows(unit_ND: np.ndarray, norm: np.ndarray) -> np.ndarray:
    """The raw features, unit · norm."""
    return unit_ND * norm[:, None]


def centred(unit_ND: np.ndarray, norm: np.ndarray, block: int = 8192) -> np.ndarray:
    """Unit rows of the raw features minus their mean (`features.center = mean`).

    Args:
      unit_ND: may be memory-mapped; the result is in memory.
      norm: float32 [n].
      block: rows at a time.
    """
    starts = range(0, len(unit_ND), block)
    total = np.zeros(unit_ND.shape[1], np.float64)
    for i in starts:
        total += norm[i : i + block].astype(np.float64) @ unit_ND[i : i + block]
    mean = (total / len(unit_ND)).astype(np.float32)
    result = np.empty(unit_ND.shape, np.float32)
    for i in starts:
        part = raw_rows(unit_ND[i : i + block], norm[i : i + block])
        result[i : i + block] = unit_rows(part - mean[None])[0]
    return result

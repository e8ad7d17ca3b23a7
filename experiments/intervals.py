"""Means with confidence intervals over seeds, and paired differences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import scipy.stats

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean and half the width of its 95 % t-interval (NaN with one value)."""

    mean: float
    half_width: float
    count: int

    def __str__(self) -> str:
        return self.text()

    def text(self, digits: int = 4, sign: bool = False) -> str:
        """`1.2345 ± 0.0012`, or the value alone when there is only one."""
        if math.isnan(self.mean):
            return "–"
        mean = f"{self.mean:{'+' if sign else ''}.{digits}f}".replace("-", "−")
        if math.isnan(self.half_width):
            return mean
        return f"{mean} ± {self.half_width:.{digits}f}"


def interval(values: Sequence[float]) -> Interval:
    """Student's t-interval of the mean; values must be independent runs."""
    array = np.asarray(values, np.float64)
    if not len(array):
        return Interval(math.nan, math.nan, 0)
    if len(array) == 1:
        return Interval(float(array[0]), math.nan, 1)
    error = array.std(ddof=1) / math.sqrt(len(array))
    quantile = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, len(array) - 1)
    return Interval(float(array.mean()), float(quantile * error), len(array))


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> Interval:
    """Interval of value − reference over the seeds that both have."""
    seeds = sorted(values.keys() & reference.keys())
    return interval([values[seed] - reference[seed] for seed in seeds])

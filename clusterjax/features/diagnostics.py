"""What a set of features looks like, and what it is worth.

Everything here is NumPy on the host. Sums over pairs are taken from sums over rows or
from a sample, so that a million features cost one pass over them.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from clusterjax import datatypes
from clusterjax.features import vectors

# Robust deviations of log norm beyond which an example is called an outlier.
_OUTLIER_DEVIATIONS = 5.0


@dataclasses.dataclass(frozen=True)
class SourceFigures:
    """How alike the features of one source are.

    Attributes:
      count: examples.
      inside: mean cosine of two different examples of the source.
      outside: mean cosine of one of the source and one of another.
    """

    count: int
    inside: float
    outside: float


@dataclasses.dataclass(frozen=True)
class Diagnostics:
    """Figures for the report.

    Attributes:
      count, width: of the features.
      rejects: reason → examples.
      norm_quantiles: raw norms at 0, 5, 25, 50, 75, 95 and 100 %.
      label_exponent: slope of log norm on log labels; −1/2 for means of independent
        token gradients.
      label_correlation: of log norm and log labels.
      outliers: uids whose log norm is over 5 robust deviations from the median, the
        farthest first (at most 20).
      mean_cosine: of two different examples.
      sources: name → figures.
      effective_rank: exp of the entropy of the spectrum of the unit features (Roy &
        Vetterli, EUSIPCO 2007), on a sample.
    """

    count: int
    width: int
    rejects: dict[str, int]
    norm_quantiles: tuple[float, ...]
    label_exponent: float
    label_correlation: float
    outliers: tuple[str, ...]
    mean_cosine: float
    sources: dict[str, SourceFigures]
    effective_rank: float


@dataclasses.dataclass(frozen=True)
class Worth:
    """How well features stand for whole-model gradients, on a sample.

    Attributes:
      sample: examples.
      cosine_correlation: Pearson correlation, over all pairs, of the cosine of two
        features with the cosine of the two sketches.
      noise_ratio: variance of a step's mean gradient when each step holds every
        cluster in proportion, over that of random steps; below 1 is gain.
    """

    sample: int
    cosine_correlation: float
    noise_ratio: float | None


def diagnose(feats: datatypes.GradientFeatures, sample: int = 2000) -> Diagnostics:
    """Computes the figures.

    Args:
      feats: the features.
      sample: examples that the effective rank is measured on.
    """
    log_norm = np.log(feats.norm.astype(np.float64))
    log_labels = np.log(feats.num_labels.astype(np.float64))
    slope, correlation = _line(log_labels, log_norm)
    total, by_source = _sums(feats)
    count = len(feats.norm)
    return Diagnostics(
        count=count,
        width=feats.values.shape[1],
        rejects=dict(collections.Counter(r.reason for r in feats.rejects)),
        norm_quantiles=tuple(
            float(q)
            for q in np.quantile(feats.norm, [0, 0.05, 0.25, 0.5, 0.75, 0.95, 1])
        ),
        label_exponent=slope,
        label_correlation=correlation,
        outliers=_outliers(feats, log_norm),
        mean_cosine=_mean_inside(total, count),
        sources=_source_figures(feats, total, by_source),
        effective_rank=effective_rank(np.asarray(feats.values[_spread(count, sample)])),
    )


def effective_rank(unit_ND: np.ndarray) -> float:
    """exp(entropy) of the eigenvalues of U Uᵀ, between 1 and min(n, D)."""
    unit_ND = np.asarray(unit_ND, np.float64)
    narrow = unit_ND.shape[1] <= unit_ND.shape[0]
    gram = unit_ND.T @ unit_ND if narrow else unit_ND @ unit_ND.T
    share = np.maximum(np.linalg.eigvalsh(gram), 0)
    share = share[share > 0] / share.sum()
    return float(np.exp(-np.sum(share * np.log(share))))


def worth(
    unit_ND: np.ndarray, sketch_ND: np.ndarray, labels_N: np.ndarray | None = None
) -> Worth:
    """Judges features by independent whole-model sketches of the same examples.

    Args:
      unit_ND: unit features of a sample.
      sketch_ND: raw whole-model sketches, made with another seed than the features:
        on the very numbers that were optimised every feature looks good.
      labels_N: clusters made from the features, for the noise ratio.
    """
    sketch_unit_ND, _ = vectors.unit_rows(sketch_ND)
    return Worth(
        sample=len(unit_ND),
        cosine_correlation=pair_correlation(unit_ND, sketch_unit_ND),
        noise_ratio=None if labels_N is None else noise_ratio(sketch_ND, labels_N),
    )


def pair_correlation(first_ND: np.ndarray, second_NE: np.ndarray) -> float:
    """Correlation, over pairs of different rows, of the cosines in two spaces."""
    upper = np.triu_indices(len(first_ND), 1)
    first = (np.asarray(first_ND, np.float64) @ np.asarray(first_ND.T))[upper]
    second = (np.asarray(second_NE, np.float64) @ np.asarray(second_NE.T))[upper]
    return _line(first, second)[1]


def noise_ratio(sketch_ND: np.ndarray, labels_N: np.ndarray) -> float:
    """Variance of stratified steps over that of random steps, in closed form.

    A step that holds cluster c in proportion n_c/N has a mean of variance
    Σ_c (n_c/N) S_c² / B; a random step one of S²/B (Cochran, "Sampling Techniques",
    ch. 5): the ratio is the share of the variance that lies inside the clusters.
    """
    sketch_ND = np.asarray(sketch_ND, np.float64)
    total = np.sum(np.var(sketch_ND, axis=0, ddof=1))
    inside = 0.0
    for label in np.unique(labels_N):
        rows = sketch_ND[labels_N == label]
        if len(rows) > 1:
            share = len(rows) / len(sketch_ND)
            inside += share * np.sum(np.var(rows, axis=0, ddof=1))
    return float(inside / total)


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """(slope of y on x, correlation); NaN where one does not vary."""
    x, y = x - x.mean(), y - y.mean()
    xx, yy, xy = float(x @ x), float(y @ y), float(x @ y)
    if not xx or not yy:
        return float("nan"), float("nan")
    return xy / xx, xy / float(np.sqrt(xx * yy))


def _sums(feats: datatypes.GradientFeatures) -> tuple[np.ndarray, np.ndarray]:
    """Σ of unit rows over all, [D], and over each source, [sources, D]."""
    width = feats.values.shape[1]
    by_source = np.zeros((len(feats.source_names), width), np.float64)
    for begin in range(0, len(feats.norm), 8192):
        part = np.asarray(feats.values[begin : begin + 8192], np.float64)
        np.add.at(by_source, feats.source_id[begin : begin + 8192], part)
    return by_source.sum(axis=0), by_source


def _mean_inside(total: np.ndarray, count: int) -> float:
    """Mean cosine of different rows, from the sum of `count` unit rows."""
    if count < 2:
        return float("nan")
    return float((total @ total - count) / (count * (count - 1)))


def _source_figures(
    feats: datatypes.GradientFeatures, total: np.ndarray, by_source: np.ndarray
) -> dict[str, SourceFigures]:
    result = {}
    for i, name in enumerate(feats.source_names):
        count = int(np.sum(feats.source_id == i))
        others = len(feats.norm) - count
        if not count:
            continue
        cross = by_source[i] @ (total - by_source[i])
        result[name] = SourceFigures(
            count,
            _mean_inside(by_source[i], count),
            float(cross / (count * others)) if others else float("nan"),
        )
    return result


def _outliers(
    feats: datatypes.GradientFeatures, log_norm: np.ndarray
) -> tuple[str, ...]:
    center = np.median(log_norm)
    # 1.4826 makes the median deviation of normal numbers their standard deviation.
    deviation = 1.4826 * np.median(np.abs(log_norm - center))
    distance = np.abs(log_norm - center)
    far = np.flatnonzero(distance > _OUTLIER_DEVIATIONS * max(deviation, 1e-12))
    far = far[np.argsort(-distance[far], kind="stable")][:20]
    return tuple(str(uid) for uid in feats.uid[far])


def _spread(count: int, sample: int) -> np.ndarray:
    """`sample` row numbers, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(sample, count)).astype(np.int64))

"""Self-test of the projections before a pass: lengths and inner products are kept."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from clusterjax import config as config_lib
from clusterjax.features import extractors, projection

# Entries looked at, at most; the first rows of a projection stand for the rest.
_MAX_ROWS = 65_536
# Standard deviations that a product may be off: 1 in 10⁹ for normal errors, and the
# tails of sums of signs are lighter.
_DEVIATIONS = 6.0


def run(cfg: config_lib.FeaturesConfig, extractor: extractors.Extractor) -> None:
    """Tests every projection that the pass will use.

    Raises:
      RuntimeError: a projection that does not keep lengths (see `check`).
    """
    if cfg.projection == "identity":
        return
    kind, seed = cfg.projection, cfg.seed
    if extractor.width != extractor.raw_width:
        check(
            extractors.last_projection(cfg, extractor.width),
            extractor.raw_width,
            cfg.block_size,
        )
    if cfg.kind == "per_example":
        name = extractor.covered[0]
        check(
            projection.Projection(kind, extractor.width, seed, name),
            _MAX_ROWS,
            cfg.block_size,
        )
    if cfg.kind in ("head", "probe"):
        # Sides are narrow: lengths are kept by their product only, on average.
        for side, width in (("in", cfg.k_in), ("out", cfg.k_out)):
            check(projection.Projection(kind, width, seed, side), 1024, cfg.block_size)


def check(rule: projection.Projection, num_rows: int, block_size: int) -> None:
    """Projects dense, sparse and spiky unit vectors and compares all products.

    The error of a product of two unit vectors has a standard deviation of at most
    √(2/D) (Johnson–Lindenstrauss); `_DEVIATIONS` of them are allowed.

    Args:
      rule: the projection.
      num_rows: entries of the vectors, cut to 65,536.
      block_size: as in the pass.

    Raises:
      RuntimeError: a product outside the bound.
    """
    vectors_BI = test_vectors(min(num_rows, _MAX_ROWS))
    run_block = functools.partial(
        projection.project, projection=rule, block_size=block_size
    )
    found_BD = np.asarray(jax.jit(run_block)(jnp.asarray(vectors_BI)), np.float64)
    expected = vectors_BI.astype(np.float64) @ vectors_BI.T.astype(np.float64)
    error = np.abs(found_BD @ found_BD.T - expected).max()
    bound = _DEVIATIONS * np.sqrt(2.0 / rule.width)
    if not error <= bound or not np.abs(found_BD).max() > 0:
        raise RuntimeError(
            f"the {rule.kind} projection {rule.name!r} to {rule.width} numbers failed"
            f" its self-test: products of unit vectors are off by up to {error:.3g},"
            f" more than {bound:.3g}. Its features would mean nothing; please report"
            " this with the versions of jax and jaxlib."
        )


def test_vectors(size: int) -> np.ndarray:
    """Unit vectors, float32 [8, size]: dense, sparse, constant, sloped and spiky."""
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(4, size))
    sparse = np.where(rng.uniform(size=size) < 0.02, rng.normal(size=size), 0.0)
    sparse[0] += 1e-3
    spike = np.zeros(size)
    spike[size // 2] = 1.0
    rest = [sparse, np.ones(size), np.arange(1.0, size + 1), spike]
    vectors_BI = np.concatenate([dense, np.stack(rest)])
    vectors_BI /= np.linalg.norm(vectors_BI, axis=1, keepdims=True)
    return vectors_BI.astype(np.float32)

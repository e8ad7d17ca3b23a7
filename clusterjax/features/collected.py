"""Features that training collected (`clusterjax.collection`), as those of a pass."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from clusterjax import config as config_lib
from clusterjax import datatypes, errors, files
from clusterjax.features import extraction, extractors, projection, vectors

# Settings of a pass that training has no counterpart of.
_OF_A_PASS = ("max_tokens", "num_layers", "model", "store_dtype", "compute_dtype")


def check(cfg: config_lib.FeaturesConfig, model_compute_dtype: str) -> None:
    """Refuses settings that only a pass of its own can give.

    Raises:
      errors.ConfigError: with the key to change.
    """
    if cfg.kind != "proxy":
        raise errors.ConfigError(
            f"features.kind={cfg.kind!r} can't be collected while training: it needs a"
            " pass of its own; set features.kind='proxy' or"
            " features.during_first_epoch=False"
        )
    defaults = config_lib.FeaturesConfig(compute_dtype="")
    for name in _OF_A_PASS:
        value = getattr(cfg, name)
        if name == "compute_dtype" and value == model_compute_dtype:
            continue
        if value != getattr(defaults, name):
            raise errors.ConfigError(
                f"features.{name}={value!r} has no effect with"
                " features.during_first_epoch, which takes what training computes;"
                " leave it out"
            )


def from_training(
    raw_NH: np.ndarray,
    loss_N: np.ndarray,
    corpus: datatypes.Corpus,
    cfg: config_lib.FeaturesConfig,
    origin: str,
) -> datatypes.GradientFeatures:
    """Features of a corpus from what its first epoch collected.

    Args:
      raw_NH: raw features, float32, NaN where an example was not trained on.
      loss_N: mean losses, float32, nats.
      corpus: the examples.
      cfg: width and centring.
      origin: hash of all that the first epoch depends on: start, schedule, optimiser.

    Raises:
      errors.DataError: no example has a usable feature.
      errors.ConfigError: `features.dim` does not fit.
    """
    raw_ND = _narrowed(raw_NH, cfg)
    unit_ND, norm = vectors.unit_rows(raw_ND)
    fingerprint = files.hash_arrays(
        corpus.fingerprint,
        extraction.settings_fingerprint(cfg, origin),
        cfg.center,
    )
    return extraction.finish(
        corpus,
        cfg,
        np.asarray(corpus.num_labels),
        norm,
        loss_N,
        lambda keep: unit_ND[keep],
        fingerprint,
        origin,
    )


def _narrowed(raw_NH: np.ndarray, cfg: config_lib.FeaturesConfig) -> np.ndarray:
    """The last projection (`features.dim`), as the pass makes it."""
    width = raw_NH.shape[1]
    if cfg.dim is None or cfg.dim == width:
        return raw_NH
    if cfg.dim > width or cfg.projection == "identity":
        raise errors.ConfigError(
            f"features.dim={cfg.dim} with projection={cfg.projection!r}: kind=proxy is"
            f" {width:,} wide; choose a random projection and at most that"
        )
    last = extractors.last_projection(cfg, cfg.dim)
    return np.asarray(projection.project(jnp.asarray(raw_NH), last, cfg.block_size))

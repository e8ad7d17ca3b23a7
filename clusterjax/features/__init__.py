"""Gradient features: one small vector per example (METHOD §1)."""

from clusterjax.features.extraction import compute as compute

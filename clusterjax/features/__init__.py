"""Gradient features: one small vector per example (METHOD §1)."""

from clusterjax.features.agreement import align as align
from clusterjax.features.agreement import compare as compare
from clusterjax.features.agreement import measure as measure
from clusterjax.features.agreement import sketches as sketches
from clusterjax.features.agreement import take as take
from clusterjax.features.diagnostics import diagnose as diagnose
from clusterjax.features.diagnostics import worth as worth
from clusterjax.features.extraction import compute as compute
from clusterjax.features.vectors import raw as raw

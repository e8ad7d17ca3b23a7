"""Decimal settings as exact fractions, so that counts come out as a person expects."""

from __future__ import annotations

import fractions


def from_decimal(value: float) -> fractions.Fraction:
    """The decimal number that a person wrote: 0.29 is 29/100, not the nearest double.

    ⌊0.29 · 100⌋ is then 29, where binary arithmetic gives 28.
    """
    return fractions.Fraction(str(value))

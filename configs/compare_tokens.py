"""The methods that keep a part, at equal budget of label tokens, three paired seeds.

    python -m experiments.compare --config configs/compare_tokens.py

A method that prefers long examples learns from more labels at an equal number of
examples; here all keep as many label tokens as the paper's setting does.
"""

from __future__ import annotations

import dataclasses

from configs import compare_methods
from experiments import grid

_METHODS = ("paper", "random", "stratified", "k-center", "near duplicates")


def get_config() -> grid.Comparison:
    made = compare_methods.get_config()
    return dataclasses.replace(
        made,
        methods={name: made.methods[name] for name in _METHODS},
        seeds=(0, 1, 2),
        budget_kind="tokens",
        mechanism=False,
    )

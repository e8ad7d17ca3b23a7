"""Static figures of a comparison for documents: SVG, and PNG when wanted.

    python -m experiments.figures --results docs/results/methods/results.json \
        --out docs/results/methods [--lines "full,random,paper"] [--png]

methods: loss of every method and its paired difference to random; time and tokens:
quality over total time (selection included) and over label tokens; sources: paired
difference to random, source by source; mechanism: noise of the planned steps at the
start; training: the same at checkpoints. Intervals are 95 % t-intervals over seeds.
Needs the extra `plot`.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Literal

from clusterjax import errors
from experiments import published


def write_all(
    results: str | os.PathLike[str],
    out: str | os.PathLike[str],
    lines: Sequence[str] = (),
    *,
    clock: Literal["auto", "wall", "processor"] = "auto",
    png: bool = False,
) -> list[pathlib.Path]:
    """Draws what the results allow; returns the files.

    Args:
      results: published results, or those of `experiments.compare`.
      out: folder.
      lines: methods with a colour of their own in the figures over time and tokens;
        the others are grey. () = the references, the first method and the best others.
      clock: of total times; `auto` counts processor seconds where every run did.
      png: also as PNG.

    Raises:
      errors.UserError: no such results or method, or matplotlib is missing.
    """
    try:
        from experiments.figures import (
            costs,
            curves,
            effects,
            intervals,
            mechanism,
            style,
        )
    except ImportError as error:
        raise errors.UserError(
            f"figures need matplotlib ({error}): pip install --editable '.[plot]'"
        ) from error
    result = published.read_comparison(results)
    mark, written = published.mark(results), []
    chosen = costs.clock(list(result.rows), clock)
    with style.context():
        look = style.Look(result, lines)
        drawn = {
            "methods": intervals.methods(result, chosen),
            "time": curves.over(result, look, costs.time(chosen)),
            "tokens": curves.over(result, look, costs.LABEL_TOKENS),
            "sources": effects.sources(result),
            "mechanism": mechanism.start(result),
            "training": mechanism.during(result, look),
        }
        for name, figure in drawn.items():
            if figure is not None:
                written += style.save(figure, pathlib.Path(out) / name, mark, png)
    return written

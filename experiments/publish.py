"""Publishes a comparison: a small result file and its figures.

    python -m experiments.publish --results runs/compare_methods/results.json \
        --out docs/results/methods \
        --command "python -m experiments.compare --config configs/compare_methods.py"

Writes OUT/results.json (paths of this machine left out, six significant digits) and the
figures of `experiments.figures`. Run it on the machine that made the runs: its
processor is noted. Then renew the tables: `python -m experiments.doc_tables --write`.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from clusterjax import errors, files
from experiments import figures, published


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", required=True, type=pathlib.Path, help="of experiments.compare"
    )
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder")
    parser.add_argument("--command", required=True, help="what makes it again")
    parser.add_argument("--full", default="full", help="first reference method")
    parser.add_argument("--random", default="random", help="second reference method")
    parser.add_argument("--lines", default="", help="see experiments.figures")
    parser.add_argument(
        "--clock", default="auto", choices=("auto", "wall", "processor")
    )
    options = parser.parse_args(argv)
    try:
        publish(options)
    except errors.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def publish(options: argparse.Namespace) -> None:
    """Writes the result file and the figures."""
    rows = published.read_comparison(options.results).rows
    result = published.comparison.Comparison(rows, options.full, options.random)
    name = options.out.resolve().name
    value = published.value_of(result, name, options.command, options.results.parent)
    path = options.out / "results.json"
    files.write_text(path, published.text_of(value))
    print(f"{path}: {len(rows)} runs, {path.stat().st_size / 1024:.0f} KiB")
    lines = published.names(options.lines)
    for figure in figures.write_all(path, options.out, lines, clock=options.clock):
        print(figure)


if __name__ == "__main__":
    sys.exit(main())

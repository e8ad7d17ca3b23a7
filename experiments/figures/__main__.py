"""`python -m experiments.figures`."""

import argparse
import sys
from collections.abc import Sequence

from clusterjax import errors
from experiments import figures, published


def main(argv: Sequence[str] | None = None) -> int:
    """Draws the figures of one comparison."""
    parser = argparse.ArgumentParser(
        description=figures.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", required=True, help="results.json")
    parser.add_argument("--out", required=True, help="folder of the figures")
    parser.add_argument(
        "--lines", default="", help="methods in colour, by commas or semicolons"
    )
    parser.add_argument(
        "--clock",
        choices=("auto", "wall", "processor"),
        default="auto",
        help="of total times; auto: processor seconds where every run counted them",
    )
    parser.add_argument("--png", action="store_true", help="also as PNG")
    options = parser.parse_args(argv)
    lines = published.names(options.lines)
    try:
        for path in figures.write_all(
            options.results,
            options.out,
            lines,
            clock=options.clock,
            png=options.png,
        ):
            print(path)
    except errors.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

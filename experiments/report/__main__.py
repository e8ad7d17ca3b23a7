"""Writes the report of a run folder again.

python -m experiments.report --workdir runs/quickstart
"""

import argparse
import pathlib

from experiments import report


def main() -> None:
    """Reads the folder and writes `report.html` into it, or to `--output`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, default=None)
    arguments = parser.parse_args()
    output = arguments.output or arguments.workdir / "report.html"
    report.write(report.read(arguments.workdir), output)
    print(output)


if __name__ == "__main__":
    main()

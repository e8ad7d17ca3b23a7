"""`python -m experiments.bench SUBJECT [flags]`: a subject is a module in here."""

import runpy
import sys

SUBJECTS = (
    "answers",
    "attribution",
    "clustering",
    "collecting",
    "data",
    "features",
    "passes",
    "planning",
    "survival",
    "training",
)


def main() -> None:
    """Runs the subject's module as if it were called itself."""
    if len(sys.argv) < 2 or sys.argv[1] not in SUBJECTS:
        sys.exit(f"usage: python -m experiments.bench {{{' | '.join(SUBJECTS)}}} ...")
    subject = sys.argv.pop(1)
    runpy.run_module(f"experiments.bench.{subject}", run_name="__main__")


if __name__ == "__main__":
    main()

"""`python -m experiments.bench SUBJECT [flags]`: a subject is a module in here."""

import pathlib
import runpy
import sys


def main() -> None:
    """Runs the subject's module as if it were called itself."""
    here = pathlib.Path(__file__).parent
    hidden = ("__", "torch_")
    subjects = sorted(
        p.stem for p in here.glob("*.py") if not p.stem.startswith(hidden)
    )
    if len(sys.argv) < 2 or sys.argv[1] not in subjects:
        sys.exit(f"usage: python -m experiments.bench {{{' | '.join(subjects)}}} ...")
    subject = sys.argv.pop(1)
    runpy.run_module(f"experiments.bench.{subject}", run_name="__main__")


if __name__ == "__main__":
    main()

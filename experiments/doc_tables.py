"""Tables in the documentation that must equal saved results.

    python -m experiments.doc_tables            # checks; exit 1 and a diff otherwise
    python -m experiments.doc_tables --write    # renews what differs

A table stands between two comments; the path is relative to the Markdown file:

    <!-- table: results/methods/results.json main methods="paper; herding, proxy;" -->
    <!-- end -->

and a number inside a sentence between two others:

    <!-- value: results/methods/results.json main paper "total (s)" -->…<!-- end -->

Parts, methods and columns are those of `experiments.result_tables.render`. Figures
beside a results.json name the hash of the file that they were drawn from; it is checked
too.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import pathlib
import re
import shlex
import sys
from collections.abc import Iterator, Sequence

from clusterjax import errors, files
from experiments import published, result_tables

_DIFFERS = "differs from"
ROOT = pathlib.Path(__file__).parent.parent
_MARKER = re.compile(
    r"<!-- (?P<kind>table|value): (?P<order>[^\n]*?) -->"
    r"(?P<text>.*?)"
    r"(?P<end><!-- end -->|(?=<!-- (?:table|value): )|\Z)",
    re.DOTALL,
)
_FENCE = re.compile(r"^(```|~~~).*?^\1[^\S\n]*$", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Text that is not what the saved results give."""

    path: pathlib.Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def documents(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    """README and the pages under docs/."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def check(path: pathlib.Path) -> list[Problem]:
    """What in a Markdown file differs from the saved results."""
    return _renewed(path)[1]


def write(path: pathlib.Path) -> list[Problem]:
    """Renews a Markdown file; returns what could not be renewed."""
    before = path.read_text(encoding="utf-8")
    after, problems = _renewed(path)
    if after != before:
        files.write_text(path, after)
    return [p for p in problems if not p.text.startswith(_DIFFERS)]


def _renewed(path: pathlib.Path) -> tuple[str, list[Problem]]:
    """The file with every block as it should be, and what was not."""
    before = path.read_text(encoding="utf-8")
    after, last, problems = [], 0, []
    for match in _blocks(before):
        line = before.count("\n", 0, match.start()) + 1
        after.append(before[last : match.start("text")])
        last = match.end("text")
        text = match["text"]
        try:
            if not match["end"]:
                raise errors.UserError("the block has no <!-- end -->")
            expected = _expected(path, match["kind"], match["order"])
            if text != expected:
                found = _difference(match["order"], text, expected)
                problems.append(Problem(path, line, found))
            text = expected
        except errors.UserError as error:
            problems.append(Problem(path, line, str(error)))
        after.append(text)
    return "".join([*after, before[last:]]), problems


def _blocks(text: str) -> Iterator[re.Match[str]]:
    """Marked blocks outside of fenced code, which may show a marker as an example."""
    fences = [match.span() for match in _FENCE.finditer(text)]
    for match in _MARKER.finditer(text):
        if not any(begin <= match.start() < end for begin, end in fences):
            yield match


def _expected(path: pathlib.Path, kind: str, order: str) -> str:
    try:
        words = shlex.split(order)
    except ValueError as error:
        raise errors.UserError(f"{order}: {error}") from error
    if kind == "value":
        if len(words) != 4:
            raise errors.UserError(f"value: expected PATH PART METHOD COLUMN: {order}")
        return result_tables.cell(path.parent / words[0], *words[1:])
    if len(words) < 2:
        raise errors.UserError(
            f"table: expected PATH PART [methods=] [columns=] [against=]: {order}"
        )
    keys: dict[str, list[str]] = {}
    for word in words[2:]:
        name, equals, items = word.partition("=")
        if name not in ("methods", "columns", "against") or not equals:
            raise errors.UserError(
                f"{word!r}: expected methods=..., columns=... or against=..."
            )
        keys[name] = published.names(items)
    table = result_tables.render(path.parent / words[0], words[1], **keys)
    return f"\n{table}\n"


def _difference(order: str, found: str, expected: str) -> str:
    lines = difflib.unified_diff(
        found.strip("\n").splitlines(),
        expected.strip("\n").splitlines(),
        "in the text",
        "saved results",
        lineterm="",
        n=0,
    )
    return "\n".join([f"{_DIFFERS} {order}", *(f"    {line}" for line in lines)])


def stale_figures(root: pathlib.Path = ROOT) -> list[Problem]:
    """Figures that were drawn from another state of the results beside them."""
    problems = []
    for results in sorted((root / "docs").rglob("results.json")):
        mark = published.mark(results)
        for figure in sorted(results.parent.glob("*.svg")):
            if mark not in figure.read_text(encoding="utf-8"):
                text = f"was not drawn from {results.name} as it is; draw it again with"
                folder = results.parent.relative_to(root)
                command = f"--results {folder}/results.json --out {folder}"
                problems.append(
                    Problem(
                        figure, 1, f"{text} python -m experiments.figures {command}"
                    )
                )
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="renew what differs")
    parser.add_argument("--check", action="store_true", help="the default")
    parser.add_argument("paths", nargs="*", type=pathlib.Path)
    options = parser.parse_args(argv)
    visit = write if options.write else check
    paths = options.paths or documents()
    problems = [problem for path in paths for problem in visit(path)]
    if not options.paths:
        problems += stale_figures()
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{len(paths)} pages equal the saved results")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""The text that the embedded model is pre-trained on, without the held-out part.

A document is one function or method of the standard library, what remains of a file
without its functions, or one task of the `skills` generator in plain form. Documents
of the held-out part, by the same hash as in the embedded data sets, go to the other
list.
"""

from __future__ import annotations

import ast
import pathlib
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from clusterjax.data.builtin import skills, splits, stdlib_functions

# Left out: tests, copies of other projects, and tables that are not prose or code.
SKIPPED = frozenset(
    {"__pycache__", "test", "tests", "idle_test", "site-packages", "dist-packages"}
    | {"ensurepip", "turtledemo", "pydoc_data", "lib-dynload", "encodings"}
    | {"entities", "__phello__"}
)
MIN_DOCUMENT_CHARS = 20
SKILL_SEED = 1_000_003


class PretrainingText(NamedTuple):
    """Documents for training, and the held-out ones by kind."""

    train: list[str]
    heldout_stdlib: list[str]
    heldout_skills: list[str]


def collect(
    root: pathlib.Path, num_skills: int, other_roots: Sequence[pathlib.Path] = ()
) -> PretrainingText:
    """Builds the documents.

    Args:
      root: folder of a standard library.
      other_roots: libraries of other Python versions, whose held-out bodies are kept
        out of the training documents too (a function may have moved in between).
      num_skills: tasks to generate; with equal families, without rewordings, and with
        another seed than any data set has by default.

    Returns:
      The documents. No training document holds a held-out function, nor (whitespace
      and case apart) a function with the body of one.
    """
    modules = list(stdlib_functions.source_files(root, SKIPPED))
    heldout_bodies = _heldout_bodies(modules)
    for other in other_roots:
        others = list(stdlib_functions.source_files(other, SKIPPED))
        heldout_bodies |= _heldout_bodies(others)
    train: list[str] = []
    heldout: list[str] = []
    for module, text, tree in modules:
        kept, cut = _documents(module, text, tree, heldout_bodies)
        train += kept
        heldout += cut
    tasks = splits.split(
        skills.generate(
            num_skills, SKILL_SEED, zipf_exponent=0.0, near_duplicate_rate=0.0
        ),
        skills.fingerprints,
    )
    train += [_plain(example) for example in tasks["train"]]
    heldout = list(dict.fromkeys(heldout))
    return PretrainingText(train, heldout, [_plain(e) for e in tasks["heldout"]])


def _plain(example: splits.Example) -> str:
    return f"{example.instruction}\n{example.response}\n"


def _heldout_bodies(modules: list[tuple[str, str, ast.Module]]) -> set[str]:
    bodies = set()
    for module, text, tree in modules:
        lines = text.split("\n")
        for item in stdlib_functions.definitions(module, tree):
            if splits.is_heldout(item.key):
                body = stdlib_functions.body_text(lines, item.node)
                if len(body.splitlines()) >= stdlib_functions.MIN_BODY_LINES:
                    bodies.add(splits.normalise(body))
    return bodies


def _documents(
    module: str, text: str, tree: ast.Module, heldout_bodies: set[str]
) -> tuple[list[str], list[str]]:
    """(training documents, held-out documents) of one file, in file order."""
    lines = text.split("\n")
    train: list[str] = []
    heldout: list[str] = []
    remaining = list(lines)
    for item in stdlib_functions.definitions(module, tree):
        start, stop = item.first_line - 1, item.node.end_lineno or item.first_line
        document = textwrap.dedent("\n".join(lines[start:stop])) + "\n"
        remaining[start:stop] = [""] * (stop - start)
        if splits.is_heldout(item.key):
            heldout.append(document)
            continue
        body = splits.normalise(stdlib_functions.body_text(lines, item.node))
        if body not in heldout_bodies:
            train.append(document)
    rest = _squeeze(remaining)
    documents = [rest, *train]
    return [d for d in documents if len(d) >= MIN_DOCUMENT_CHARS], heldout


def _squeeze(lines: list[str]) -> str:
    """The lines with every run of empty ones reduced to one."""
    kept = [
        line
        for line, before in zip(lines, ["", *lines], strict=False)
        if line.strip() or before.strip()
    ]
    return "\n".join(kept).strip("\n") + "\n"

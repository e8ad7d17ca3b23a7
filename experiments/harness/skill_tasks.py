"""Offline tasks for the harness, from the held-out part of the embedded `skills`.

    python -m experiments.harness.skill_tasks    # writes offline/skills.jsonl again

Each row is an instruction with its exact answer and three wrong ones: answers to other
instructions of the same family, so that form alone does not tell the right one.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
from typing import Any

import numpy as np

from clusterjax import files
from clusterjax.data import builtin

FOLDER = pathlib.Path(__file__).parent / "offline"
FILE = FOLDER / "skills.jsonl"
_CHOICES = 4
_PER_FAMILY = 6


def rows() -> list[dict[str, Any]]:
    """The tasks, at most six of a family, in order of the data set."""
    with tempfile.TemporaryDirectory() as folder:
        made = builtin.prepare("skills", folder)
        splits = {
            split: [
                {key: text.decode() for key, text in row.items()}
                for row in made.as_data_source(split)  # pyright: ignore[reportCallIssue]
            ]
            for split in ("train", "heldout")
        }
    answers: dict[str, list[str]] = {}
    for row in splits["train"]:
        answers.setdefault(row["family"], []).append(row["response"])
    rng = np.random.default_rng(0)
    result, taken = [], dict.fromkeys(answers, 0)
    for row in splits["heldout"]:
        others = sorted(set(answers[row["family"]]) - {row["response"]})
        if taken[row["family"]] == _PER_FAMILY or len(others) < _CHOICES - 1:
            continue
        taken[row["family"]] += 1
        wrong = rng.choice(len(others), _CHOICES - 1, replace=False)
        place = int(rng.integers(_CHOICES))
        choices = [others[i] for i in wrong]
        choices.insert(place, row["response"])
        result.append(
            {
                "instruction": row["instruction"],
                "answer": row["response"],
                "choices": choices,
                "place": place,
                "family": row["family"],
            }
        )
    return result


def text() -> str:
    """The rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows())


if __name__ == "__main__":
    files.write_text(FILE, text())

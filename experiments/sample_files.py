"""Writes the embedded sets as files in the layouts that people have.

python -m experiments.sample_files --out runs/samples

`alpaca.jsonl` holds short tasks with instruction, input and output; `messages.jsonl`
holds functions as chats with a system turn. To try the data part, or to see which form
own files should take.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from absl import app, flags

from clusterjax.data import builtin

_OUT = flags.DEFINE_string("out", None, "folder for the files", required=True)
_COUNT = flags.DEFINE_integer("count", 500, "rows of each file")
_CACHE = flags.DEFINE_string("builtin_dir", "runs/builtin", "folder of built-in sets")

SYSTEM = "You complete Python functions. Answer with the body alone."


def records(name: str, folder: str, **settings: Any) -> Iterator[dict[str, str]]:
    """Rows of the training split of a built-in set."""
    builder = builtin.prepare(name, folder, **settings)
    for record in builder.as_data_source("train"):  # pyright: ignore[reportCallIssue]
        yield {column: value.decode() for column, value in record.items()}


def alpaca(record: dict[str, str]) -> dict[str, str]:
    """An Alpaca row; what follows the first colon of a task is its input."""
    instruction, colon, given = record["instruction"].partition(": ")
    return {
        "instruction": instruction + colon.strip(),
        "input": given,
        "output": record["response"],
    }


def messages(record: dict[str, str]) -> dict[str, Any]:
    """A chat in OpenAI's form."""
    turns = (
        ("system", SYSTEM),
        ("user", record["instruction"]),
        ("assistant", record["response"]),
    )
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def write(path: pathlib.Path, rows: Iterable[dict[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf8")
    print(f"{path}: {len(lines):,} rows")


def main(argv: list[str]) -> None:
    del argv
    folder, count = pathlib.Path(_OUT.value), _COUNT.value
    tasks = list(records("skills", _CACHE.value))
    functions = list(records("stdlib_functions", _CACHE.value))
    # Evenly over the sets, which are ordered by family and module.
    write(folder / "alpaca.jsonl", map(alpaca, tasks[:: max(len(tasks) // count, 1)]))
    chosen = functions[:: max(len(functions) // count, 1)]
    write(folder / "messages.jsonl", map(messages, chosen))


if __name__ == "__main__":
    app.run(main)

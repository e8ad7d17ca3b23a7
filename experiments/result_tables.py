"""Saved results as Markdown: the parts that documentation shows between markers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clusterjax import errors
from experiments import comparison, machine, published, reaching
from experiments.bench import record

PARTS = ("main", "balance", "all", "reach", "mechanism", "caption", "made")


def render(
    path: str | os.PathLike[str],
    part: str,
    *,
    methods: Sequence[str] = (),
    columns: Sequence[str] = (),
    against: Sequence[str] = (),
) -> str:
    """Markdown of one part of a saved result.

    Args:
      path: a published comparison or the record of a benchmark.
      part: of a comparison: `main` (quality and time), `balance` (the other columns),
        `all`, `reach` (the loss of full training), `mechanism`, `caption`, or `made`
        (command, versions, machine); of a benchmark: the name of a table, or `made`.
      methods: rows of these methods only, in this order; () = all.
      columns: these columns only, besides the first; () = those of the part.
      against: the methods that differences are taken to instead of `full` and `random`,
        one or both; their names stand in the heads.

    Raises:
      errors.UserError: something named does not exist; what does is listed.
    """
    value = published.read(path)
    if isinstance(value, Mapping) and value.get("kind") == record.KIND:
        if part == "made":
            return made(value)
        table = record.table(value, part)
        heads, rows = table.heads, table.texts()
    else:
        result = published.read_comparison(path)
        if part == "caption":
            return comparison.caption(result)
        if part == "made":
            return made(value)
        heads, rows = _comparison_table(_against(result, against), part)
    rows = _chosen_rows(rows, methods)
    return markdown(*_chosen_columns(heads, rows, columns))


def cell(path: str | os.PathLike[str], part: str, method: str, column: str) -> str:
    """The text of one cell; see `render`."""
    text = render(path, part, methods=[method], columns=[column])
    return text.splitlines()[-1].split(" | ")[-1].removesuffix(" |")


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns in which some cell begins with a number lean right."""

    def is_number(column: int) -> bool:
        texts = [row[column].lstrip("+−") for row in rows]
        return column > 0 and any(text[:1].isdigit() for text in texts)

    rule = ["---:" if is_number(i) else "---" for i in range(len(heads))]
    lines = [heads, rule, *rows]
    body = [" | ".join(text.replace("|", "\\|") for text in line) for line in lines]
    body[1] = body[1].replace(" ", "")
    return "\n".join(
        f"|{line}|" if i == 1 else f"| {line} |" for i, line in enumerate(body)
    )


def made(value: Mapping[str, Any]) -> str:
    """How a saved result was made, as one Markdown sentence."""
    try:
        where = machine.sentence(value["machine"], value["versions"])
        text = f"Made by `{value['command']}` on {where}"
    except (KeyError, TypeError) as error:
        raise errors.UserError(
            f"the saved result does not say how it was made ({error}); publish it with"
            " experiments.publish"
        ) from error
    revisions = value.get("revisions") or []
    if revisions:
        text += f"; revision {', '.join(revisions)}"
    if "load" in value:
        text += f"; mean load of the last 15 minutes {value['load']:.1f}"
    return text + "."


def _against(
    result: comparison.Comparison, methods: Sequence[str]
) -> comparison.Comparison:
    """The same rows beside other reference methods."""
    names = {row.method for row in result.rows}
    if unknown := [method for method in methods if method not in names]:
        raise errors.UserError(
            f"no method {unknown[0]!r}; there are {', '.join(sorted(names))}"
        )
    full, random = [*methods, *(result.full, result.random)[len(methods) :]][:2]
    return dataclasses.replace(result, full=full, random=random)


def _comparison_table(
    result: comparison.Comparison, part: str
) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    if part == "mechanism":
        rows = comparison.mechanism_table(result)
        if not rows:
            raise errors.UserError("the comparison did not measure the mechanism")
        return comparison.MECHANISM_HEADS, rows
    if part == "reach":
        heads = [head.replace("full", result.full) for head in reaching.HEADS]
        return heads, reaching.table(result)
    rows = comparison.table(result)
    used = comparison.used_columns(rows)
    first = comparison.MAIN_COLUMNS
    parts: dict[str, Callable[[int], bool]] = {
        "main": lambda i: i < first,
        "balance": lambda i: i == 0 or i >= first,
        "all": lambda i: True,
    }
    if part not in parts:
        raise errors.UserError(f"no part {part!r}; there are {', '.join(PARTS)}")
    shown = [i for i in used if parts[part](i)]
    names = {"− full": f"− {result.full}", "− random": f"− {result.random}"}
    heads = [names.get(head := comparison.HEADS[i], head) for i in shown]
    return heads, [tuple(row[i] for i in shown) for row in rows]


def _chosen_rows(
    rows: Sequence[tuple[str, ...]], methods: Sequence[str]
) -> list[tuple[str, ...]]:
    names = list(dict.fromkeys(row[0] for row in rows))
    for method in methods:
        if method not in names:
            raise errors.UserError(f"no row {method!r}; there are {', '.join(names)}")
    if not methods:
        return list(rows)
    return [row for method in methods for row in rows if row[0] == method]


def _chosen_columns(
    heads: Sequence[str], rows: Sequence[tuple[str, ...]], columns: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    for column in columns:
        if column not in heads:
            raise errors.UserError(
                f"no column {column!r}; there are {', '.join(heads[1:])}"
            )
    chosen = [0, *(list(heads).index(c) for c in columns)]
    if not columns:
        chosen = list(range(len(heads)))
    return [heads[i] for i in chosen], [[row[i] for i in chosen] for row in rows]

"""Results of comparisons as small files that belong to the documentation.

A published file holds the rows, how they were made, and on which machine; folders of
the machine that ran are left out, so that it reads the same everywhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from clusterjax import errors, files
from experiments import comparison, machine, rounding

# A path from the root, but not a fraction (`a/b`) or an address (`https://…`).
_ABSOLUTE = re.compile(r"(?<![\w./:~-])/[\w.-]+/[\w./-]*")


def read_comparison(path: str | os.PathLike[str]) -> comparison.Comparison:
    """The comparison in a published file, or in the `results.json` of its runs.

    Raises:
      errors.UserError: the file is missing, or holds something else.
    """
    value = read(path)
    try:
        if isinstance(value, list):
            return comparison.Comparison([comparison.Row(**row) for row in value])
        rows = [comparison.Row(**row) for row in value["rows"]]
        return comparison.Comparison(rows, value["full"], value["random"])
    except (KeyError, TypeError) as error:
        raise errors.UserError(
            f"{path} does not hold the rows of a comparison ({error}); expected what"
            " experiments.compare or experiments.publish writes"
        ) from error


def read(path: str | os.PathLike[str]) -> Any:
    """The JSON value of a saved result.

    Raises:
      errors.UserError: there is no such file, or it is not JSON.
    """
    try:
        return files.read_json(path)
    except FileNotFoundError as error:
        raise errors.UserError(f"there is no saved result {path}") from error
    except json.JSONDecodeError as error:
        raise errors.UserError(f"{path} is not JSON: {error}") from error


def names(text: str) -> list[str]:
    """`a, b` → `["a", "b"]`; with a semicolon somewhere, names may hold commas."""
    separator = ";" if ";" in text else ","
    return [name.strip() for name in text.split(separator) if name.strip()]


def mark(path: str | os.PathLike[str]) -> str:
    """The text by which a figure names the state of the results it was drawn from."""
    digest = hashlib.blake2b(pathlib.Path(path).read_bytes(), digest_size=12)
    return f"results {digest.hexdigest()}"


def value_of(
    result: comparison.Comparison, name: str, command: str, folder: pathlib.Path
) -> dict[str, Any]:
    """What is published of a comparison.

    Args:
      result: the comparison.
      name: of the published result; run folders become `runs/<name>/<run>`.
      command: what makes the comparison again.
      folder: the folder of its runs, whose environments are read where they exist.

    Raises:
      errors.UserError: a path of this machine would stay in the text.
    """
    environments = _environments(result.rows, folder)
    packages = _common(environments, "versions")
    pythons = {str(e["python"]) for e in environments}
    value = {
        "kind": "comparison",
        "command": command,
        "machine": machine.describe(),
        "versions": {**({"python": pythons.pop()} if len(pythons) == 1 else {})}
        | packages,
        "revisions": sorted({str(e["git"]) for e in environments if e.get("git")}),
        "full": result.full,
        "random": result.random,
        "rows": [_portable(row, name) for row in result.rows],
    }
    value = rounding.rounded(value)
    check_portable(value)
    return value


def text_of(value: Mapping[str, Any]) -> str:
    """JSON with one line for each row, so that a change shows as one line."""
    parts = []
    for key, item in value.items():
        if key == "rows":
            rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in item)
            parts.append(f' "rows": [\n  {rows}\n ]')
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(item, ensure_ascii=False)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def check_portable(value: Any) -> None:
    """Raises errors.UserError where a text holds a path from the root."""
    for text in _texts(value):
        found = _ABSOLUTE.search(text)
        if found:
            raise errors.UserError(
                f"the published result would hold {found[0]!r}, a path of this machine"
                f" (in {text[:200]!r}); run the comparison with relative paths"
            )


def _portable(row: comparison.Row, name: str) -> dict[str, Any]:
    fields = dataclasses.asdict(row)
    found = re.search(r"--workdir=(\S+)/([^/\s]+)", row.command)
    run = found[2] if found else pathlib.Path(row.folder).name
    if found:
        fields["command"] = fields["command"].replace(found[1] + "/", f"runs/{name}/")
    # A worktree's absolute path to a config is the same file of this repository.
    fields["command"] = re.sub(r"=/\S*/(configs/)", r"=\1", fields["command"])
    fields["folder"] = f"runs/{name}/{run}"
    for index, point in enumerate(fields["heldout"]):
        last = index == len(fields["heldout"]) - 1
        kept = ("step", "seconds", "label_tokens", "loss", "exact_match")
        fields["heldout"][index] = {
            **{key: point[key] for key in kept if point.get(key) is not None},
            "sources": point.get("sources", {}) if last else {},
        }
    return fields


def _environments(
    rows: Sequence[comparison.Row], folder: pathlib.Path
) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        for place in (folder / pathlib.Path(row.folder).name, pathlib.Path(row.folder)):
            if (place / "environment.json").exists():
                found.append(files.read_json(place / "environment.json"))
                break
    return found


def _common(environments: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Entries that all environments share."""
    if not environments:
        return {}
    first = environments[0][key]
    return {
        name: value
        for name, value in first.items()
        if value and all(e[key].get(name) == value for e in environments)
    }


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    return []

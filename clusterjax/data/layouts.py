"""Layouts: how the columns of a row make a conversation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from clusterjax import config as config_lib
from clusterjax import errors
from clusterjax.data import json_files, rows

# The column pairs that a name stands for; the first that a row has is taken.
PAIRS = {
    "instruction_response": (
        ("instruction", "response"),
        ("problem", "solution"),
        ("question", "response"),
        ("question", "answer"),
    ),
    "alpaca": (("instruction", "output"),),
    "prompt_completion": (("prompt", "completion"),),
}
LISTS = {"messages": ("role", "content"), "conversations": ("from", "value")}
LAYOUTS = (*PAIRS, *LISTS)
SYSTEM_COLUMNS = ("system", "system_prompt")
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "developer": "system",
    **{role: role for role in ("system", "user", "assistant", "tool")},
}
_TURN_GAP = "\n\n"


@dataclasses.dataclass
class Conversation:
    """Turns in order, ending with an answer.

    Attributes:
      messages: `{"role", "content", …}` as chat templates take them; a user turn from
        the Alpaca layout also has `instruction` and `input`.
      untrained: positions of answers that carry no label.
      weight: the user's own weight, above 0.
      source: name from `source_column`, or None.
      group: name from `group_column`, or None.
      tools: descriptions of tools, handed to the template.
      notes: kinds of what was changed, for the report.
    """

    messages: list[dict[str, Any]]
    untrained: frozenset[int] = frozenset()
    weight: float = 1.0
    source: str | None = None
    group: str | None = None
    tools: list[Any] | None = None
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Layout:
    """A recognised or stated layout.

    Attributes:
      name: one of `LAYOUTS`, or `columns`.
      prompt, response, system: columns of texts, '' = none.
      turns: column of the list of turns, for `messages` and `conversations`.
      input: column of the Alpaca input, '' = none.
    """

    name: str
    prompt: str = ""
    response: str = ""
    system: str = ""
    turns: str = ""
    input: str = ""

    def columns(self) -> list[str]:
        """Names of the columns that it reads."""
        names = (self.system, self.prompt, self.input, self.response, self.turns)
        tools = ("tools",) if self.turns else ()
        return [*filter(None, names), *tools]


def find(
    config: config_lib.SourceConfig, seen: Iterable[Mapping[str, Any]], key: str
) -> Layout:
    """The layout of a source: as stated, or the one that most of `seen` rows have.

    Raises:
      errors.ConfigError: a column that `layout=columns` needs is not stated.
      errors.DataError: no row has the columns of the layout (or of any layout).
    """
    seen = list(seen)
    if config.layout == "columns":
        if not config.response_column:
            raise errors.ConfigError(
                f"{key}.layout=columns needs {key}.response_column"
            )
        candidates = [
            Layout(
                "columns",
                config.prompt_column,
                config.response_column,
                config.system_column,
            )
        ]
    elif config.layout == "auto":
        candidates = [c for name in LAYOUTS for c in _candidates(name)]
    else:
        candidates = _candidates(config.layout)
    counts = [sum(_fits(layout, row) for row in seen) for layout in candidates]
    if seen and not max(counts):
        raise errors.DataError(_no_layout(key, config, seen, candidates))
    layout = candidates[counts.index(max(counts))]
    if not layout.system and layout.name != "columns":
        columns = {name for row in seen for name in row}
        system = next((name for name in SYSTEM_COLUMNS if name in columns), "")
        layout = dataclasses.replace(layout, system=system)
    return layout


def _candidates(name: str) -> list[Layout]:
    if name in LISTS:
        columns = ("messages", "conversations", "conversation")
        own = sorted(columns, key=lambda column: column != name)
        return [Layout(name, turns=column) for column in own]
    extra = {"input": "input"} if name == "alpaca" else {}
    return [Layout(name, prompt, answer, **extra) for prompt, answer in PAIRS[name]]


def _fits(layout: Layout, row: Mapping[str, Any]) -> bool:
    if layout.turns:
        turns = row.get(layout.turns)
        if not isinstance(turns, list):
            return False
        first = next((turn for turn in turns if isinstance(turn, dict)), {})
        return all(name in first for name in LISTS[layout.name])
    return layout.response in row and (not layout.prompt or layout.prompt in row)


def _no_layout(
    key: str,
    config: config_lib.SourceConfig,
    seen: list[Mapping[str, Any]],
    candidates: list[Layout],
) -> str:
    columns = ", ".join(sorted({name for row in seen for name in row})) or "none"
    tried = "; ".join(
        f"{c.name} ({c.turns} of {'/'.join(LISTS[c.name])})"
        if c.turns
        else f"{c.name} ({', '.join(filter(None, (c.prompt, c.response)))})"
        for c in candidates
    )
    return (
        f"{key} ({config.path}) has the columns {columns}; layouts tried: {tried}."
        f" Set {key}.layout=columns with prompt_column and response_column, or rename"
    )


def convert(
    layout: Layout, config: config_lib.SourceConfig, columns: Mapping[str, Any]
) -> Conversation:
    """The conversation of a row.

    Raises:
      rows.RowError: a column is missing, null, empty or of the wrong type; there is no
        answer; the weight is zero or impossible.
    """
    weight = _weight(config, columns)
    if layout.turns:
        result = _from_turns(layout, columns)
    else:
        result = _from_pair(layout, columns)
    result.weight = weight
    result.source = _name(columns, config.source_column)
    result.group = _name(columns, config.group_column)
    return result


def _from_pair(layout: Layout, columns: Mapping[str, Any]) -> Conversation:
    user: dict[str, Any] = {"role": "user", "content": ""}
    if layout.prompt:
        user["content"] = _text(columns, layout.prompt)
    if layout.input and columns.get(layout.input):
        user["instruction"] = user["content"]
        user["input"] = _text(columns, layout.input)
        both = (user["instruction"], user["input"])
        user["content"] = _TURN_GAP.join(filter(str.strip, both))
    if layout.prompt and not user["content"].strip():
        raise rows.RowError("empty_prompt", f"column {layout.prompt!r} is empty")
    answer = _text(columns, layout.response)
    if not answer.strip():
        raise rows.RowError("empty_answer", f"column {layout.response!r} is empty")
    messages = [*_system(layout, columns), *([user] if layout.prompt else [])]
    return Conversation([*messages, {"role": "assistant", "content": answer}])


def _system(layout: Layout, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The system turn of a row, if its column holds text."""
    if not layout.system or not columns.get(layout.system):
        return []
    return [{"role": "system", "content": _text(columns, layout.system)}]


def _from_turns(layout: Layout, columns: Mapping[str, Any]) -> Conversation:
    turns = _required(columns, layout.turns)
    if not isinstance(turns, list):
        raise _wrong_type(f"column {layout.turns!r}", turns, "a list of turns")
    messages: list[dict[str, Any]] = []
    untrained: set[int] = set()
    notes: list[str] = []
    for number, turn in enumerate(turns):
        message, trained = _turn(layout, number, turn)
        last = messages[-1] if messages else None
        if last and last["role"] == message["role"] in ("user", "assistant"):
            if ((len(messages) - 1) not in untrained) != trained:
                raise rows.RowError(
                    "mixed_turns",
                    f"turns {number - 1} and {number} of one speaker"
                    " have different weights",
                )
            last["content"] += _TURN_GAP + message["content"]
            notes.append("turns_joined")
            continue
        if not trained:
            untrained.add(len(messages))
        messages.append(message)
    if not messages or messages[0]["role"] != "system":
        messages = [*(system := _system(layout, columns)), *messages]
        untrained = {i + len(system) for i in untrained}
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
        notes.append("trailing_turns_cut")
    answers = {i for i, m in enumerate(messages) if m["role"] == "assistant"}
    if not answers - untrained:
        raise rows.RowError("no_answer", "the conversation has no answer to learn")
    tools = columns.get("tools")
    tools = tools if isinstance(tools, list) and tools else None
    return Conversation(messages, frozenset(untrained), tools=tools, notes=tuple(notes))


def _turn(layout: Layout, number: int, turn: Any) -> tuple[dict[str, Any], bool]:
    """(message, whether it is trained on) of one turn."""
    if not isinstance(turn, dict):
        raise _wrong_type(f"turn {number}", turn, "an object")
    role_name, content_name = LISTS[layout.name]
    role = turn.get(role_name)
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise rows.RowError(
            "unknown_role",
            f"turn {number}: {role_name}={role!r} is none of {', '.join(ROLES)}",
        )
    role = ROLES[role.lower()]
    message = {
        name: value
        for name, value in turn.items()
        if name not in (role_name, content_name, "weight") and value is not None
    }
    content = turn.get(content_name)
    if content is None and message.get("tool_calls"):
        content = ""
    elif content is None:
        raise rows.RowError("null_field", f"turn {number} has no {content_name!r}")
    content = _content(content, f"turn {number}")
    if not content.strip() and not message.get("tool_calls"):
        kind = "empty_answer" if role == "assistant" else "empty_prompt"
        raise rows.RowError(kind, f"turn {number} ({role}) is empty")
    trained = turn.get("weight") not in (0, 0.0, False) or turn.get("weight") is None
    return message | {"role": role, "content": content}, trained


def _content(value: Any, where: str) -> str:
    """Text of a turn: a string, or a list of text parts."""
    if isinstance(value, list):
        parts = []
        for part in value:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise rows.RowError("not_text", f"{where} holds a part that is no text")
            parts.append(part["text"])
        value = "".join(parts)
    return checked_text(value, where)


def _text(columns: Mapping[str, Any], name: str) -> str:
    return checked_text(_required(columns, name), f"column {name!r}")


def _required(columns: Mapping[str, Any], name: str) -> Any:
    if name not in columns:
        found = ", ".join(columns) or "none"
        raise rows.RowError("missing_column", f"no column {name!r} (found: {found})")
    if columns[name] is None:
        raise rows.RowError("null_field", f"column {name!r} is null")
    return columns[name]


def checked_text(value: Any, where: str) -> str:
    """`value` if it is text that a tokenizer can take.

    Raises:
      rows.RowError: another type, a NUL character, or half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise _wrong_type(where, value, "text")
    if "\0" in value:
        raise rows.RowError("nul_character", f"{where} has a NUL character")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise rows.RowError(
                "invalid_unicode",
                f"{where} has half of a surrogate pair at character {error.start}",
            ) from error
    return value


def _wrong_type(where: str, value: Any, expected: str) -> rows.RowError:
    found = json_files.describe(value)
    return rows.RowError("wrong_type", f"{where} is {found}; expected {expected}")


def _weight(config: config_lib.SourceConfig, columns: Mapping[str, Any]) -> float:
    if not config.weight_column:
        return 1.0
    value = _required(columns, config.weight_column)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong_type(f"column {config.weight_column!r}", value, "a number")
    if value == 0:
        raise rows.RowError("zero_weight", "the weight is 0")
    if not 1e-30 < value < 1e30 or math.isnan(value):
        raise rows.RowError(
            "bad_weight", f"the weight is {value!r}; expected 0 or 1e-30 to 1e30"
        )
    return float(value)


def _name(columns: Mapping[str, Any], column: str) -> str | None:
    if not column:
        return None
    value = _required(columns, column)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise _wrong_type(f"column {column!r}", value, "text or a whole number")
    return checked_text(str(value), f"column {column!r}")

"""Chat templates: a conversation becomes a text and the spans that are learnt.

Templates are jinja sources, the tokenizer's own or one of `templates/`, and run in a
sandbox without access to Python objects. Spans come from the template's generation
marks where it has them, else from what the text gains by each answer.
"""

from __future__ import annotations

import datetime
import importlib.resources
import json
import os
import re
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from etils import epath

from clusterjax import errors, files
from clusterjax.data import layouts, rows
from clusterjax.data import tokenizer as tokenizer_lib

# "Now" in templates: the date that those of Llama 3 fall back to. With the real one a
# corpus would depend on the day on which it is made.
TEMPLATE_DATE = datetime.datetime(2024, 7, 26)
NAMES = ("chatml", "magicoder", "alpaca", "plain")
FALLBACK = "plain"

# Halves of surrogate pairs: no text that a row may hold contains them.
_OPEN, _CLOSE = "\ud800", "\ud801"
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}]")
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Rendered(NamedTuple):
    """A conversation as text.

    Attributes:
      text: all of it, special tokens spelled out.
      spans: (first, end) characters of each learnt part, in order.
      num_unwritten: answers that the template shortens (templates drop the reasoning
        of earlier turns); they carry no label, or the model would learn to skip it.
    """

    text: str
    spans: list[tuple[int, int]]
    num_unwritten: int = 0


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` around what the model writes."""

    tags = {"generation"}  # noqa: RUF012 (jinja's interface)

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Unlike jinja's own filter: no HTML escapes.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    return environment


class ChatTemplate:
    """A compiled template.

    Attributes:
      name: `tokenizer`, one of `NAMES`, or a path.
      source: its text.
      has_marks: whether it marks what is learnt.
      fingerprint: hash of the text.
      eos_token: the tokenizer's end token as text.
    """

    def __init__(
        self, source: str, name: str, tokenizer: tokenizer_lib.Tokenizer
    ) -> None:
        """Compiles `source`.

        Raises:
          errors.DataError: the template is not valid jinja; names the line.
        """
        self.name, self.source = name, source
        self.has_marks = bool(_GENERATION_TAG.search(source))
        self.fingerprint = files.hash_arrays(source)
        self.eos_token = tokenizer.eos_token
        self._tokens = {
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
        }
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise errors.DataError(
                f"chat template {name}, line {error.lineno}: {error.message}"
            ) from error
        # A chain of dictionaries by default, which every rendering would walk.
        self._template.globals = dict(self._template.globals)

    def text(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: list[Any] | None = None,
    ) -> str:
        """The conversation as text, without marks.

        Raises:
          rows.RowError: the template refuses it.
        """
        marked = self._render(messages, add_generation_prompt, tools)
        return _MARKS.sub("", marked) if self.has_marks else marked

    def render(self, conversation: layouts.Conversation) -> Rendered:
        """The text and what is learnt of it.

        Raises:
          rows.RowError: the template refuses the conversation, leaves a turn out, or
            an answer can't be found in the text.
        """
        messages = conversation.messages
        marked = self._render(messages, False, conversation.tools)
        spans: list[tuple[int, int] | None]
        if self.has_marks:
            text, spans = _split_marks(marked)
        else:
            text, spans = marked, []
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if not spans:
            spans = _PrefixSpans(self, conversation, text).find(answers)
        if conversation.untrained:
            if len(spans) != len(answers):
                raise rows.RowError(
                    "template_error",
                    f"template {self.name} marks {len(spans)} parts for {len(answers)}"
                    " answers, so an answer of weight 0 can't be told apart",
                )
            pairs = zip(answers, spans)
            spans = [span for i, span in pairs if i not in conversation.untrained]
        _check_turns(self.name, messages, text)
        written = [span for span in spans if span is not None]
        if spans and not written:
            raise rows.RowError(
                "answer_not_rendered", f"template {self.name} does not write the answer"
            )
        learnt = [span for span in written if span[0] < span[1]]
        return Rendered(text, learnt, len(spans) - len(written))

    def _render(
        self, messages: list[dict[str, Any]], prompt: bool, tools: list[Any] | None
    ) -> str:
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=prompt,
                tools=tools,
                **self._tokens,
            )
        except Exception as error:  # a template is foreign code
            raise rows.RowError(
                "template_error", f"template {self.name}: {error}"
            ) from error


def _split_marks(marked: str) -> tuple[str, list[tuple[int, int] | None]]:
    """(text without marks, the spans that they enclosed)."""
    pieces: list[str] = []
    spans: list[tuple[int, int] | None] = []
    length = 0
    for piece in marked.split(_OPEN):
        inside, mark, outside = piece.partition(_CLOSE)
        if mark:
            spans.append((length, length + len(inside)))
        pieces += [inside, outside]
        length += len(inside) + len(outside)
    return "".join(pieces), spans


class _PrefixSpans:
    """Spans of the answers in a text whose template has no marks."""

    def __init__(
        self, template: ChatTemplate, conversation: layouts.Conversation, text: str
    ):
        self._template, self._text = template, text
        self._messages, self._tools = conversation.messages, conversation.tools

    def find(self, answers: list[int]) -> list[tuple[int, int] | None]:
        """The span of each answer; None where the text does not hold it whole."""
        spans: list[tuple[int, int] | None] = []
        seen = 0
        for i in answers:
            start = self._start(i, seen)
            end = None if start is None else self._end(i, start)
            if start is None or end is None:
                spans.append(None)
            else:
                spans.append((start, end))
                seen = end
        return spans

    def _start(self, i: int, seen: int) -> int | None:
        """First character that the model writes for answer `i`."""
        before = self._prefix(i, prompt=False)
        opened = self._prefix(i, prompt=True)
        if opened is not None and opened != before:
            return opened
        # The template has no opening of its own: a header before the answer, like
        # "ASSISTANT: ", is what precedes its text.
        at = self._text.find(self._content(i), max(seen, before or 0))
        if at < 0:
            return None
        if before is not None and not self._text[before:at].strip():
            return before
        return at

    def _end(self, i: int, start: int) -> int | None:
        """End of answer `i` with its end token, without blanks after that."""
        at = self._text.find(self._content(i), start)
        after = self._following(i)
        if at < 0 or (after is not None and after < at):
            return None
        if after is None and self._text[start:at].strip():
            return None  # found in a later turn, perhaps
        bare = at + len(self._content(i))
        if after is None or after < bare:
            eos = self._template.eos_token
            return bare + len(eos) * self._text.startswith(eos, bare)
        tail = self._text[bare:after].rstrip()
        return bare + len(tail) if tail else after

    def _following(self, i: int) -> int | None:
        """Where the text of what follows answer `i` begins, if that can be told."""
        if i + 1 == len(self._messages):
            return len(self._text)
        return self._prefix(i + 1, prompt=False)

    def _content(self, i: int) -> str:
        return self._messages[i]["content"].strip()

    def _prefix(self, count: int, *, prompt: bool) -> int | None:
        """Length of the text of the first `count` turns if it begins the whole."""
        try:
            prefix = self._template.text(
                self._messages[:count], add_generation_prompt=prompt, tools=self._tools
            )
        except rows.RowError:  # many templates refuse some beginnings
            return None
        return len(prefix) if self._text.startswith(prefix) else None


def _check_turns(name: str, messages: list[dict[str, Any]], text: str) -> None:
    """Raises when the template left out a turn without a word."""
    for i, message in enumerate(messages):
        content = message["content"].strip()
        if message["role"] != "assistant" and content and content not in text:
            parts = (message.get("instruction", ""), message.get("input", ""))
            if not any(parts) or not all(part.strip() in text for part in parts):
                raise rows.RowError(
                    "turn_not_rendered",
                    f"template {name} leaves out turn {i} ({message['role']})",
                )


def load(choice: str, tokenizer: tokenizer_lib.Tokenizer) -> ChatTemplate:
    """The template that `data.template` names.

    Args:
      choice: `auto` (the tokenizer's own, else `plain`), one of `NAMES`, or the path of
        a jinja file.
      tokenizer: for its own template and its special tokens.

    Raises:
      errors.ConfigError: no such template.
    """
    if choice == "auto":
        if tokenizer.chat_template is not None:
            return ChatTemplate(tokenizer.chat_template, "tokenizer", tokenizer)
        choice = FALLBACK
    if choice in NAMES:
        folder = importlib.resources.files("clusterjax.data") / "templates"
        source = (folder / f"{choice}.jinja").read_text(encoding="utf8")
        return ChatTemplate(source, choice, tokenizer)
    path = epath.Path(os.path.expanduser(choice))
    if not path.is_file():
        raise errors.ConfigError(
            f"data.template={choice!r} is neither auto, one of {', '.join(NAMES)}, nor"
            " a jinja file"
        )
    try:
        return ChatTemplate(path.read_text(), choice, tokenizer)
    except UnicodeDecodeError as error:
        raise errors.DataError(f"data.template={choice} is not UTF-8") from error

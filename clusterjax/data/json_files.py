"""JSON lines and JSON arrays, row by row, whatever the damage."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from typing import IO, Any

from clusterjax import errors
from clusterjax.data import rows

_CHUNK_BYTES = 1 << 20
_BOMS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
_BLANK = " \t\r\n"


class Parser:
    """Strict JSON: no NaN, no key twice in an object, no unbounded numbers.

    Python's own reader lets the second of two equal keys win, which loses text.
    """

    def __init__(self):
        self._problems: list[str] = []
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._object,
            parse_constant=self._constant,
            parse_int=self._int,
        )

    def decode(self, text: str, start: int) -> tuple[Any, int, str]:
        """(value, end, problem) of the value at `start`; problem is '' if none.

        Raises:
          ValueError, RecursionError: there is no JSON value at `start`.
        """
        self._problems.clear()
        value, end = self._decoder.raw_decode(text, start)
        return value, end, "; ".join(self._problems[:1])

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            self._problems.append(f"key {twice!r} comes twice in one object")
        return result

    def _constant(self, name: str) -> None:
        self._problems.append(f"{name} is not JSON")

    def _int(self, digits: str) -> int:
        try:
            return int(digits)
        except ValueError:
            self._problems.append(f"number of {len(digits)} digits")
            return 0


def read(
    file: IO[bytes], name: str, max_bytes: int, blank: Callable[[], None] = lambda: None
) -> Iterator[rows.Row]:
    """The rows of JSON lines or of one JSON array, told apart by the first character.

    Args:
      file: opened for reading bytes, at its start.
      name: its name in errors.
      max_bytes: longest line (or element of an array), in bytes.
      blank: called for every blank line of JSON lines, which is no row.

    Yields:
      Rows, `index` from 0 in this file: the line minus one, or the element.

    Raises:
      errors.DataError: UTF-16, or an array whose end can't be found.
    """
    head = file.read(_CHUNK_BYTES)
    for bom, encoding in _BOMS.items():
        if head.startswith(bom):
            raise errors.DataError(f"{name} is {encoding} text; save it as UTF-8")
    head = head.removeprefix(codecs.BOM_UTF8)
    while not head.strip() and (more := file.read(_CHUNK_BYTES)):
        head += more  # a long run of blanks hides the first character
    if head.lstrip()[:1] == b"[" and name.removesuffix(".gz").endswith(".json"):
        yield from _array(_Buffer(file, head, name, max_bytes))
    else:
        yield from _lines(file, head, max_bytes, blank)


def _lines(
    file: IO[bytes], head: bytes, max_bytes: int, blank: Callable[[], None]
) -> Iterator[rows.Row]:
    parser = Parser()
    for index, (line, size) in enumerate(_split(file, head, max_bytes)):
        if size > max_bytes:
            cause = f"line of {size:,} bytes is longer than data.max_line_bytes"
            yield rows.Row(index, None, f"{cause}={max_bytes:,}", "line_too_long")
        elif not line.strip():
            blank()
        else:
            yield _parse_line(parser, index, line)


def _split(file: IO[bytes], head: bytes, max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """(line, its bytes) at line feeds; of a line over the limit only its start."""
    begin, size = b"", 0  # what was seen of an unfinished line
    chunk = head
    while chunk:
        pieces = chunk.split(b"\n")
        for piece in pieces[:-1]:
            yield begin + piece, size + len(piece)
            begin, size = b"", 0
        size += len(pieces[-1])
        if size <= max_bytes:
            begin += pieces[-1]
        chunk = file.read(_CHUNK_BYTES)
    if size:
        yield begin, size


def _parse_line(parser: Parser, index: int, line: bytes) -> rows.Row:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        cause = f"not UTF-8 at byte {error.start + 1} of the line"
        return rows.Row(index, None, cause, "invalid_utf8")
    if b"\0" in line:
        cause = f"NUL byte at column {line.index(0) + 1}"
        return rows.Row(index, None, cause, "nul_byte")
    start = len(text) - len(text.lstrip(_BLANK))
    try:
        value, end, problem = parser.decode(text, start)
    except json.JSONDecodeError as error:
        cause = f"not JSON: {error.msg} at column {error.pos + 1}"
        return rows.Row(index, None, cause, "invalid_json")
    except RecursionError:
        return rows.Row(index, None, "nested too deeply", "invalid_json")
    if text[end:].strip(_BLANK):
        problem = f"text after the end of the object at column {end + 1}"
    return _row(index, value, problem)


def _row(index: int, value: Any, problem: str) -> rows.Row:
    if problem:
        return rows.Row(index, None, f"not JSON: {problem}", "invalid_json")
    if not isinstance(value, dict):
        cause = f"is {describe(value)}; expected an object with named columns"
        return rows.Row(index, None, cause, "not_an_object")
    return rows.Row(index, value)


def describe(value: Any) -> str:
    """The kind of a value in JSON's words, for errors."""
    kinds: dict[type, str] = {
        type(None): "null",
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return kinds.get(type(value), type(value).__name__)


class _Buffer:
    """Text of an array, from the element that is being read on."""

    def __init__(self, file: IO[bytes], head: bytes, name: str, max_bytes: int):
        self._file, self.name, self.max_bytes = file, name, max_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._line = 1
        self.text, self.pos, self.at_end = "", 0, False
        self._feed(head)

    def grow(self) -> bool:
        """Reads on, as much as is there already; False at the end of the file."""
        if self.at_end:
            return False
        self._line += self.text.count("\n", 0, self.pos)
        self.text, self.pos = self.text[self.pos :], 0
        self._feed(self._file.read(max(_CHUNK_BYTES, len(self.text))))
        return True

    def _feed(self, chunk: bytes) -> None:
        self.at_end = not chunk
        try:
            self.text += self._decoder.decode(chunk, final=self.at_end)
        except UnicodeDecodeError as error:
            raise self.error(f"not UTF-8 ({error.reason}) after this") from error

    def peek(self) -> str:
        """The next character that is not blank, '' at the end."""
        while True:
            while self.pos < len(self.text) and self.text[self.pos] in _BLANK:
                self.pos += 1
            if self.pos < len(self.text) or not self.grow():
                return self.text[self.pos : self.pos + 1]

    def error(self, problem: str) -> errors.DataError:
        line = self._line + self.text.count("\n", 0, self.pos)
        return errors.DataError(
            f"{self.name}, line {line}: {problem}; what follows in a broken array can't"
            " be counted, so on_error=skip does not help: mend it, or write one object"
            " per line (.jsonl)"
        )


def _array(buffer: _Buffer) -> Iterator[rows.Row]:
    parser, index = Parser(), 0
    buffer.peek()
    buffer.pos += 1  # the bracket
    if buffer.peek() == "]":
        buffer.pos += 1
    else:
        while True:
            yield _element(parser, buffer, index)
            index += 1
            sign = buffer.peek()
            buffer.pos += 1
            if sign == "]":
                break
            if sign != ",":
                found = repr(sign) if sign else "the end of the file"
                raise buffer.error(f"expected ',' or ']' after an element, not {found}")
            buffer.peek()
    if buffer.peek():
        raise buffer.error("text after the end of the array")


def _element(parser: Parser, buffer: _Buffer, index: int) -> rows.Row:
    while True:
        try:
            value, end, problem = parser.decode(buffer.text, buffer.pos)
            # At the very end of the buffer a number may go on in the next chunk.
            if end < len(buffer.text) or buffer.at_end:
                break
            cause = "unfinished"
        except RecursionError as error:
            raise buffer.error("nested too deeply") from error
        except json.JSONDecodeError as error:
            cause = f"element {index} is not JSON: {error.msg}"
        if len(buffer.text) - buffer.pos > buffer.max_bytes:
            raise buffer.error(
                f"{cause}; it is broken or longer than"
                f" data.max_line_bytes={buffer.max_bytes:,}"
            )
        if not buffer.grow():
            raise buffer.error(cause)
    size, buffer.pos = end - buffer.pos, end
    if size > buffer.max_bytes:
        cause = f"element of {size:,} characters is longer than data.max_line_bytes"
        return rows.Row(index, None, cause, "line_too_long")
    return _row(index, value, problem)

"""The text of an optimised HLO program, as computations of instructions."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

_BITS = {"pred": 8, "token": 0, "opaque": 0, "s2": 2, "u2": 2, "s4": 4, "u4": 4}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](\{[^{}]*\})?")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_CALLEE = re.compile(r"(calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TWO_BRANCHES = re.compile(r"(?:true|false)_computation=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @functools.cached_property
    def callees(self) -> dict[str, str]:
        """Role (calls, body, …) → computation."""
        return dict(_CALLEE.findall(self.attributes))


Computation = dict[str, Instruction]


def read(text: str) -> tuple[dict[str, Computation], str]:
    """Computations by name, and the name of the one that a run starts with.

    Raises:
      ValueError: there is no such computation.
    """
    computations: dict[str, Computation] = {}
    entry = ""
    current: Computation | None = None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = computations.setdefault(header[1], {})
            if line.startswith("ENTRY"):
                entry = header[1]
        elif current is not None:
            found = parse(line)
            if found:
                current[found.name] = found
    if not entry:
        raise ValueError("the HLO text has no ENTRY computation")
    return computations, entry


def parse(line: str) -> Instruction | None:
    """An instruction of HLO text; None for any other line."""
    found = _INSTRUCTION.match(line)
    if not found:
        return None
    rest = found[3]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    start = rest.find("(")
    if start < 0:
        return None
    opcode, close = rest[:start], _closing(rest, start)
    inner, attributes = rest[start + 1 : close], rest[close + 1 :]
    operands = tuple(re.findall(r"%([\w.\-]+)", inner))
    if opcode in ("parameter", "constant"):
        attributes = inner  # its number, its value
    return Instruction(found[2], shape, opcode, operands, attributes, bool(found[1]))


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return len(text) - 1


def num_bytes(shape: str, main_memory: bool = False) -> int:
    """Size of an array or tuple, without padding.

    Args:
      shape: HLO text, such as `(f32[8,16]{1,0}, s32[])`.
      main_memory: leave out what lies in another memory (`S(1)`: on the chip).
    """
    total = 0
    for kind, dims, layout in _SHAPE.findall(shape):
        if main_memory and re.search(r"S\([1-9]", layout):
            continue
        total += math.prod(numbers(dims)) * _bits(kind)
    return total // 8


def _bits(kind: str) -> int:
    if kind in _BITS:
        return _BITS[kind]
    found = re.search(r"\d+", kind)
    return int(found[0]) if found else 0


def numbers(text: str) -> list[int]:
    """The numbers of a list such as `8,16`."""
    return [int(size) for size in re.findall(r"\d+", text)]


def shape_dims(shape: str) -> list[int]:
    """Sizes of the (first) array of a shape."""
    found = _SHAPE.search(shape)
    return numbers(found[2]) if found else []


def group_size(attributes: str, num_devices: int) -> int:
    """Devices in a group of a collective.

    2 in all written forms: `{{0,1},{2,3}}`, `[2,2]<=[4]` and
    `mesh['a'=2,'b'=2] {'b'}`.
    """
    found = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    if found:
        return len(numbers(found[1]))
    found = re.search(r"replica_groups=\[(\d+),(\d+)\]", attributes)
    if found:
        return int(found[2])
    found = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes)
    if not found:
        return num_devices
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
    axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", found[2])
    return math.prod(int(part or sizes[name]) for name, part in axes)


def branches(item: Instruction) -> list[str]:
    """Computations that a conditional chooses from."""
    found = _BRANCHES.search(item.attributes)
    if found:
        return [name.strip().lstrip("%") for name in found[1].split(",")]
    return _TWO_BRANCHES.findall(item.attributes)

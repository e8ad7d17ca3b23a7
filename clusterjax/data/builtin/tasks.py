"""The tasks of `skills`: arguments drawn at random, answers computed.

The task itself, not its wording, is what the split and the near-duplicates go by; how
it is worded stands in `families.py`.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

_T = TypeVar("_T")

_WORDS = """
    anchor apple arrow autumn badger bakery banjo basket beacon blanket bottle bridge
    butter cabin candle canyon carpet castle cedar cellar circle clover cobalt comet
    copper cotton cradle crayon cricket curtain dagger daisy dolphin donkey dragon
    drawer eagle ember engine falcon feather fiddle finger forest fossil fountain
    galaxy garden garlic ginger glacier goblet granite guitar hammer harbour harvest
    hazel helmet hollow honey island ivory jacket jasmine jungle kettle kitten ladder
    lagoon lantern lemon lizard locket magnet mango maple marble meadow melon mirror
    monkey mosaic muffin needle nickel oasis olive orange orchard otter oyster paddle
    palace panther paper parcel parrot pebble pencil pepper pigeon pillow planet
    pocket pumpkin puzzle quarry rabbit raisin ribbon river rocket saddle salmon
    sandal scarlet shadow signal silver spider spruce stable summit sunset tailor
    temple thunder ticket timber tomato trumpet tunnel turtle valley velvet violin
    walnut water weasel willow window winter wizard yellow zebra
"""
WORDS = tuple(_WORDS.split())
_MONTHS = """
    January February March April May June July August September October November
    December
"""
MONTHS = tuple(_MONTHS.split())
_WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
WEEKDAYS = tuple(_WEEKDAYS.split())


class Draw:
    """Random choices that are the same with every version of Python and NumPy.

    Only `Generator.random` is used: the stream of its doubles is fixed by the bit
    generator, while the algorithms behind `integers` or `choice` may change.
    """

    def __init__(self, rng: np.random.Generator):
        self._rng = rng

    def integer(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return low + int(self._rng.random() * (high - low + 1))

    def choice(self, values: Sequence[_T]) -> _T:
        """One of the values."""
        return values[self.integer(0, len(values) - 1)]

    def sample(self, values: Sequence[_T], count: int) -> list[_T]:
        """`count` different positions of `values`, in random order."""
        pool = list(values)
        for i in range(count):
            j = self.integer(i, len(pool) - 1)
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]

    def integers(self, low: int, high: int, count: int) -> list[int]:
        """`count` integers from low to high, repeats possible."""
        return [self.integer(low, high) for _ in range(count)]


class Task(NamedTuple):
    """One exercise.

    Attributes:
      arguments: what tells it from the other tasks of its family.
      fields: what the wordings are filled with.
      answer: the exact answer.
    """

    arguments: tuple[object, ...]
    fields: dict[str, object]
    answer: str


def add_and_subtract(draw: Draw) -> Task:
    a, b = draw.integer(10, 999), draw.integer(10, 999)
    sign = draw.choice("+-")
    if sign == "+":
        a, b = min(a, b), max(a, b)  # one task, whichever number comes first
    value = a + b if sign == "+" else a - b
    return Task(
        (a, sign, b), {"a": a, "sign": sign, "b": b}, f"{a} {sign} {b} = {value}"
    )


def multiply(draw: Draw) -> Task:
    a, b = draw.integer(2, 12), draw.integer(11, 199)
    return Task((a, b), {"a": a, "b": b}, f"{a} × {b} = {a * b}")


def divide(draw: Draw) -> Task:
    a, b = draw.integer(20, 400), draw.integer(3, 12)
    quotient, rest = divmod(a, b)
    answer = f"{a} = {b} × {quotient} + {rest}"
    return Task((a, b), {"a": a, "b": b}, answer)


def convert_units(draw: Draw) -> Task:
    big, small, factor = draw.choice(
        (
            ("km", "m", 1000),
            ("m", "cm", 100),
            ("cm", "mm", 10),
            ("kg", "g", 1000),
            ("t", "kg", 1000),
            ("l", "ml", 1000),
            ("hours", "minutes", 60),
            ("minutes", "seconds", 60),
            ("days", "hours", 24),
            ("weeks", "days", 7),
        )
    )
    amount = draw.integer(2, 240)
    fields = {"n": amount, "big": big, "small": small}
    return Task((amount, big), fields, f"{amount} {big} = {amount * factor} {small}")


def temperature(draw: Draw) -> Task:
    celsius = 5 * draw.integer(-40, 200)
    answer = f"{celsius} °C = {celsius * 9 // 5 + 32} °F"
    return Task((celsius,), {"c": celsius}, answer)


def iso_date(draw: Draw) -> Task:
    day, year = draw.integer(1, 28), draw.integer(1900, 2099)
    month = draw.integer(1, 12)
    fields = {"day": day, "month": MONTHS[month - 1], "year": year}
    return Task((year, month, day), fields, f"{year}-{month:02d}-{day:02d}")


def add_days(draw: Draw) -> Task:
    start = datetime.date(2000, 1, 1) + datetime.timedelta(draw.integer(0, 14_000))
    count = draw.integer(2, 60)
    end = start + datetime.timedelta(count)
    answer = f"{end.isoformat()}"
    return Task((start.isoformat(), count), {"date": start, "n": count}, answer)


def weekday(draw: Draw) -> Task:
    start, count = draw.integer(0, 6), draw.integer(2, 200)
    answer = WEEKDAYS[(start + count) % 7]
    return Task((start, count), {"day": WEEKDAYS[start], "n": count}, answer)


def leap_year(draw: Draw) -> Task:
    year = draw.integer(1200, 2999)
    is_leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    answer = f"Yes, {year} is a leap year." if is_leap else f"No, {year} is not."
    return Task((year,), {"year": year}, answer)


def reverse_words(draw: Draw) -> Task:
    words = draw.sample(WORDS, draw.integer(3, 5))
    text = " ".join(words)
    return Task((text,), {"text": text}, " ".join(reversed(words)))


def reverse_letters(draw: Draw) -> Task:
    word = "".join(draw.sample(WORDS, 1)) + str(draw.integer(0, 99))
    return Task((word,), {"word": word}, word[::-1])


def change_case(draw: Draw) -> Task:
    words = draw.sample(WORDS, draw.integer(2, 4))
    kind, change = draw.choice(
        (("upper case", str.upper), ("title case", str.title), ("snake case", str))
    )
    text = " ".join(words)
    answer = "_".join(words) if kind == "snake case" else change(text)
    return Task((kind, text), {"kind": kind, "text": text}, answer)


def count_letter(draw: Draw) -> Task:
    words = " ".join(draw.sample(WORDS, 2))
    letter = draw.choice(sorted(set(words) - {" "}))
    count = words.count(letter)
    answer = f"{letter} occurs {count} time{'' if count == 1 else 's'}."
    return Task((words, letter), {"text": words, "letter": letter}, answer)


def sort_numbers(draw: Draw) -> Task:
    values = draw.sample(range(1, 100), draw.integer(4, 7))
    order = draw.choice(("ascending", "descending"))
    answer = str(sorted(values, reverse=order == "descending"))
    return Task((order, *values), {"order": order, "values": values}, answer)


def sort_words(draw: Draw) -> Task:
    words = draw.sample(WORDS, draw.integer(3, 6))
    text = ", ".join(words)
    return Task((text,), {"text": text}, ", ".join(sorted(words)))


def extremes(draw: Draw) -> Task:
    values = draw.sample(range(-50, 200), draw.integer(4, 7))
    answer = f"smallest {min(values)}, largest {max(values)}"
    return Task(tuple(values), {"values": values}, answer)


def remove_repeats(draw: Draw) -> Task:
    values = draw.integers(1, 9, draw.integer(6, 9))
    return Task(tuple(values), {"values": values}, str(list(dict.fromkeys(values))))


def filter_parity(draw: Draw) -> Task:
    values = draw.integers(1, 99, draw.integer(5, 8))
    kind = draw.choice(("even", "odd"))
    kept = [v for v in values if v % 2 == (kind == "odd")]
    return Task((kind, *values), {"kind": kind, "values": values}, str(kept))


def slice_list(draw: Draw) -> Task:
    values = draw.integers(0, 99, draw.integer(5, 8))
    start = draw.integer(0, len(values) - 3)
    stop = draw.integer(start + 1, len(values))
    fields = {"values": values, "start": start, "stop": stop}
    return Task((*values, start, stop), fields, str(values[start:stop]))


def change_base(draw: Draw) -> Task:
    number = draw.integer(3, 1023)
    base, form = draw.choice((("binary", "b"), ("hexadecimal", "x"), ("octal", "o")))
    answer = f"{number} = {number:#{form}}"
    return Task((number, base), {"n": number, "base": base}, answer)


def from_binary(draw: Draw) -> Task:
    number = draw.integer(3, 1023)
    answer = f"{number:b} = {number}"
    return Task((number,), {"digits": f"{number:b}"}, answer)


def roman(number: int) -> str:
    """Roman numeral of 1 to 3999."""
    symbols = (
        (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"),
        (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
    )  # fmt: skip
    text = ""
    for value, symbol in symbols:
        count, number = divmod(number, value)
        text += symbol * count
    return text


def roman_numeral(draw: Draw) -> Task:
    number = draw.integer(1, 2999)
    return Task((number,), {"n": number}, roman(number))


def compare(draw: Draw) -> Task:
    a, b = draw.sample(range(-999, 1000), 2)
    sign = "<" if a < b else ">"
    low, high = min(a, b), max(a, b)
    return Task((low, high), {"a": a, "b": b}, f"{a} {sign} {b}")


def boolean(draw: Draw) -> Task:
    p, q, r = (draw.choice(("True", "False")) for _ in range(3))
    first, second = draw.choice(("and", "or")), draw.choice(("and", "or"))
    negations = [draw.choice(("", "not ")) for _ in range(3)]
    left = f"{negations[0]}{p} {first} {negations[1]}{q}"
    text = f"({left}) {second} {negations[2]}{r}"
    one, two, three = (
        (value == "True") != bool(negation)
        for value, negation in zip((p, q, r), negations, strict=True)
    )
    inner = one and two if first == "and" else one or two
    value = inner and three if second == "and" else inner or three
    return Task((text,), {"text": text}, str(value))


def next_term(draw: Draw) -> Task:
    start, step = draw.integer(-50, 100), draw.choice([*range(-15, 0), *range(1, 31)])
    terms = [start + i * step for i in range(4)]
    text = ", ".join(map(str, terms))
    return Task((start, step), {"text": text}, str(start + 4 * step))

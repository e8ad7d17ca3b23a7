"""The families of `skills`: the wordings of each kind of task, by rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from clusterjax.data.builtin import tasks


class Family(NamedTuple):
    """A kind of exercise: its name, its wordings and how a task is drawn."""

    name: str
    wordings: tuple[str, ...]
    draw: Callable[[tasks.Draw], tasks.Task]


# In order of rank: the first is the most frequent. The families of rank 1 to 8 have
# task spaces of thousands, so that a long tail of rare ones stays free of repeats.
FAMILIES = (
    Family(
        "add_and_subtract",
        (
            "What is {a} {sign} {b}?",
            "Compute {a} {sign} {b}.",
            "Work out the value of {a} {sign} {b}.",
            "{a} {sign} {b} = ?",
            "Please calculate {a} {sign} {b} for me.",
        ),
        tasks.add_and_subtract,
    ),
    Family(
        "sort_numbers",
        (
            "Sort {values} in {order} order.",
            "Put these numbers into {order} order: {values}",
            "Arrange {values} so that the values are {order}.",
            "Here is a list: {values}. Return it sorted, {order}.",
        ),
        tasks.sort_numbers,
    ),
    Family(
        "convert_units",
        (
            "How many {small} are {n} {big}?",
            "Convert {n} {big} to {small}.",
            "Express {n} {big} in {small}.",
            "{n} {big} is how much in {small}?",
        ),
        tasks.convert_units,
    ),
    Family(
        "iso_date",
        (
            "Write {day} {month} {year} as an ISO date.",
            "Give the date {month} {day}, {year} in the form YYYY-MM-DD.",
            "Turn {day} {month} {year} into ISO 8601.",
            "Which ISO date is {month} {day}, {year}?",
        ),
        tasks.iso_date,
    ),
    Family(
        "sort_words",
        (
            "Sort these words alphabetically: {text}",
            "Put {text} into dictionary order.",
            "In which order does a dictionary list {text}?",
            "Arrange the words from A to Z: {text}",
        ),
        tasks.sort_words,
    ),
    Family(
        "change_base",
        (
            "Write {n} in {base}.",
            "What is the {base} form of {n}?",
            "Convert the decimal number {n} to {base}.",
            "Give the {base} literal of {n} in Python.",
        ),
        tasks.change_base,
    ),
    Family(
        "filter_parity",
        (
            "Keep the {kind} numbers of {values}.",
            "Which elements of {values} are {kind}?",
            "Filter {values}: only {kind} values, same order.",
            "List all {kind} members of {values}.",
        ),
        tasks.filter_parity,
    ),
    Family(
        "reverse_words",
        (
            "Reverse the order of the words: {text}",
            "Say the words of '{text}' from last to first.",
            "Write '{text}' with its words in opposite order.",
            "Turn the word order of this line around: {text}",
        ),
        tasks.reverse_words,
    ),
    Family(
        "multiply",
        (
            "What is {a} times {b}?",
            "Multiply {a} by {b}.",
            "Find the product of {a} and {b}.",
            "Compute {a} * {b}.",
        ),
        tasks.multiply,
    ),
    Family(
        "change_case",
        (
            "Write '{text}' in {kind}.",
            "Change this text to {kind}: {text}",
            "Give the {kind} form of: {text}",
            "Convert the phrase '{text}' to {kind}.",
        ),
        tasks.change_case,
    ),
    Family(
        "slice_list",
        (
            "For x = {values}, what is x[{start}:{stop}]?",
            "Take the slice {start}:{stop} of {values}.",
            "Evaluate {values}[{start}:{stop}].",
            "Which elements does [{start}:{stop}] pick from {values}?",
        ),
        tasks.slice_list,
    ),
    Family(
        "divide",
        (
            "Divide {a} by {b} with remainder.",
            "What are quotient and remainder of {a} divided by {b}?",
            "Do integer division: {a} over {b}.",
            "How often does {b} fit into {a}, and what is left?",
        ),
        tasks.divide,
    ),
    Family(
        "roman_numeral",
        (
            "Write {n} as a Roman numeral.",
            "What is {n} in Roman numerals?",
            "Convert {n} to Roman notation.",
            "How did the Romans write {n}?",
        ),
        tasks.roman_numeral,
    ),
    Family(
        "count_letter",
        (
            "How often does the letter {letter} occur in '{text}'?",
            "Count the letter {letter} in: {text}",
            "In the text '{text}', count every {letter}.",
            "Number of times {letter} appears in '{text}'?",
        ),
        tasks.count_letter,
    ),
    Family(
        "add_days",
        (
            "Which date is {n} days after {date}?",
            "Add {n} days to {date}.",
            "It is {date}. What is the date in {n} days?",
            "Start at {date} and go {n} days forward.",
        ),
        tasks.add_days,
    ),
    Family(
        "remove_repeats",
        (
            "Remove the repeated values from {values}.",
            "Keep the first occurrence of each value in {values}.",
            "Deduplicate {values} without changing the order.",
            "Which distinct values does {values} hold, in order of appearance?",
        ),
        tasks.remove_repeats,
    ),
    Family(
        "extremes",
        (
            "Give the smallest and the largest of {values}.",
            "What are minimum and maximum of {values}?",
            "Find both extremes of the list {values}.",
            "Between which two values do all of {values} lie?",
        ),
        tasks.extremes,
    ),
    Family(
        "boolean",
        (
            "Evaluate: {text}",
            "What does Python print for {text}?",
            "Is this true or false: {text}",
            "Find the truth value of {text}.",
        ),
        tasks.boolean,
    ),
    Family(
        "weekday",
        (
            "Today is {day}. Which weekday is it in {n} days?",
            "What day of the week comes {n} days after a {day}?",
            "Count {n} days on from {day}: which day is that?",
            "If it is {day} now, name the day {n} days later.",
        ),
        tasks.weekday,
    ),
    Family(
        "next_term",
        (
            "Continue the sequence: {text}, ...",
            "Which number follows {text}?",
            "Give the next term after {text}.",
            "{text}: what comes next?",
        ),
        tasks.next_term,
    ),
    Family(
        "from_binary",
        (
            "Which decimal number is binary {digits}?",
            "Convert 0b{digits} to decimal.",
            "Read {digits} as a binary number.",
            "What is the value of {digits} in base two?",
        ),
        tasks.from_binary,
    ),
    Family(
        "reverse_letters",
        (
            "Spell {word} backwards.",
            "Reverse the string '{word}'.",
            "Write {word} from its last character to its first.",
            "What is '{word}'[::-1]?",
        ),
        tasks.reverse_letters,
    ),
    Family(
        "temperature",
        (
            "Convert {c} °C to Fahrenheit.",
            "How many degrees Fahrenheit are {c} °C?",
            "Express {c} degrees Celsius in Fahrenheit.",
            "What does {c} °C read on a Fahrenheit scale?",
        ),
        tasks.temperature,
    ),
    Family(
        "leap_year",
        (
            "Is {year} a leap year?",
            "Does February of {year} have 29 days?",
            "Tell me whether {year} is a leap year.",
            "Leap year or not: {year}?",
        ),
        tasks.leap_year,
    ),
    Family(
        "compare",
        (
            "Put < or > between {a} and {b}.",
            "Compare the numbers {a} and {b}.",
            "Which sign is right: {a} ? {b}",
            "Is {a} smaller or larger than {b}?",
        ),
        tasks.compare,
    ),
)

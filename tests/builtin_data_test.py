"""The embedded data sets: answers, sizes, split, duplicates, and the cache."""

import ast
import collections
import datetime
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from clusterjax import errors
from clusterjax.data import builtin
from clusterjax.data.builtin import families, skills, splits, stdlib_functions, tasks

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def mined():
    return stdlib_functions.mine(stdlib_functions.library_root())


@pytest.fixture(scope="module")
def generated():
    return skills.generate(4000, seed=5, zipf_exponent=0.5, near_duplicate_rate=0.3)


# Splits


def test_split_by_hash_is_fixed():
    # By sha256sum: "key 2" begins with 0x08f2, "key 3" with 0x3d3e; a tenth is 0x1999…
    assert splits.is_heldout("textwrap.TextWrapper.wrap") == (
        int(hashlib.sha256(b"textwrap.TextWrapper.wrap").hexdigest()[:16], 16) * 10
        < 2**64
    )
    heldout = [i for i in range(200) if splits.is_heldout(f"key {i}")]
    assert heldout[:5] == [2, 10, 20, 25, 27]
    share = np.mean([splits.is_heldout(str(i)) for i in range(20_000)])
    assert abs(share - splits.HELDOUT_FRACTION) < 0.01


def test_duplicates_across_the_split_are_removed():
    def example(key, text):
        return splits.Example(key, "s", "f", text, "answer")

    keys = [f"key {i}" for i in range(40)]
    inside = next(key for key in keys if splits.is_heldout(key))
    outside = [key for key in keys if not splits.is_heldout(key)]
    parts = splits.split(
        [
            example(outside[0], "What  is\n2 + 2?"),
            example(inside, "what is 2 + 2?"),
            example(outside[1], "what is 3 + 3?"),
        ],
        lambda e: (e.instruction,),
    )
    assert [e.key for e in parts["train"]] == [outside[1]]
    assert [e.key for e in parts["heldout"]] == [inside]


# The standard library


def test_size_of_the_mined_set(mined):
    parts = splits.split(mined, stdlib_functions.fingerprints)
    assert 2400 <= sum(map(len, parts.values())) <= 3000
    assert 0.07 < len(parts["heldout"]) / len(mined) < 0.13


def test_mined_pairs_are_the_source(mined):
    """Header and body, put together, parse to the function that Python itself has."""
    wanted = {"textwrap.TextWrapper._wrap_chunks", "fnmatch.filter", "heapq.merge"}
    by_key = {e.key: e for e in mined}
    checked = 0
    for key in [*wanted, *list(by_key)[::97]]:
        if key not in by_key:
            continue
        example = by_key[key]
        header = example.instruction.partition("\n\n")[2]
        source = f"{header}\n{textwrap.indent(example.response, '    ')}"
        if "\\\n" in source or '"""' in example.response or "'''" in example.response:
            continue  # indenting changes text inside strings
        try:
            function = ast.parse(source).body[0]
        except SyntaxError:
            continue  # a header indented other than by 4
        assert isinstance(function, stdlib_functions.Function)
        assert function.name == key.rpartition(".")[2]
        assert ast.get_docstring(function)
        assert len(function.body) > 1
        checked += 1
    assert checked > 15


def test_mined_pairs_keep_the_limits(mined):
    assert len({e.key for e in mined}) == len(mined)
    assert len({splits.normalise(e.response) for e in mined}) == len(mined)
    for example in mined:
        lines = [line for line in example.response.splitlines() if line.strip()]
        assert len(lines) >= stdlib_functions.MIN_BODY_LINES
        header = example.instruction.partition("\n\n")[2]
        assert len(header) + len(example.response) <= stdlib_functions.MAX_CHARS
        assert example.source in stdlib_functions.GROUPS
        assert not example.response.startswith((" ", "\n"))


def test_mining_a_small_library(tmp_path):
    (tmp_path / "textwrap.py").write_text(
        textwrap.dedent(
            '''
            \x0c
            class Box:
                @property
                def size(self):
                    """The number of things inside."""
                    total = 0
                    for part in self.parts:
                        total += part
                    return total

                def short(self):
                    """Only one line is in the body."""
                    return 1

            def undocumented():
                a = 1
                return a

            def outer():
                """A function with another one inside."""
                def inner():
                    """This one is not an example itself."""
                    a = 1
                    return a
                return inner

            def one(): return 1
            '''
        )
    )
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "more.py").write_text((tmp_path / "textwrap.py").read_text())
    examples = stdlib_functions.mine(tmp_path)
    assert [e.key for e in examples] == ["textwrap.Box.size", "textwrap.outer"]
    assert examples[0] == splits.Example(
        key="textwrap.Box.size",
        source="text",
        family="textwrap",
        instruction="Write the body of this method of textwrap.Box:\n\n"
        '@property\ndef size(self):\n    """The number of things inside."""',
        response="total = 0\nfor part in self.parts:\n    total += part\nreturn total",
    )


def test_cap_per_group(mined):
    capped = stdlib_functions.cap_groups(mined, 50)
    sizes = collections.Counter(e.source for e in capped)
    full = collections.Counter(e.source for e in mined)
    assert sizes == {group: min(size, 50) for group, size in full.items()}
    assert capped == [e for e in mined if e in set(capped)]
    # The held-out part keeps its share.
    assert 0.05 < np.mean([splits.is_heldout(e.key) for e in capped]) < 0.16


# Skills


def _numbers(text):
    return [int(n) for n in re.findall(r"-?\d+", text)]


def _list(text):
    return json.loads(re.search(r"\[.*?\]", text).group())


def _first(pattern, text):
    return re.search(pattern, text).groups()


def _check_date(question, answer):
    digits = [int(n) for n in re.findall(r"\d+", question)]
    name = next(m for m in tasks.MONTHS if m in question)
    year = next(d for d in digits if 1900 <= d < 2100)
    day = next(d for d in digits if d < 32)
    date = datetime.datetime.strptime(f"{day} {name} {year}", "%d %B %Y")
    return answer == date.date().isoformat()


def _check_roman(question, answer):
    value = dict(I=1, V=5, X=10, L=50, C=100, D=500, M=1000)
    total = 0
    for here, following in zip(answer, answer[1:] + " "):
        bigger = value.get(following, 0) > value[here]
        total += -value[here] if bigger else value[here]
    return total == _numbers(question)[0]


def _check_case(question, answer):
    words = answer.replace("_", " ").lower().split()
    kind = _first(r"(upper|title|snake) case", question)[0]
    wanted = {
        "upper": " ".join(words).upper(),
        "title": " ".join(word.capitalize() for word in words),
        "snake": "_".join(words),
    }
    return answer == wanted[kind] and " ".join(words) in question


def _check_slice(question, answer):
    start, stop = map(int, _first(r"(\d+):(\d+)", question))
    values = _list(question.replace(f"[{start}:{stop}]", ""))
    return json.loads(answer) == [values[i] for i in range(start, stop)]


def _check_sorted_words(question, answer):
    words = answer.split(", ")
    return all(a <= b for a, b in itertools.pairwise(words)) and all(
        word in question for word in words
    )


def _check_weekday(question, answer):
    start = next(d for d in tasks.WEEKDAYS if d in question)
    # 1 January 2024 was a Monday.
    first = datetime.date(2024, 1, 1 + tasks.WEEKDAYS.index(start))
    end = first + datetime.timedelta(_numbers(question)[0])
    return answer == end.strftime("%A")


def _check_added_days(question, answer):
    date = datetime.date.fromisoformat(_first(r"(\d{4}-\d\d-\d\d)", question)[0])
    count = _numbers(question.replace(date.isoformat(), ""))[0]
    return (datetime.date.fromisoformat(answer) - date).days == count


def _check_units(question, answer):
    grams = dict(
        km=1000, m=1, cm=0.01, mm=0.001, kg=1000, g=1, t=1e6, l=1, ml=0.001,
        weeks=604800, days=86400, hours=3600, minutes=60, seconds=1,
    )  # fmt: skip
    n, big, m, small = _first(r"(\d+) (\w+) = (\d+) (\w+)", answer)
    same = abs(int(n) * grams[big] - int(m) * grams[small]) < 1e-6 * int(m)
    return same and n in question and big in question and small in question


def _check_count(question, answer):
    letter, count = _first(r"^(\w) occurs (\d+) time", answer)
    text = re.search(r"'(.*)'|: (.*)$", question)
    text = text.group(1) or text.group(2)
    return len([c for c in text if c == letter]) == int(count)


def _check_boolean(question, answer):
    text = _first(r"(\(.*\) (?:and|or) (?:not )?(?:True|False))", question)[0]
    return str(eval(text)) == answer


def _check_filter(question, answer):
    odd = "odd" in question
    return json.loads(answer) == [v for v in _list(question) if v % 2 == odd]


def _check_sort(question, answer):
    values = sorted(_list(question))
    return json.loads(answer) == (values[::-1] if "descending" in question else values)


def _check_distinct(question, answer):
    values = _list(question)
    wanted = [v for i, v in enumerate(values) if v not in values[:i]]
    return json.loads(answer) == wanted


def _check_base(question, answer):
    number, literal = _first(r"^(\d+) = (.*)$", answer)
    prefix = {"binary": "0b", "octal": "0o", "hexadecimal": "0x"}
    base = next(b for b in prefix if b in question)
    return int(number) == int(literal, 0) and literal.startswith(prefix[base])


def _check_arithmetic(question, answer):
    left, right = answer.replace("×", "*").split(" = ")
    left, right = (right, left) if "+" in right else (left, right)
    return eval(left) == int(right) and all(
        n in _numbers(question.replace("-", " ")) for n in _numbers(left)[:1]
    )


def _check_compare(question, answer):
    return eval(answer) and sorted(_numbers(question)) == sorted(_numbers(answer))


def _check_sequence(question, answer):
    terms = _numbers(question)
    steps = {b - a for a, b in zip(terms, [*terms[1:], int(answer)])}
    return len(terms) == 4 and len(steps) == 1


def _check_fahrenheit(question, answer):
    celsius, fahrenheit = _numbers(answer)
    return celsius * 9 == (fahrenheit - 32) * 5 and celsius in _numbers(question)


def _check_leap(question, answer):
    year = max(_numbers(question))
    try:
        leap = bool(datetime.date(year, 2, 29))
    except ValueError:
        leap = False
    return answer.startswith("Yes" if leap else "No")


def _check_division(question, answer):
    a, b, quotient, rest = _numbers(answer)
    return (
        a == b * quotient + rest and 0 <= rest < b and {a, b} <= set(_numbers(question))
    )


CHECKS = {
    "add_and_subtract": _check_arithmetic,
    "sort_numbers": _check_sort,
    "convert_units": _check_units,
    "iso_date": _check_date,
    "sort_words": _check_sorted_words,
    "change_base": _check_base,
    "filter_parity": _check_filter,
    "reverse_words": lambda q, a: " ".join(a.split()[::-1]) in q,
    "multiply": _check_arithmetic,
    "change_case": _check_case,
    "slice_list": _check_slice,
    "divide": _check_division,
    "roman_numeral": _check_roman,
    "count_letter": _check_count,
    "add_days": _check_added_days,
    "remove_repeats": _check_distinct,
    "extremes": lambda q, a: _numbers(a) == [min(_list(q)), max(_list(q))],
    "boolean": _check_boolean,
    "weekday": _check_weekday,
    "next_term": _check_sequence,
    "from_binary": lambda q, a: int(*a.split(" = ")[:1], 2) == int(a.split(" = ")[1]),
    "reverse_letters": lambda q, a: a[::-1] in q,
    "temperature": _check_fahrenheit,
    "leap_year": _check_leap,
    "compare": _check_compare,
}


def test_every_family_has_an_independent_check():
    assert set(CHECKS) == {family.name for family in families.FAMILIES}
    assert len(CHECKS) >= 12


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: family.name)
def test_answers_are_right(family):
    draw = tasks.Draw(np.random.default_rng(3))
    for i in range(3000):
        task = family.draw(draw)
        question = family.wordings[i % len(family.wordings)].format(**task.fields)
        assert CHECKS[family.name](question, task.answer), (question, task.answer)


def test_family_sizes_follow_zipf():
    sizes = skills.family_sizes(2000, 1.0)
    assert sizes.sum() == 2000
    assert sizes.min() >= 1
    ranks = np.arange(1, len(sizes) + 1)
    slope = np.polyfit(np.log(ranks), np.log(sizes), 1)[0]
    assert -1.05 < slope < -0.9
    assert np.ptp(skills.family_sizes(1000, 0.0)) <= 1
    counts = collections.Counter(e.family for e in skills.generate(2000))
    assert [counts[f.name] for f in families.FAMILIES] == sizes.tolist()


@pytest.mark.parametrize("rate", [0.0, 0.25, 0.6])
def test_near_duplicates_come_at_the_rate_asked_for(rate):
    examples = skills.generate(3000, near_duplicate_rate=rate)
    assert len({e.instruction for e in examples}) == 3000
    rewordings = 3000 - len({e.key for e in examples})
    assert abs(rewordings / 3000 - rate) < 0.01
    answers = collections.defaultdict(set)
    for example in examples:
        answers[example.key].add(example.response)
    assert all(len(found) == 1 for found in answers.values())


def test_no_skill_crosses_the_split(generated):
    parts = splits.split(generated, skills.fingerprints)
    for read in (lambda e: e.key, lambda e: splits.normalise(e.instruction)):
        train, heldout = ({read(e) for e in parts[name]} for name in splits.SPLITS)
        assert train and heldout and not train & heldout
    # Nothing but what crossed is gone.
    assert len(generated) - sum(map(len, parts.values())) <= 3


def test_skills_are_the_same_everywhere():
    """Recorded with Python 3.11 and 3.12 (NumPy 2.4 and 2.5)."""
    text = "\n".join("\t".join(e) for e in skills.generate(2000, seed=7))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "6e61ce1f3c74e25a"
    assert skills.generate(100, seed=1) == skills.generate(100, seed=1)
    assert skills.generate(100, seed=1) != skills.generate(100, seed=2)


def test_impossible_settings_say_what_to_change():
    with pytest.raises(errors.ConfigError, match="num_examples=10 is fewer than"):
        skills.generate(10)
    with pytest.raises(errors.ConfigError, match="near_duplicate_rate=1"):
        skills.generate(100, near_duplicate_rate=1)
    with pytest.raises(errors.ConfigError, match="family boolean has fewer than"):
        skills.generate(20_000, zipf_exponent=0.0)


# Builders


def test_prepared_set_reads_back_what_was_generated(tmp_path):
    builder = builtin.prepare("skills", tmp_path, num_examples=300, seed=3)
    parts = splits.split(skills.generate(300, seed=3), skills.fingerprints)
    for name in splits.SPLITS:
        source = builder.as_data_source(name)
        read = [
            {k: v.decode() for k, v in source[i].items()} for i in range(len(source))
        ]
        wanted = [e._asdict() for e in parts[name]]
        # TFDS shuffles by key; the set of examples is what counts.
        assert sorted(read, key=str) == sorted(
            ({k: w[k] for k in r} for r, w in zip(read, wanted)), key=str
        )


def test_prepared_set_is_made_once_and_reused(tmp_path):
    first = builtin.prepare("skills", tmp_path, num_examples=100)
    stamp = os.stat(first.data_dir).st_mtime_ns
    again = builtin.prepare("skills", tmp_path, num_examples=100)
    assert again.data_dir == first.data_dir
    assert os.stat(again.data_dir).st_mtime_ns == stamp
    other = builtin.prepare("skills", tmp_path, num_examples=100, seed=1)
    assert other.data_dir != first.data_dir


def test_wrong_names_and_settings_are_named(tmp_path):
    with pytest.raises(errors.ConfigError, match="no embedded set 'skill'"):
        builtin.prepare("skill", tmp_path)
    with pytest.raises(errors.ConfigError, match="no setting 'num_example'"):
        builtin.prepare("skills", tmp_path, num_example=3)
    with pytest.raises(errors.ConfigError, match=r"num_examples='x' must be .* int"):
        builtin.prepare("skills", tmp_path, num_examples="x")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(errors.DataError, match=r"file.*set data\.builtin_dir"):
        builtin.prepare("skills", tmp_path / "file", num_examples=60)


def _prepare(folder, num_examples):
    builder = builtin.prepare("skills", folder, num_examples=num_examples)
    return len(builder.as_data_source("train")), builder.data_dir


def test_two_processes_at_once_make_one_set(tmp_path):
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        results = pool.starmap(_prepare, [(tmp_path, 500)] * 2)
    assert results[0] == results[1]
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == [
        "skills"
    ]


def test_a_killed_writer_leaves_nothing_in_the_way(tmp_path):
    code = (
        "import time\n"
        "from clusterjax.data import builtin\n"
        "from clusterjax.data.builtin import storage\n"
        "rows = storage.rows\n"
        "def slow(examples):\n"
        "    for row in rows(examples):\n"
        "        yield row\n"
        "        if row[0] == 50: print('writing', flush=True); time.sleep(60)\n"
        "storage.rows = slow\n"
        f"builtin.prepare('skills', {str(tmp_path)!r}, num_examples=400)\n"
    )
    # The writer's standard output is muted by `prepare`, so it is watched by its files.
    writer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        unfinished = tmp_path / ".skills.unfinished"
        deadline = time.monotonic() + 60
        while not unfinished.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        assert unfinished.exists()
        with open(tmp_path / ".skills.lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert not (tmp_path / "skills").exists()
    count, folder = _prepare(tmp_path, 400)
    assert count > 300
    assert not unfinished.exists()
    assert pathlib.Path(folder).is_relative_to(tmp_path / "skills")


def test_what_lies_unfinished_is_not_taken_for_data(tmp_path):
    other = builtin.prepare("skills", tmp_path / "other", num_examples=60)
    label = pathlib.Path(other.data_dir).relative_to(tmp_path / "other")
    (tmp_path / ".skills.unfinished" / label).mkdir(parents=True)
    builder = builtin.prepare("skills", tmp_path, num_examples=60)
    assert len(builder.as_data_source("train")) > 40


def test_no_tensorflow_is_imported(tmp_path):
    code = (
        "import sys\n"
        "from clusterjax.data import builtin\n"
        f"b = builtin.prepare('skills', {str(tmp_path)!r}, num_examples=60)\n"
        "assert len(b.as_data_source('train')[0]) == 5\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

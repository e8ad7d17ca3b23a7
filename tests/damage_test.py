"""Random damage: it parses as the damaged text says, is an error, or a listed reject.

Bit flips, cuts and swapped bytes on 500 small files of each format. What a damaged
file says is read by another reader (Python's json on whole lines, pyarrow's own table
reader, the undamaged rows for the checksummed array_record).
"""

import collections
import json
import pathlib
import shutil

import data_inputs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sources_test

from clusterjax import config, data, errors

NUM_FILES = 500
ROWS = [
    *data_inputs.pairs(6),
    {"instruction": 'Quote "it" – naïve 🙂\n', "response": "\\ \t ok"},
    {"instruction": "Längere Frage: " + "wörter " * 9, "response": "Ja. " * 7},
]


def damage(content: bytes, rng: np.random.Generator) -> bytes:
    """One to three flips, cuts, or swaps."""
    changed = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        if not changed:
            break
        i, j = sorted(rng.integers(0, len(changed), 2).tolist())
        match rng.integers(5):
            case 0 | 1:
                changed[i] ^= 1 << int(rng.integers(8))
            case 2:
                changed[i], changed[j] = changed[j], changed[i]
            case 3:
                del changed[i : i + int(rng.integers(1, 20))]
            case 4:
                del changed[i:]  # the file is cut off
    return bytes(changed)


def _load(path, tok):
    """The corpus with faulty rows skipped, or the error's text."""
    entry = config.SourceConfig(path=str(path), layout="instruction_response")
    cfg = data_inputs.settings(entry, on_error="skip", drop_duplicates="none")
    try:
        return data.load(cfg, tok)
    except errors.UserError as error:
        assert len(str(error)) > 20
        return str(error)


def _usable(row) -> str | None:
    """The text of a row that can become an example, by other means than the product."""
    if not isinstance(row, dict):
        return None
    texts = [row.get("instruction"), row.get("response")]
    for text in texts:
        if not isinstance(text, str) or not text.strip() or "\0" in text:
            return None
        if any(0xD800 <= ord(c) < 0xE000 for c in text):
            return None
    return f"{texts[0]}\n{texts[1]}<|im_end|>"


def _check(corpus, rows: list, tok) -> None:
    """`rows`: what the damaged file says; None is a row that can't be read."""
    assert corpus.num_read == len(rows)
    assert data_inputs.counted(corpus, len(rows))
    found = {
        int(row): text
        for row, (text, _) in zip(corpus.row, data_inputs.texts(corpus, tok))
    }
    expected = {i: text for i, row in enumerate(rows) if (text := _usable(row))}
    # An answer may not fit beside what damage has made of the prompt: it is listed.
    assert set(found) <= set(expected)
    missing = set(expected) - set(found)
    reasons = {reject.row: reject.reason for reject in corpus.rejects}
    assert all(reasons[row] == "no_label_tokens" for row in missing)
    assert found == {row: expected[row] for row in found}


def _strict(text: str):
    def unique(pairs):
        assert len(dict(pairs)) == len(pairs), "a key twice"
        return dict(pairs)

    def refuse(name):
        raise ValueError(name)

    return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)


def _line(line: bytes):
    if b"\0" in line:
        return None
    try:
        return _strict(line.decode())
    except (ValueError, AssertionError):
        return None


@pytest.mark.filterwarnings("error")
def test_json_lines(tmp_path, rng):
    tok, seen = data_inputs.tokenizer(), collections.Counter()
    content = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in ROWS).encode()
    path = tmp_path / "rows.jsonl"
    for _ in range(NUM_FILES):
        damaged = damage(content, rng)
        path.write_bytes(damaged)
        corpus = _load(path, tok)
        lines = damaged.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        rows = [_line(line) for line in lines if line.strip()]
        if isinstance(corpus, str):
            assert not any(map(_usable, rows)), corpus
            seen["error"] += 1
        else:
            numbered = [i for i, line in enumerate(lines) if line.strip()]
            if numbered == list(range(len(rows))):  # else blank lines shift the rows
                _check(corpus, rows, tok)
            assert corpus.num_read == len(rows)
            seen["rejects"] += bool(corpus.rejects)
            seen["read"] += 1
    assert seen["rejects"] > NUM_FILES / 4 and seen["read"] > NUM_FILES / 2


@pytest.mark.filterwarnings("error")
def test_json_arrays(tmp_path, rng):
    tok, seen = data_inputs.tokenizer(), collections.Counter()
    content = json.dumps(ROWS, ensure_ascii=False, indent=1).encode()
    path = tmp_path / "rows.json"
    for _ in range(NUM_FILES):
        damaged = damage(content, rng)
        path.write_bytes(damaged)
        corpus = _load(path, tok)
        try:
            rows = json.loads(damaged.decode())
        except ValueError:
            rows = None
        if isinstance(corpus, str):
            usable = isinstance(rows, list) and any(map(_usable, rows))
            assert not usable or b"\0" in damaged, corpus
            seen["error"] += 1
        elif isinstance(rows, list):
            _check_array(corpus, rows, damaged, tok)
            seen["read"] += 1
        else:
            raise AssertionError("a broken array was read")
    assert seen["error"] > NUM_FILES / 4 and seen["read"] > NUM_FILES / 25


def _check_array(corpus, rows, damaged: bytes, tok) -> None:
    strict = []
    for row in rows:
        text = json.dumps(row)
        strict.append(row if "NaN" not in text and "Infinity" not in text else None)
    try:
        _strict(damaged.decode())
    except (ValueError, AssertionError):
        # A key twice or a NaN somewhere: that row is a listed reject.
        assert corpus.num_read == len(rows)
        assert any(r.reason == "invalid_json" for r in corpus.rejects)
        return
    _check(corpus, strict, tok)


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_parquet(tmp_path, rng, compression):
    tok, seen = data_inputs.tokenizer(), collections.Counter()
    path = tmp_path / "rows.parquet"
    pq.write_table(
        pa.Table.from_pylist(ROWS),
        path,
        compression=compression,
        row_group_size=3,
        write_page_checksum=True,
    )
    content = path.read_bytes()
    for _ in range(NUM_FILES // 2):
        damaged = damage(content, rng)
        path.write_bytes(damaged)
        corpus = _load(path, tok)
        if isinstance(corpus, str):
            seen["error"] += 1
        else:
            with pq.ParquetFile(path) as file:
                rows = file.read().to_pylist()
            _check(corpus, rows, tok)
            seen["read"] += 1
    assert seen["error"] > NUM_FILES / 4 and seen["read"] > 2


def test_tfds_array_record(tmp_path, rng):
    tok, seen = data_inputs.tokenizer(), collections.Counter()
    original = pathlib.Path(sources_test.tfds_directory(tmp_path / "whole"))
    whole = _load(original, tok)
    names = sorted(path.name for path in original.iterdir() if "test" not in path.name)
    weights = np.array([6 if "array_record" in name else 1 for name in names])
    for number in range(NUM_FILES):
        folder = tmp_path / str(number) / "1.0.0"
        shutil.copytree(original, folder)
        path = folder / rng.choice(names, p=weights / weights.sum())
        path.write_bytes(damage(path.read_bytes(), rng))
        corpus = _load(folder, tok)
        if isinstance(corpus, str):
            seen["error"] += 1
        else:
            assert data_inputs.counted(corpus, 5)
            assert data_inputs.texts(corpus, tok) == data_inputs.texts(whole, tok)
            seen["read"] += 1
        shutil.rmtree(folder)
    assert seen["error"] > NUM_FILES / 4 and seen["read"] > NUM_FILES / 25


@pytest.mark.parametrize("count", [3, 7])
def test_a_count_that_the_records_do_not_have(tmp_path, count):
    folder = pathlib.Path(sources_test.tfds_directory(tmp_path))
    path = folder / "dataset_info.json"
    path.write_text(path.read_text().replace('"5"', f'"{count}"'))
    found = _load(folder, data_inputs.tokenizer())
    assert isinstance(found, str)
    assert f"says {count}" in found and "holds 5" in found

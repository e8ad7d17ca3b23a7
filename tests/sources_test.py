"""Every kind of source gives the same rows; bad ones name file, line and cause."""

import gzip
import io
import json
import tracemalloc

import data_inputs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow_datasets as tfds

from clusterjax import config, data, errors
from clusterjax.data import json_files, sources

PAIRS = data_inputs.pairs(5)


class Pairs(tfds.core.GeneratorBasedBuilder):
    """Instruction and response."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        text = tfds.features.Text()
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {"instruction": text, "response": text}
            ),
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(), "test": self._generate_examples()}

    def _generate_examples(self):
        yield from enumerate(PAIRS)


def tfds_directory(folder) -> str:
    builder = Pairs(data_dir=folder, file_format="array_record")
    builder.download_and_prepare()
    return str(builder.data_path)


def _rows(path, **keys) -> list[dict]:
    [source] = sources.open_all(
        (config.SourceConfig(path=str(path), **keys),), config.DataConfig(), "data.s"
    )
    found = list(source.read())
    assert [row.index for row in found] == list(range(len(found)))
    return [row.columns or row.cause for row in found]


def _write(kind: str, folder) -> str:
    if kind == "tfds":
        return tfds_directory(folder)
    path = folder / f"pairs.{kind}"
    text = "".join(json.dumps(pair) + "\n" for pair in PAIRS)
    if kind in ("jsonl", "ndjson"):
        path.write_text(text)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif kind == "json":
        path.write_text(json.dumps(PAIRS, indent=2))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(PAIRS), path, row_group_size=2)
    return str(path)


KINDS = ("jsonl", "ndjson", "jsonl.gz", "json", "parquet", "tfds")


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_rows_and_corpus(kind, tmp_path):
    path = _write(kind, tmp_path)
    rows = _rows(path)
    if kind == "tfds":  # which shuffles when it writes
        assert sorted(rows, key=PAIRS.index) == PAIRS
    else:
        assert rows == PAIRS
    tok = data_inputs.tokenizer()
    entry = config.SourceConfig(path=path, name="pairs")
    corpus = data.load(data_inputs.settings(entry), tok)
    assert corpus.num_examples == 5
    assert data_inputs.texts(corpus, tok)[rows.index(PAIRS[3])] == (
        "What is 3 + 3?\nIt is 6.<|im_end|>",
        "It is 6.<|im_end|>",
    )
    reference = data_inputs.write_lines(tmp_path / "reference.jsonl", rows)
    entry = config.SourceConfig(path=str(reference), name="pairs")
    same = data.load(data_inputs.settings(entry), tok)
    assert corpus.fingerprint == same.fingerprint
    assert corpus.uid.tolist() == same.uid.tolist()


def test_globs_number_the_rows_of_all_files(tmp_path):
    """Two files of 3 and 5 rows: ids are stable and map back to the right rows."""
    data_inputs.write_lines(tmp_path / "a.jsonl", data_inputs.pairs(3))
    data_inputs.write_lines(tmp_path / "b.jsonl", data_inputs.pairs(5, start=3))
    cfg = data_inputs.settings(tmp_path / "*.jsonl")
    tok = data_inputs.tokenizer()
    corpus = data.load(cfg, tok)
    assert corpus.num_examples == 8
    assert corpus.row.tolist() == list(range(8))
    for i in (0, 2, 3, 7):
        found = data.find_row(cfg, str(corpus.uid[i]))
        name, line = ("a", i + 1) if i < 3 else ("b", i - 2)
        assert found.place.endswith(f"{name}.jsonl line {line}")
        assert found.columns == data_inputs.pairs(1, start=i)[0]
        text, _ = data_inputs.texts(corpus, tok)[i]
        assert text.startswith(found.columns["instruction"])
    again = data.load(cfg, tok)
    assert again.uid.tolist() == corpus.uid.tolist()
    longer = data_inputs.settings(
        tmp_path / "*.jsonl", max_length=64, template="chatml"
    )
    assert data.load(longer, tok).uid.tolist() == corpus.uid.tolist()


def test_an_id_of_an_edited_row_is_refused(tmp_path):
    path = data_inputs.write_lines(tmp_path / "a.jsonl", PAIRS)
    cfg = data_inputs.settings(path)
    uid = str(data.load(cfg, data_inputs.tokenizer()).uid[2])
    rows = [*PAIRS[:2], PAIRS[2] | {"response": "Four."}, *PAIRS[3:]]
    data_inputs.write_lines(path, rows)
    with pytest.raises(errors.DataError, match=r"line 3 has another text by now"):
        data.find_row(cfg, uid)
    with pytest.raises(errors.DataError, match="has no row 99"):
        data.find_row(cfg, "a:99:00000000")
    with pytest.raises(errors.DataError, match="sources a"):
        data.find_row(cfg, "b:1:00000000")


def test_splits_of_a_builder_directory(tmp_path):
    path = tfds_directory(tmp_path)
    assert _rows(path, split="test[1:3]") == _rows(path, split="test")[1:3]
    assert len(_rows(path, split="train+test")) == 10
    with pytest.raises(errors.ConfigError, match=r"splits: .*train"):
        _rows(path, split="validation")


def test_lists_of_turns_in_a_builder(tmp_path):
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]

    class Chats(tfds.core.GeneratorBasedBuilder):
        """Lists of turns."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            text = tfds.features.Text()
            turn = tfds.features.Sequence({"role": text, "content": text})
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict({"messages": turn})
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            yield 0, {"messages": turns}

    builder = Chats(data_dir=tmp_path, file_format="array_record")
    builder.download_and_prepare()
    assert _rows(builder.data_path) == [{"messages": turns}]


def test_built_in_sets_with_settings(tmp_path):
    cfg = config.DataConfig(
        sources=(config.SourceConfig(path="builtin:skills?num_examples=200&seed=3"),),
        builtin_dir=str(tmp_path),
        template="plain",
    )
    corpus = data.load(cfg, data_inputs.tokenizer())
    assert corpus.source_names == ("skills",)
    assert len(corpus.group_names) > 10
    assert corpus.group.min() >= 0
    assert 100 < corpus.num_examples <= 200
    wrong = config.SourceConfig(path="builtin:skills?colour=red")
    with pytest.raises(errors.ConfigError, match="colour"):
        data.load(
            config.DataConfig(sources=(wrong,), builtin_dir=str(tmp_path)),
            data_inputs.tokenizer(),
        )


def test_an_unknown_tfds_name():
    with pytest.raises(errors.DataError, match=r"path=tfds:no_such_set can't be"):
        _rows("tfds:no_such_set")


def test_saved_hugging_face_sets(tmp_path):
    datasets = pytest.importorskip("datasets")  # the extra `hub`
    whole = datasets.Dataset.from_list(PAIRS)
    parts = datasets.DatasetDict(train=whole, test=whole.select([4, 1]))
    parts.save_to_disk(tmp_path / "pairs")
    assert _rows(tmp_path / "pairs") == PAIRS
    assert _rows(tmp_path / "pairs", split="test") == [PAIRS[4], PAIRS[1]]
    with pytest.raises(errors.ConfigError, match="splits: train, test"):
        _rows(tmp_path / "pairs", split="dev")


# ---- lines


def _lines(content: bytes, max_bytes: int = 1000) -> list:
    found = json_files.read(io.BytesIO(content), "x.jsonl", max_bytes)
    return [row.columns if row.columns is not None else row.reason for row in found]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"a": 1}\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
        (b'{"a": 1}\r\n{"a": 2}', [{"a": 1}, {"a": 2}]),
        (b'\xef\xbb\xbf{"a": 1}\n', [{"a": 1}]),
        (b'{"a": 1}\n{"a": 2', [{"a": 1}, "invalid_json"]),
        (b'{"a": 1}\n{"a": "\x00"}\n{"a": 3}', [{"a": 1}, "nul_byte", {"a": 3}]),
        (b'{"a": "\xff"}\n{"a": 3}', ["invalid_utf8", {"a": 3}]),
        (b'{"a": "' + b"x" * 2000 + b'"}\n{"a": 3}', ["line_too_long", {"a": 3}]),
        (b'{"a": 1} {"a": 2}\n', ["invalid_json"]),
        (b'{"a": 1, "a": 2}\n', ["invalid_json"]),
        (b'{"a": {"b": 1, "b": 2}}\n', ["invalid_json"]),
        (b'{"a": NaN}\n', ["invalid_json"]),
        (b'{"a": ' + b"9" * 900 + b"}\n", [{"a": int("9" * 900)}]),
        (b'[{"a": 1}]\n', ["not_an_object"]),
        (b"3\nnull\n", ["not_an_object", "not_an_object"]),
        (b"[" * 990 + b"\n", ["invalid_json"]),
    ],
)
def test_lines(content, expected):
    assert _lines(content) == expected


def test_numbers_and_nesting_beyond_the_limits_of_python():
    assert _lines(b'{"a": ' + b"9" * 5000 + b"}\n", 10_000) == ["invalid_json"]
    assert _lines(b'{"a": ' + b"[" * 200_000 + b"\n", 400_000) == ["invalid_json"]


def test_blank_lines_are_no_rows_but_lines_are_counted_with_them(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"prompt": "a", "completion": "b"}\n  \n{"prompt": "c"\n')
    with pytest.raises(errors.DataError, match=r"a\.jsonl line 4: not JSON"):
        data.load(data_inputs.settings(path), data_inputs.tokenizer())


def test_a_line_of_megabytes_takes_no_memory(tmp_path):
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        for _ in range(60):
            file.write(b"x" * 1_000_000)
        file.write(b'\n{"a": 3}\n')
    tracemalloc.start()
    with open(path, "rb") as file:
        rows = list(json_files.read(file, "a.jsonl", 4_000_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows[0].cause == (
        "line of 60,000,000 bytes is longer than data.max_line_bytes=4,000,000"
    )
    assert rows[1].columns == {"a": 3}
    assert peak < 25_000_000


@pytest.mark.parametrize("bom", [b"\xff\xfe", b"\xfe\xff"])
def test_utf16_is_named(tmp_path, bom):
    path = tmp_path / "a.jsonl"
    path.write_bytes(bom + '{"a": 1}\n'.encode("utf-16-le"))
    with pytest.raises(errors.DataError, match="UTF-16 text; save it as UTF-8"):
        _rows(path)


# ---- arrays


def _array(content: str | bytes, max_bytes: int = 1000) -> list:
    content = content.encode() if isinstance(content, str) else content
    file = io.BytesIO(content)
    found = json_files.read(file, "x.json", max_bytes)
    return [row.columns if row.columns is not None else row.reason for row in found]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1 << 20])
def test_arrays_in_chunks_of_any_size(chunk, monkeypatch):
    monkeypatch.setattr(json_files, "_CHUNK_BYTES", chunk)
    text = ' \n[ {"a": "é🙂]"} ,{"b": [1, {"c": 22}]}, 12345, {"d":1}\n] \n'
    expected = [{"a": "é🙂]"}, {"b": [1, {"c": 22}]}, "not_an_object", {"d": 1}]
    assert _array(text) == expected
    assert _array("[]") == []
    content = text.encode()
    for cut in range(content.index(b"[") + 1, content.rindex(b"]")):
        with pytest.raises(errors.DataError, match=r"x\.json, line"):
            _array(content[:cut])


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ('[{"a": 1}\n {"a": 2}]', r"line 2: expected ',' or '\]' after an element"),
        ('[{"a": 1}] [', r"line 1: text after the end of the array"),
        ('[{"a": 1},]', r"line 1: element 1 is not JSON"),
        ('[{"a": 1}', r"line 1: expected .* not the end of the file"),
        ('[{"a": "' + "x" * 5000, r"broken or longer than data\.max_line_bytes=1,000"),
        ("[" * 100_000, "nested too deeply|not JSON"),
        (b'[{"a": "\xff"}]', "not UTF-8"),
    ],
)
def test_broken_arrays(content, match, monkeypatch):
    monkeypatch.setattr(json_files, "_CHUNK_BYTES", 512)
    with pytest.raises(errors.DataError, match=match):
        _array(content)


def test_faulty_elements_of_a_whole_array_are_rows():
    content = '[{"a": 1, "a": 2}, {"b": "' + "x" * 1500 + '"}, null, {"c": Infinity}]'
    assert _array(content) == [
        "invalid_json",
        "line_too_long",
        "not_an_object",
        "invalid_json",
    ]


def test_json_lines_in_a_file_called_json(tmp_path):
    path = data_inputs.write_lines(tmp_path / "pairs.json", PAIRS)
    assert _rows(path) == PAIRS


# ---- paths


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("nowhere.jsonl", r"nowhere\.jsonl does not exist"),
        ("*.jsonl", r"\*\.jsonl matches no file"),
        (".", r"is a directory.*say .*/\*\.json"),
        ("notes.txt", r"notes\.txt has the suffix '\.txt'; expected \.jsonl"),
        ("", r"data\.sources\[0\]\.path is empty"),
    ],
)
def test_paths_that_lead_nowhere(tmp_path, path, match):
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "a.json").write_text("[]")
    where = f"{tmp_path}/{path}" if path else ""
    with pytest.raises(errors.UserError, match=match):
        data.load(data_inputs.settings(where), data_inputs.tokenizer())


def test_names_must_differ(tmp_path):
    (tmp_path / "b").mkdir()
    first = data_inputs.write_lines(tmp_path / "a.jsonl", PAIRS)
    second = data_inputs.write_lines(tmp_path / "b" / "a.jsonl", PAIRS)
    with pytest.raises(errors.ConfigError, match=r"data\.sources\[1\]\.name"):
        data.load(data_inputs.settings(first, second), data_inputs.tokenizer())


def test_an_empty_file(tmp_path):
    full = data_inputs.write_lines(tmp_path / "a.jsonl", PAIRS)
    (tmp_path / "b.jsonl").write_bytes(b"")
    tok = data_inputs.tokenizer()
    with pytest.raises(errors.DataError, match=r"b\.jsonl is empty"):
        data.load(data_inputs.settings(tmp_path / "*.jsonl"), tok)
    cfg = data_inputs.settings(tmp_path / "*.jsonl", on_error="skip")
    folder = tmp_path / "report"
    assert data.load(cfg, tok, directory=folder).num_examples == 5
    report = json.loads((folder / "report.json").read_text())
    assert report["warnings"] == [f"{tmp_path}/b.jsonl is empty"]
    assert full.exists()


def test_a_gzip_file_cut_in_half(tmp_path):
    text = "".join(json.dumps(pair) + "\n" for pair in data_inputs.pairs(500))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode())[:1500])
    with pytest.raises(errors.DataError, match=r"a\.jsonl\.gz can't be read"):
        _rows(path)


# ---- Parquet


def test_binary_text_and_null_in_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table(
        {
            "prompt": pa.array([b"Hi", "Grüß".encode(), b"\xff"], pa.binary()),
            "completion": ["a", None, "b"],
        }
    )
    pq.write_table(table, path)
    found = _rows(path)
    assert found[0] == {"prompt": "Hi", "completion": "a"}
    assert found[1] == {"prompt": "Grüß", "completion": None}
    assert found[2] == "column 'prompt' is not UTF-8"


def test_a_text_column_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.parquet"
    raw = pa.array([b"ok", b"\xff\xfe", b"fine"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"prompt": text}), path)
    assert _rows(path) == [
        {"prompt": "ok"},
        "column 'prompt' is not UTF-8",
        {"prompt": "fine"},
    ]


def test_a_column_that_comes_twice(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], ["prompt"] * 2)
    pq.write_table(table, path)
    with pytest.raises(errors.DataError, match="two columns 'prompt'"):
        _rows(path)


def test_lists_of_turns_in_parquet(tmp_path):
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": turns, "weight": 2.5}]), path)
    tok = data_inputs.tokenizer()
    entry = config.SourceConfig(path=str(path), weight_column="weight")
    corpus = data.load(data_inputs.settings(entry, template="chatml"), tok)
    assert data_inputs.texts(corpus, tok)[0][1] == "Hello<|im_end|>"
    np.testing.assert_array_equal(corpus.user_weight, [2.5])

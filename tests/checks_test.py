"""Layouts, faulty rows, duplicates and the report: every row is accounted for."""

import json

import data_inputs
import numpy as np
import pytest

from clusterjax import config, data, errors
from clusterjax.data import layouts, rows


def _load(tmp_path, lines, *, report=False, tok=None, **keys):
    """Corpus of JSON lines; with `report` also the data report."""
    source = keys.pop("source", {})
    path = data_inputs.write_lines(tmp_path / "rows.jsonl", lines)
    entry = config.SourceConfig(path=str(path), **source)
    cfg = data_inputs.settings(entry, **keys)
    folder = tmp_path / "data"
    corpus = data.load(cfg, tok or data_inputs.tokenizer(), directory=folder)
    assert data_inputs.counted(corpus, corpus.num_read)
    found = json.loads((folder / "report.json").read_text())
    listed = (folder / "rejects.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in listed] == [
        reject.row for reject in corpus.rejects
    ]
    return (corpus, found) if report else corpus


def _convert(row: dict, layout: str = "auto", **keys) -> list[tuple[str, str]]:
    entry = config.SourceConfig(path="x.jsonl", layout=layout, **keys)
    found = layouts.find(entry, [row], "data.sources[0]")
    conversation = layouts.convert(found, entry, row)
    return [(m["role"], m["content"]) for m in conversation.messages]


HI = [("user", "Hi"), ("assistant", "Yo")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"instruction": "Hi", "response": "Yo"}, HI),
        ({"problem": "Hi", "solution": "Yo", "lang": "python"}, HI),
        ({"system_prompt": "", "question": "Hi", "response": "Yo", "id": 3}, HI),
        (
            {"system_prompt": "Be", "question": "Hi", "response": "Yo"},
            [("system", "Be"), *HI],
        ),
        ({"instruction": "Hi", "input": "", "output": "Yo"}, HI),
        ({"instruction": "Hi", "input": None, "output": "Yo"}, HI),
        ({"instruction": "Hi", "output": "Yo"}, HI),
        (
            {"instruction": "Hi", "input": "you", "output": "Yo"},
            [("user", "Hi\n\nyou"), ("assistant", "Yo")],
        ),
        ({"prompt": "Hi", "completion": "Yo"}, HI),
        (
            {
                "messages": [
                    {"role": "system", "content": "Be"},
                    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                    {"role": "assistant", "content": "Yo"},
                ]
            },
            [("system", "Be"), *HI],
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Hi"},
                    {"from": "gpt", "value": "Yo"},
                ]
            },
            HI,
        ),
        (
            {
                "conversations": [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "Yo"},
                ]
            },
            HI,
        ),
        # Two user turns in a row are joined; what follows the last answer is cut.
        (
            {
                "conversations": [
                    {"from": "human", "value": "Hi"},
                    {"from": "human", "value": "there"},
                    {"from": "gpt", "value": "Yo"},
                    {"from": "human", "value": "?"},
                ]
            },
            [("user", "Hi\n\nthere"), ("assistant", "Yo")],
        ),
        # A system turn in the middle stays where it is.
        (
            {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {"role": "system", "content": "Be"},
                    {"role": "assistant", "content": "Yo"},
                ]
            },
            [("user", "Hi"), ("system", "Be"), ("assistant", "Yo")],
        ),
    ],
)
def test_layouts_are_recognised(row, expected):
    assert _convert(row) == expected


def test_own_columns():
    row = {"q": "Hi", "a": "Yo", "s": "Be", "instruction": 3}
    names = {"prompt_column": "q", "response_column": "a"}
    assert _convert(row, "columns", **names) == HI
    with_system = _convert(row, "columns", **names, system_column="s")
    assert with_system == [("system", "Be"), *HI]
    assert _convert(row, "columns", response_column="a") == [("assistant", "Yo")]
    with pytest.raises(errors.ConfigError, match=r"needs data\.sources\[0\]\.response"):
        _convert(row, "columns", prompt_column="q")


def test_a_stated_layout_is_not_guessed():
    row = {"instruction": "Hi", "response": "Yo", "prompt": "A", "completion": "B"}
    expected = [("user", "A"), ("assistant", "B")]
    assert _convert(row, "prompt_completion") == expected
    with pytest.raises(errors.DataError, match="layouts tried: messages"):
        _convert(row, "messages")


def test_an_unknown_layout_lists_columns_and_tries(tmp_path):
    with pytest.raises(errors.DataError) as caught:
        _load(tmp_path, [{"Instruction": "Hi", "Reply": "Yo"}])
    text = str(caught.value)
    assert "has the columns Instruction, Reply" in text
    for name in layouts.LAYOUTS:
        assert name in text
    assert "layout=columns" in text


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": "Hi"}, "missing_column"),
        ({"instruction": "Hi", "response": None}, "null_field"),
        ({"instruction": None, "response": "Yo"}, "null_field"),
        ({"instruction": "Hi", "response": " \n"}, "empty_answer"),
        ({"instruction": "", "response": "Yo"}, "empty_prompt"),
        ({"instruction": "Hi", "response": 42}, "wrong_type"),
        ({"instruction": ["Hi"], "response": "Yo"}, "wrong_type"),
        ({"instruction": "Hi\0", "response": "Yo"}, "nul_character"),
        ('{"instruction": "Hi", "response": "\\ud83d"}', "invalid_unicode"),
        ('{"instruction": "Hi", "resp', "invalid_json"),
        (b'{"instruction": "\xff", "response": "Yo"}', "invalid_utf8"),
        (b'{"instruction": "\x00", "response": "Yo"}', "nul_byte"),
        ('["Hi", "Yo"]', "not_an_object"),
    ],
)
def test_faulty_rows_stop_or_are_listed(tmp_path, row, reason):
    lines = [*data_inputs.pairs(3), row, *data_inputs.pairs(2, start=3)]
    with pytest.raises(errors.DataError) as caught:
        _load(tmp_path, lines)
    assert "rows.jsonl line 4" in str(caught.value)
    assert reason in str(caught.value)
    corpus, report = _load(tmp_path, lines, report=True, on_error="skip")
    assert corpus.num_examples == 5
    [reject] = corpus.rejects
    assert (reject.row, reject.reason) == (3, reason)
    assert report["rejects"][reason]["count"] == 1
    assert report["num_read"] == 6


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([], "no_answer"),
        ([("user", "Hi")], "no_answer"),
        ([("user", "Hi"), ("assistant", "")], "empty_answer"),
        ([("user", ""), ("assistant", "Yo")], "empty_prompt"),
        ([("user", None), ("assistant", "Yo")], "null_field"),
        ([("narrator", "Hi"), ("assistant", "Yo")], "unknown_role"),
        ([(None, "Hi"), ("assistant", "Yo")], "unknown_role"),
        ([("user", 3), ("assistant", "Yo")], "wrong_type"),
        ([("user", [{"type": "image"}]), ("assistant", "Yo")], "not_text"),
    ],
)
def test_faulty_conversations(turns, reason):
    layout = layouts.Layout("messages", turns="messages")
    entry = config.SourceConfig(path="x.jsonl")
    messages = [{"role": role, "content": content} for role, content in turns]
    with pytest.raises(rows.RowError) as caught:
        layouts.convert(layout, entry, {"messages": messages})
    assert caught.value.reason == reason
    for broken in ("Hi", None, 3, {"role": "user"}, ["Hi"], [None]):
        with pytest.raises(rows.RowError):
            layouts.convert(layout, entry, {"messages": broken})


def test_messages_of_weight_zero_are_context_only(tmp_path):
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Bad", "weight": 0},
        {"role": "user", "content": "Again"},
        {"role": "assistant", "content": "Good", "weight": 1},
    ]
    tok = data_inputs.tokenizer()
    corpus = _load(tmp_path, [{"messages": turns}], template="chatml")
    [(text, learnt)] = data_inputs.texts(corpus, tok)
    assert learnt == "Good<|im_end|>"
    assert "Bad" in text


def test_a_prompt_at_the_limit_is_dropped_and_listed(tmp_path):
    """One prompt fills the limit: no answer token is left, and it is told."""
    tok = data_inputs.tokenizer()
    short = {"instruction": "a b", "response": "c"}
    limit = len(tok.encode("a b\n")) + 2
    long = {"instruction": "a b" + " a" * 40, "response": "c"}
    corpus, report = _load(tmp_path, [short, long], report=True, max_length=limit)
    assert corpus.num_examples == 1
    [reject] = corpus.rejects
    assert reject.reason == "no_label_tokens"
    assert reject.uid.startswith("rows:1:")
    assert f"data.max_length is {limit}" in reject.detail
    assert report["rejects"]["no_label_tokens"]["first"] == [reject.uid]
    assert np.all(corpus.num_labels > 0)


def test_all_prompts_longer_than_the_limit_stop(tmp_path):
    lines = [
        {"instruction": f"{i} " + "hello " * (20 + i), "response": "c"}
        for i in range(64)
    ]
    tok = data_inputs.tokenizer()
    shortest = min(len(tok.encode(line["instruction"] + "\n")) for line in lines)
    with pytest.raises(errors.DataError) as caught:
        _load(tmp_path, lines, max_length=16)
    text = str(caught.value)
    assert "0 of 64 examples have a label token" in text
    assert "data.max_length=16" in text
    assert f"the shortest prompt has {shortest}" in text


def test_truncation_is_counted(tmp_path):
    tok = data_inputs.tokenizer()
    answer = "hello " * 30
    lines = [{"prompt": "a", "completion": answer}, {"prompt": "b", "completion": "c"}]
    whole = len(tok.encode(f"a\n{answer}<|im_end|>"))
    corpus, report = _load(tmp_path, lines, report=True, max_length=16)
    cut = report["length"]["truncated"]
    assert corpus.lengths[0] == 16
    assert cut["count"] == 1
    assert cut["first"] == [str(corpus.uid[0])]
    assert cut["tokens_cut"] == cut["label_tokens_cut"] == whole - 16
    assert report["length"]["tokens"] == len(corpus.tokens)
    assert report["length"]["label_tokens"] == int(corpus.label_mask.sum())


def test_the_histogram_counts_every_example(tmp_path):
    corpus, report = _load(tmp_path, data_inputs.pairs(40), report=True)
    length = report["length"]
    edges, counts = length["histogram"]["edges"], length["histogram"]["counts"]
    expected, _ = np.histogram(corpus.lengths, bins=[*edges[:-1], edges[-1] - 0.5])
    assert counts == expected.tolist()
    assert sum(counts) == 40
    assert length["min"] == corpus.lengths.min()
    assert length["max"] == corpus.lengths.max()
    assert length["median"] in corpus.lengths
    assert length["label_share"] == corpus.label_mask.mean()
    assert length["packing"]["rows"] == -(-len(corpus.tokens) // 512)


def test_duplicates(tmp_path):
    lines = [
        {"instruction": "Say it", "response": "Yes sir"},
        {"instruction": "Say it", "response": "Yes sir"},
        {"instruction": "say  IT", "response": "yes sir\n"},
        {"instruction": "Say it", "response": "No sir"},
    ]
    kept = {"none": [0, 1, 2, 3], "exact": [0, 2, 3], "normalized": [0, 3]}
    for kind, expected in kept.items():
        corpus, report = _load(tmp_path, lines, report=True, drop_duplicates=kind)
        assert corpus.row.tolist() == expected
        assert report["duplicates"] == {"exact": 1, "normalized": 2}
        assert all("rows.jsonl line 1" in r.detail for r in corpus.rejects)
        assert len(set(corpus.uid)) == len(expected)


def test_weights(tmp_path):
    lines = [pair | {"w": w} for pair, w in zip(data_inputs.pairs(3), (2, 0, 0.5))]
    corpus = _load(tmp_path, lines, source={"weight_column": "w"})
    assert corpus.user_weight.tolist() == [2.0, 0.5]
    assert [reject.reason for reject in corpus.rejects] == ["zero_weight"]
    for bad in ("-1", "NaN", "1e400", "1e-40", '"2"', "true", "null"):
        line = '{"instruction": "Hi", "response": "Yo", "w": ' + bad + "}"
        with pytest.raises(errors.DataError, match=r"line 4"):
            _load(tmp_path, [*lines, line], source={"weight_column": "w"})


def test_sources_and_groups_by_column(tmp_path):
    lines = [
        pair | {"topic": topic, "family": family}
        for pair, topic, family in zip(data_inputs.pairs(4), "abab", (7, 7, 8, 7))
    ]
    names = {"source_column": "topic", "group_column": "family"}
    corpus = _load(tmp_path, lines, source=names)
    assert corpus.source_names == ("a", "b")
    assert corpus.source_id.tolist() == [0, 1, 0, 1]
    assert corpus.group_names == ("7", "8")
    assert corpus.group.tolist() == [0, 0, 1, 0]
    assert corpus.uid[0].startswith("rows:0:")
    with pytest.raises(errors.DataError, match="no column 'topics'"):
        _load(tmp_path, lines, source={"source_column": "topics"})


def test_every_subset_is_printed_and_reported(tmp_path, capsys):
    lines = data_inputs.pairs(30)
    corpus, report = _load(
        tmp_path, lines, report=True, source={"max_examples": 20}, eval_fraction=0.3
    )
    held_out = report["rows_in_other_part"]
    assert corpus.num_examples == 20 - held_out
    assert 0 < held_out < 20
    assert any("only the first 20 rows" in text for text in report["subsets"])
    assert any(f"{held_out} of 20 rows held out" in text for text in report["subsets"])
    printed = capsys.readouterr().out
    assert all(text in printed for text in report["subsets"])
    cut = _load(tmp_path, lines, source={"max_examples": 30}, report=True)[1]
    assert cut["subsets"] == []


def test_warnings_that_a_template_earns(tmp_path):
    # The golden tokenizers have no chat template and know <|im_end|>.
    _, report = _load(tmp_path, data_inputs.pairs(2), report=True, template="auto")
    [warning] = report["warnings"]
    assert "template plain is used" in warning
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}{{ m.content + '\\n' }}{% endfor %}"
    )
    own = str(tmp_path / "own.jinja")
    _, report = _load(tmp_path, data_inputs.pairs(2), report=True, template=own)
    [warning] = report["warnings"]
    assert warning.startswith("2 answers do not end with a special token")


def test_many_faults_are_shown_together(tmp_path):
    lines = ["{"] * 8 + data_inputs.pairs(2)
    with pytest.raises(errors.DataError) as caught:
        _load(tmp_path, lines)
    assert str(caught.value).count("rows.jsonl line") == 5
    assert "and 3 more" in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"eval_fraction": 1.0}, r"data\.eval_fraction=1\.0 must be in"),
        ({"max_length": 1}, r"data\.max_length must be at least 2"),
        ({"template": "nope"}, r"data\.template='nope'"),
        ({"source": {"max_examples": 0}}, r"max_examples"),
    ],
)
def test_settings_that_can_not_be(tmp_path, keys, match):
    with pytest.raises(errors.ConfigError, match=match):
        _load(tmp_path, data_inputs.pairs(3), **keys)


def test_no_sources_at_all():
    with pytest.raises(errors.ConfigError, match=r"data\.sources is empty"):
        data.load(config.DataConfig(), data_inputs.tokenizer())

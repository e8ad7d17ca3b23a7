"""The corpus on disk: content-hashed, cached, split, and read without copies."""

import json
import multiprocessing
import os
import shutil

import data_inputs
import numpy as np
import pytest

from clusterjax import config, data, errors
from clusterjax.data import chat, encoding, layouts


def _by_hand(lines, tok):
    """(tokens, label mask) of instruction/response rows under `plain`, row by row."""
    for line in lines:
        prompt = tok.encode(line["instruction"] + "\n")
        answer = [*tok.encode(line["response"]), tok.eos_id]
        yield prompt + answer, [False] * len(prompt) + [True] * len(answer)


def test_arrays_equal_a_plain_loop(tmp_path):
    lines = data_inputs.pairs(3000)  # several blocks
    path = data_inputs.write_lines(tmp_path / "a.jsonl", lines)
    tok = data_inputs.tokenizer()
    corpus = data.load(data_inputs.settings(path), tok)
    assert corpus.num_examples == 3000
    assert corpus.tokens.dtype == np.int32 and corpus.label_mask.dtype == bool
    assert corpus.offsets.dtype == np.int64 and corpus.content_hash.shape == (3000, 2)
    for i, (tokens, mask) in enumerate(_by_hand(lines, tok)):
        found, labels = corpus.example(i)
        assert found.tolist() == tokens
        assert labels.tolist() == mask
        assert corpus.num_labels[i] == sum(mask)
    assert corpus.lengths.sum() == len(corpus.tokens) == corpus.offsets[-1]
    assert len(np.unique(corpus.content_hash, axis=0)) == 3000
    assert len(set(corpus.uid.tolist())) == 3000
    chosen = np.array([5, 2999])
    assert corpus.uid[chosen].tolist() == [corpus.uid[5], corpus.uid[2999]]
    assert corpus.uid[2999].startswith("a:2999:")


def test_content_hash_is_of_tokens_labels_and_weight(tmp_path):
    lines = [{"prompt": "a", "completion": "b", "w": w} for w in (1, 1, 2)]
    lines.append({"prompt": "a\nb", "completion": "c", "w": 1})
    path = data_inputs.write_lines(tmp_path / "a.jsonl", lines)
    entry = config.SourceConfig(path=str(path), weight_column="w")
    cfg = data_inputs.settings(entry, drop_duplicates="none")
    hashes = data.load(cfg, data_inputs.tokenizer()).content_hash.tolist()
    assert hashes[0] == hashes[1]
    assert len({tuple(h) for h in hashes}) == 3


def test_a_second_start_reads_the_cache(tmp_path, monkeypatch):
    path = data_inputs.write_lines(tmp_path / "a.jsonl", data_inputs.pairs(20))
    tok, cfg = data_inputs.tokenizer(), data_inputs.settings(path)
    first = data.load(cfg, tok, directory=tmp_path / "data")
    monkeypatch.setattr(encoding, "mark", None)  # nothing is tokenised again
    monkeypatch.setattr(layouts, "convert", None)
    second = data.load(cfg, tok, directory=tmp_path / "data")
    assert second.fingerprint == first.fingerprint
    assert second.uid.tolist() == first.uid.tolist()
    np.testing.assert_array_equal(second.tokens, first.tokens)
    assert second.rejects == first.rejects


def test_where_the_data_lie_does_not_matter(tmp_path):
    tok = data_inputs.tokenizer()
    found = []
    for name in "xy":
        (tmp_path / name).mkdir()
        path = data_inputs.write_lines(
            tmp_path / name / "a.jsonl", data_inputs.pairs(9)
        )
        found.append(data.load(data_inputs.settings(path), tok).fingerprint)
    assert found[0] == found[1]


def test_an_edited_line_is_noticed_and_said(tmp_path, capsys):
    lines = data_inputs.pairs(20)
    path = data_inputs.write_lines(tmp_path / "a.jsonl", lines)
    tok, cfg = data_inputs.tokenizer(), data_inputs.settings(path)
    first = data.load(cfg, tok, directory=tmp_path / "data")
    stat = os.stat(path)
    lines[7] = lines[7] | {"response": "It is 41."}  # as long as before
    data_inputs.write_lines(path, lines)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    capsys.readouterr()
    second = data.load(cfg, tok, directory=tmp_path / "data")
    printed = capsys.readouterr().out
    assert "reading anew, since this changed: file:" in printed
    assert "a.jsonl" in printed
    assert second.fingerprint != first.fingerprint
    differs = np.any(second.content_hash != first.content_hash, axis=1)
    assert np.flatnonzero(differs).tolist() == [7]
    assert [a == b for a, b in zip(first.uid, second.uid)].count(False) == 1


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"max_length": 100}, "data: max_length"),
        ({"template": "chatml"}, "template"),
        ({"drop_duplicates": "none"}, "data: drop_duplicates"),
    ],
)
def test_other_settings_are_noticed(tmp_path, capsys, keys, said):
    path = data_inputs.write_lines(tmp_path / "a.jsonl", data_inputs.pairs(5))
    tok = data_inputs.tokenizer()
    data.load(data_inputs.settings(path), tok, directory=tmp_path / "data")
    capsys.readouterr()
    data.load(data_inputs.settings(path, **keys), tok, directory=tmp_path / "data")
    assert f"since this changed: {said}" in capsys.readouterr().out


def test_another_tokenizer_is_noticed(tmp_path, capsys):
    path = data_inputs.write_lines(tmp_path / "a.jsonl", data_inputs.pairs(5))
    cfg = data_inputs.settings(path)
    found = [
        data.load(cfg, data_inputs.tokenizer(mode), directory=tmp_path / "data")
        for mode in ("byte_level", "sentencepiece")
    ]
    assert "since this changed: tokenizer" in capsys.readouterr().out
    assert found[0].fingerprint != found[1].fingerprint
    assert found[0].uid.tolist() == found[1].uid.tolist()


@pytest.mark.parametrize("name", ["tokens.npy", "meta.json", "uid.npy"])
def test_a_damaged_cache_is_made_again(tmp_path, name):
    path = data_inputs.write_lines(tmp_path / "a.jsonl", data_inputs.pairs(20))
    tok = data_inputs.tokenizer()
    cfg = data_inputs.settings(path, cache_dir=str(tmp_path / "cache"))
    first = data.load(cfg, tok)
    [folder] = [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    assert data.load(cfg, tok).fingerprint == first.fingerprint
    (folder / name).unlink()
    assert data.load(cfg, tok).fingerprint == first.fingerprint
    assert (folder / name).read_bytes() == content


def test_an_interrupted_start_leaves_nothing_in_the_way(tmp_path, monkeypatch):
    path = data_inputs.write_lines(tmp_path / "a.jsonl", data_inputs.pairs(20))
    tok = data_inputs.tokenizer()
    cfg = data_inputs.settings(path, cache_dir=str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        patch.setattr(encoding, "mark", None)
        with pytest.raises(TypeError):
            data.load(cfg, tok)
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]
    assert data.load(cfg, tok).num_examples == 20


def _load_in_process(cfg, queue) -> None:
    queue.put(data.load(cfg, data_inputs.tokenizer()).fingerprint)


def test_processes_at_once_make_one_corpus(tmp_path):
    path = data_inputs.write_lines(tmp_path / "a.jsonl", data_inputs.pairs(2000))
    cfg = data_inputs.settings(path, cache_dir=str(tmp_path / "cache"))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [
        context.Process(target=_load_in_process, args=(cfg, queue)) for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    found = {queue.get(timeout=120) for _ in workers}
    for worker in workers:
        worker.join(60)
    assert len(found) == 1
    assert len([p for p in (tmp_path / "cache").iterdir() if p.is_dir()]) == 1


def test_without_a_folder_nothing_stays_behind(tmp_path):
    path = data_inputs.write_lines(tmp_path / "a.jsonl", data_inputs.pairs(5))
    corpus = data.load(data_inputs.settings(path), data_inputs.tokenizer())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl"]
    assert corpus.example(4)[0].sum() > 0


# ---- held-out data


def test_a_fraction_is_held_out_by_the_text_alone(tmp_path):
    lines = data_inputs.pairs(400)
    tok = data_inputs.tokenizer()
    paths = [
        data_inputs.write_lines(tmp_path / "a.jsonl", lines),
        data_inputs.write_lines(tmp_path / "b.jsonl", lines[::-1]),
    ]
    parts = []
    for path in paths:
        entry = config.SourceConfig(path=str(path), name="rows")
        cfg = data_inputs.settings(entry, eval_fraction=0.25)
        corpora = data.load(cfg, tok), data.load_eval(cfg, tok)
        texts = [{t for t, _ in data_inputs.texts(c, tok)} for c in corpora]
        assert not texts[0] & texts[1]
        assert len(texts[0]) + len(texts[1]) == 400
        assert 70 < len(texts[1]) < 130
        parts.append(texts)
    assert parts[0] == parts[1]


def test_copies_fall_on_one_side(tmp_path):
    lines = data_inputs.pairs(60)
    copies = [
        {"instruction": row["instruction"].upper(), "response": row["response"] + " "}
        for row in lines
    ]
    path = data_inputs.write_lines(tmp_path / "a.jsonl", lines + copies)
    tok = data_inputs.tokenizer()
    cfg = data_inputs.settings(path, eval_fraction=0.3)
    train, held_out = data.load(cfg, tok), data.load_eval(cfg, tok)
    both = set(train.row % 60) & set(held_out.row % 60)
    assert not both
    assert train.num_examples + held_out.num_examples == 120


def test_texts_of_the_held_out_files_are_taken_from_training(tmp_path):
    lines = data_inputs.pairs(10)
    path = data_inputs.write_lines(tmp_path / "train.jsonl", lines)
    leaked = {"instruction": "what is 3 + 3? ", "response": "It is\n6."}
    own = data_inputs.write_lines(
        tmp_path / "own.jsonl", [*data_inputs.pairs(2, start=50), leaked]
    )
    cfg = config.DataConfig(
        sources=(config.SourceConfig(path=str(path)),),
        eval_sources=(config.SourceConfig(path=str(own)),),
        template="plain",
        drop_duplicates="none",
    )
    tok = data_inputs.tokenizer()
    train = data.load(cfg, tok, directory=tmp_path / "data")
    held_out = data.load_eval(cfg, tok, directory=tmp_path / "data")
    assert held_out.num_examples == 3
    assert [(r.row, r.reason) for r in train.rejects] == [(3, "in_eval")]
    assert data_inputs.counted(train, 10)
    names = sorted(p.name for p in (tmp_path / "data").iterdir() if p.is_file())
    assert names == [
        "eval_rejects.jsonl",
        "eval_report.json",
        "rejects.jsonl",
        "report.json",
    ]
    # Another held-out file gives another training corpus.
    data_inputs.write_lines(own, data_inputs.pairs(2, start=50))
    assert data.load(cfg, tok, directory=tmp_path / "data").num_examples == 10


def test_nothing_held_out_gives_none(tmp_path):
    path = data_inputs.write_lines(tmp_path / "a.jsonl", data_inputs.pairs(5))
    cfg = data_inputs.settings(path)
    assert data.load_eval(cfg, data_inputs.tokenizer()) is None
    both = config.DataConfig(
        sources=cfg.sources, eval_sources=cfg.sources, eval_fraction=0.1
    )
    with pytest.raises(errors.ConfigError, match="use one of them"):
        data.load(both, data_inputs.tokenizer())


def test_faulty_rows_are_counted_once_over_both_parts(tmp_path):
    lines = [*data_inputs.pairs(40), "{", *data_inputs.pairs(10, start=40)]
    path = data_inputs.write_lines(tmp_path / "a.jsonl", lines)
    cfg = data_inputs.settings(path, eval_fraction=0.5, on_error="skip")
    tok = data_inputs.tokenizer()
    folder = tmp_path / "data"
    parts = (
        data.load(cfg, tok, directory=folder),
        data.load_eval(cfg, tok, directory=folder),
    )
    assert sum(part.num_read for part in parts) == 51
    assert [len(part.rejects) for part in parts] == [1, 0]
    for name, part in zip(("report.json", "eval_report.json"), parts):
        report = json.loads((folder / name).read_text())
        assert report["rows_in_other_part"] == 51 - part.num_read


def test_the_mapped_arrays_outlive_their_names(tmp_path):
    path = data_inputs.write_lines(tmp_path / "a.jsonl", data_inputs.pairs(50))
    cfg = data_inputs.settings(path, cache_dir=str(tmp_path / "cache"))
    corpus = data.load(cfg, data_inputs.tokenizer())
    before = corpus.tokens.sum()
    shutil.rmtree(tmp_path / "cache")
    assert corpus.tokens.sum() == before
    with pytest.raises(ValueError, match="read-only"):
        corpus.tokens[0] = 1


def test_every_named_template_gives_a_corpus(tmp_path):
    path = data_inputs.write_lines(tmp_path / "a.jsonl", data_inputs.pairs(3))
    tok = data_inputs.tokenizer()
    for name in chat.NAMES:
        corpus = data.load(data_inputs.settings(path, template=name), tok)
        _, learnt = data_inputs.texts(corpus, tok)[2]
        assert learnt == "It is 4.<|im_end|>"

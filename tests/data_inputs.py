"""Small inputs for the tests of the data part."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from clusterjax import config, data, datatypes

GOLDEN = pathlib.Path(__file__).parent / "golden" / "data"


def tokenizer(mode: str = "byte_level") -> data.tokenizer.Tokenizer:
    """A small real tokenizer: `byte_level` (GPT-2 form) or `sentencepiece` (Llama)."""
    return data.tokenizer.Tokenizer.load(GOLDEN / mode)


def write_lines(path: pathlib.Path, rows: Sequence[Any]) -> pathlib.Path:
    """JSON lines; a row that is text or bytes is written as it is."""
    lines = [
        row
        if isinstance(row, bytes)
        else (row if isinstance(row, str) else json.dumps(row)).encode()
        for row in rows
    ]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def pairs(count: int, start: int = 0) -> list[dict[str, str]]:
    return [
        {"instruction": f"What is {i} + {i}?", "response": f"It is {2 * i}."}
        for i in range(start, start + count)
    ]


def settings(*paths: Any, **keys: Any) -> config.DataConfig:
    """Data config of some paths (or `SourceConfig`s)."""
    sources = tuple(
        path
        if isinstance(path, config.SourceConfig)
        else config.SourceConfig(path=str(path))
        for path in paths
    )
    return config.DataConfig(sources=sources, **({"template": "plain"} | keys))


def texts(
    corpus: datatypes.Corpus, tok: data.tokenizer.Tokenizer
) -> list[tuple[str, str]]:
    """(whole text, label text) of every example."""
    result = []
    for i in range(corpus.num_examples):
        tokens, labels = corpus.example(i)
        result.append((tok.decode(tokens), tok.decode(tokens[labels])))
    return result


def counted(corpus: datatypes.Corpus, rows: int) -> bool:
    """Whether every row is an example or a reject, each once."""
    seen = {(int(uid.split(":")[-2])) for uid in corpus.uid}
    lost = {reject.row for reject in corpus.rejects}
    return (
        corpus.num_read == rows == corpus.num_examples + len(corpus.rejects)
        and len(seen) + len(lost) == rows
        and not seen & lost
    )

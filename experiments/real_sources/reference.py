"""Dictionaries: WordNet's data files, and FOLDOC in the form of dictd."""

from __future__ import annotations

import gzip
import re
import string
from collections.abc import Iterator

from experiments.real_sources import archives

Pair = tuple[str, str]

_PARTS = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
_DIGITS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"


def wordnet(archive: archives.Archive) -> Iterator[Pair]:
    """Each synset: define its first word. Format: wndb(5WN)."""
    files = archive.members(r".*/data\.(noun|verb|adj|adv)")
    for name, content in files:
        part = _PARTS[name.rpartition(".")[2]]
        for line in content.decode("latin-1").splitlines():
            if line.startswith("  "):
                continue  # the licence, at the top of each file
            fields, _, gloss = line.partition(" | ")
            word = re.sub(r"\(\w+\)$", "", fields.split()[4]).replace("_", " ")
            yield f'Define the {part} "{word}".', gloss.strip()


def foldoc(archive: archives.Archive) -> Iterator[Pair]:
    """Each entry: what its headword means. Format: dictfmt(1), dictzip(1)."""
    (_, packed), (_, index) = archive.members(r".*/foldoc\.(dict\.dz|index)")
    text, seen = gzip.decompress(packed), set()
    for line in index.decode("utf-8", "replace").splitlines():
        key, start, size = line.split("\t")[:3]
        if key.startswith("00database") or start in seen:
            continue  # several headwords may lead to one entry
        seen.add(start)
        begin = _number(start)
        entry = text[begin : begin + _number(size)].decode("utf-8", "replace")
        head, _, body = entry.partition("\n\n")
        yield (
            f'What does "{head.splitlines()[0].strip()}" mean in computing?',
            _plain_entry(body),
        )


def _number(digits: str) -> int:
    value = 0
    for digit in digits:
        value = value * 64 + _DIGITS.index(digit)
    return value


def _plain_entry(body: str) -> str:
    """Without link braces, the date at the end, and the indentation."""
    body = re.sub(r"\{([^{}]*?)(?:\s\([^{}]*\))?\}", r"\1", body)
    body = re.sub(r"\n\s*\(\d{4}-\d\d-\d\d\)\s*$", "", body.rstrip())
    paragraphs = re.split(r"\n\s*\n", body)
    return "\n\n".join(" ".join(p.split()) for p in paragraphs if p.strip())

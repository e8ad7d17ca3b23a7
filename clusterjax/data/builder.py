"""Rows to examples, block by block: convert, check, render, tokenise, write."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import itertools
import time
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from clusterjax import config as config_lib
from clusterjax import datatypes, errors, progress
from clusterjax.data import chat, checks, encoding, layouts, rows, sources, store
from clusterjax.data import tokenizer as tokenizer_lib

BLOCK_ROWS = 1024
SAY_EVERY_SECONDS = 10.0

# What was changed in rows that became examples.
NOTES = {
    "turns_joined": "consecutive turns of one speaker were joined",
    "trailing_turns_cut": "turns after the last answer were cut off",
    "answers_shortened": "answers that the template shortens carry no label",
}

Part = Literal["train", "eval"]


@dataclasses.dataclass
class _Pending:
    """A conversation on its way to tokens."""

    origin: int
    row: int
    uid: str
    text_hash: int
    rendered: chat.Rendered
    conversation: layouts.Conversation


class Builder:
    """State of reading: what was seen, dropped, counted."""

    def __init__(
        self,
        config: config_lib.DataConfig,
        tokenizer: tokenizer_lib.Tokenizer,
        template: chat.ChatTemplate,
        part: Part,
    ):
        self._config, self._tokenizer = config, tokenizer
        self._template, self._part = template, part
        self.rejects = checks.Rejects(config.on_error)
        self._duplicates = checks.Duplicates(config.drop_duplicates)
        self._lengths = checks.Lengths(config.max_length)
        self._excluded: set[bytes] = set()
        self.source_names: dict[str, int] = {}
        self.group_names: dict[str, int] = {}
        self._num_read = self._num_examples = self._num_elsewhere = 0
        self._source_reports: list[dict[str, Any]] = []
        self._subsets: list[str] = []
        self._warnings: list[str] = []
        self._notes: dict[str, int] = {}
        self._origins: list[sources.Source] = []
        self._said = time.monotonic()

    def exclude(self, held_out: list[sources.Source]) -> None:
        """Remembers the texts of the held-out sources, which must not be trained on."""
        for number, source in enumerate(held_out):
            key = f"data.eval_sources[{number}]"
            for block, layout in blocks(source, key):
                for row in block:
                    conversation = convert(layout, source.config, row)
                    if isinstance(conversation, layouts.Conversation):
                        digests = checks.digest(conversation)
                        self._excluded.add(digests.normalized)

    def read(
        self, origin: int, source: sources.Source, key: str, writer: store.Writer
    ) -> None:
        """Takes all rows of a source."""
        self._origins.append(source)
        before = (self._num_read, self._num_examples, self._num_elsewhere)
        layout, unused = None, set()
        first_reject = len(self.rejects.all)
        # The tokenizer leaves Python's lock alone, so the next block is prepared while
        # one is tokenised.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting: tuple[list[_Pending], concurrent.futures.Future] | None = None
            for block, layout in blocks(source, key):
                if self._num_read == before[0]:
                    unused = _unused(block, layout, source.config)
                taken = [self._take(origin, source, layout, row) for row in block]
                pending = [item for item in taken if item is not None]
                self.rejects.stop_if_asked()
                texts = [item.rendered.text for item in pending]
                tokens = pool.submit(self._tokenizer.encode_batch, texts)
                self._write(waiting, writer)
                waiting = (pending, tokens)
                self._say(source)
            self._write(waiting, writer)
        self.rejects.sort(first_reject)
        self._note_problems(source)
        read, examples, elsewhere = (
            now - then
            for now, then in zip(
                (self._num_read, self._num_examples, self._num_elsewhere), before
            )
        )
        self._note_subsets(source, key, read + elsewhere, elsewhere)
        self._source_reports.append(
            {
                "name": source.name,
                "path": source.config.path,
                "layout": layout.name if layout else "",
                "columns": layout.columns() if layout else [],
                "columns_unused": sorted(unused),
                "rows": read,
                "examples": examples,
                "rejects": read - examples,
                "rows_in_other_part": elsewhere,
                "blank_lines": source.num_blank_lines,
                "files": source.describe_parts(),
            }
        )

    def _take(
        self,
        origin: int,
        source: sources.Source,
        layout: layouts.Layout,
        row: rows.Row,
    ) -> _Pending | None:
        """The row's conversation as text; None when it is left out."""
        fraction = self._config.eval_fraction
        held_out = self._part == "eval" and bool(fraction)
        conversation = convert(layout, source.config, row)
        if isinstance(conversation, rows.RowError):
            # A row without a text belongs to the training part.
            if held_out:
                self._num_elsewhere += 1
            else:
                self._num_read += 1
                self._reject(source, row.index, conversation)
            return None
        digests = checks.digest(conversation)
        if fraction and digests.is_held_out(fraction) != held_out:
            self._num_elsewhere += 1
            return None
        self._num_read += 1
        uid = f"{source.name}:{row.index}:{digests.short_hex()}"
        try:
            self._check_new(digests, origin, row.index)
            rendered = self._template.render(conversation)
        except rows.RowError as error:
            self._reject(source, row.index, error, uid)
            return None
        unwritten = ("answers_shortened",) * bool(rendered.num_unwritten)
        for note in (*conversation.notes, *unwritten):
            self._notes[note] = self._notes.get(note, 0) + 1
        return _Pending(origin, row.index, uid, digests.short, rendered, conversation)

    def _check_new(self, digests: checks.Digests, origin: int, row: int) -> None:
        if digests.normalized in self._excluded:
            raise rows.RowError("in_eval", "the same text is in the held-out data")
        first = self._duplicates.earlier(digests, (origin, row))
        if first is not None:
            place = self._origins[first[0]].place(first[1])
            raise rows.RowError("duplicate", f"same text as {place}")

    def _reject(
        self, source: sources.Source, row: int, error: rows.RowError, uid: str = ""
    ) -> None:
        reject = datatypes.Reject(source.name, row, error.reason, error.detail, uid)
        place = source.place(row) if error.reason not in checks.RULES else ""
        self.rejects.add(reject, place)

    def _write(
        self,
        waiting: tuple[list[_Pending], concurrent.futures.Future] | None,
        writer: store.Writer,
    ) -> None:
        """Writes what has labels of a tokenised block."""
        if waiting is None:
            return
        pending, tokens = waiting
        texts = [item.rendered for item in pending]
        encoded = encoding.mark(
            self._tokenizer, texts, tokens.result(), self._config.max_length
        )
        kept = [
            (item, tokens)
            for item, tokens in zip(pending, encoded)
            if self._has_labels(item, tokens)
        ]
        self.rejects.stop_if_asked()
        if not kept:
            return
        self._num_examples += len(kept)
        num_labels = [int(np.count_nonzero(e.label_mask)) for _, e in kept]
        self._lengths.add((len(e.tokens) for _, e in kept), sum(num_labels))
        writer.append(self._block(kept, num_labels))

    def _has_labels(self, item: _Pending, encoded: encoding.Encoded) -> bool:
        limit, length = self._config.max_length, encoded.full_length
        source = self._origins[item.origin]
        if not encoded.full_labels:
            detail = f"template {self._template.name} gives this text no label"
            error = rows.RowError("no_labels_in_text", detail)
            self._reject(source, item.row, error, item.uid)
            return False
        labels = int(np.count_nonzero(encoded.label_mask))
        if not labels:
            prompt = encoded.first_label
            shortest = self._lengths.shortest_prompt
            self._lengths.shortest_prompt = min(prompt, shortest or prompt)
            detail = f"the prompt has {prompt} tokens, data.max_length is {limit}"
            error = rows.RowError("no_label_tokens", detail)
            self._reject(source, item.row, error, item.uid)
            return False
        if length <= limit:
            last = int(encoded.tokens[encoded.label_mask][-1])
            self._lengths.num_endless += last not in self._tokenizer.added_ids
        else:
            cut = encoded.full_labels - labels
            self._lengths.add_truncated(item.uid, length - limit, cut)
        return True

    def _block(
        self, kept: list[tuple[_Pending, encoding.Encoded]], num_labels: list[int]
    ) -> store.Block:
        items = [item for item, _ in kept]
        weight = np.array([item.conversation.weight for item in items], np.float32)
        hashes = b"".join(
            hashlib.blake2b(
                e.tokens.tobytes() + e.label_mask.tobytes() + w.tobytes(),
                digest_size=16,
            ).digest()
            for (_, e), w in zip(kept, weight)
        )
        return store.Block(
            lengths=np.array([len(e.tokens) for _, e in kept], np.int64),
            arrays={
                "tokens": np.concatenate([e.tokens for _, e in kept]),
                "label_mask": np.concatenate([e.label_mask for _, e in kept]),
                "num_labels": np.array(num_labels, np.int32),
                "user_weight": weight,
                "source_id": np.array([self._source_id(i) for i in items], np.int32),
                "group": np.array([self._group_id(i) for i in items], np.int32),
                "row": np.array([item.row for item in items], np.int64),
            },
            content_hash=np.frombuffer(hashes, np.uint64).reshape(-1, 2),
            text_hash=np.array([item.text_hash for item in items], np.uint32),
            origin=np.array([item.origin for item in items], np.int32),
        )

    def _source_id(self, item: _Pending) -> int:
        name = item.conversation.source
        name = self._origins[item.origin].name if name is None else name
        return self.source_names.setdefault(name, len(self.source_names))

    def _group_id(self, item: _Pending) -> int:
        name = item.conversation.group
        if name is None:
            return -1
        return self.group_names.setdefault(name, len(self.group_names))

    def _note_problems(self, source: sources.Source) -> None:
        for path, cause in source.problems:
            if self._config.on_error == "stop":
                raise errors.DataError(
                    f"{path} {cause}; take it out, or set data.on_error=skip"
                )
            self._warnings.append(f"{path} {cause}")

    def _note_subsets(
        self, source: sources.Source, key: str, taken: int, elsewhere: int
    ) -> None:
        if source.has_more:
            self._subsets.append(
                f"{source.name}: only the first {taken:,} rows were read"
                f" ({key}.max_examples)"
            )
        if elsewhere:
            other = "held out" if self._part == "train" else "left for training"
            self._subsets.append(
                f"{source.name}: {elsewhere:,} of {taken:,} rows {other}"
                f" (data.eval_fraction={self._config.eval_fraction})"
            )

    def _say(self, source: sources.Source) -> None:
        now = time.monotonic()
        if now - self._said > SAY_EVERY_SECONDS:
            self._said = now
            progress.say(f"  {source.name}: {self._num_read:,} rows read")

    def check_not_empty(self) -> None:
        """Raises errors.DataError when not one example is left."""
        if self._num_examples:
            return
        reasons = {k: v["count"] for k, v in self.rejects.by_reason().items()}
        listed = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
        cause = f"no example is left of {self._num_read:,} rows ({listed or 'no rows'})"
        cut = reasons.get("no_label_tokens", 0)
        if cut:
            cause = (
                f"0 of {self._num_read:,} examples have a label token:"
                f" data.max_length={self._config.max_length} tokens, the shortest"
                f" prompt has {self._lengths.shortest_prompt}; raise data.max_length"
                f" ({listed})"
            )
        raise errors.DataError(f"{self._part} data: {cause}")

    def report(self) -> dict[str, Any]:
        """The data report. Guarantee: num_read = num_examples + num_rejects."""
        if self._num_read != self._num_examples + len(self.rejects.all):
            raise AssertionError("a row was neither kept nor rejected")
        changed = [f"{NOTES[n]}: {count:,} rows" for n, count in self._notes.items()]
        return {
            "part": self._part,
            "num_read": self._num_read,
            "num_examples": self._num_examples,
            "num_rejects": len(self.rejects.all),
            "rows_in_other_part": self._num_elsewhere,
            "rejects": self.rejects.by_reason(),
            "sources": self._source_reports,
            "template": {
                "name": self._template.name,
                "spans": "marks" if self._template.has_marks else "prefixes",
                "begin_token": self._tokenizer.adds_bos,
            },
            "max_length": self._config.max_length,
            "length": self._lengths.summary(),
            "duplicates": self._duplicates.counts(),
            "subsets": self._subsets + changed,
            "warnings": self._warnings + self._template_warnings(),
        }

    def _template_warnings(self) -> list[str]:
        name, found = self._template.name, []
        if self._config.template == "auto" and name != "tokenizer":
            found.append(
                f"the tokenizer has no chat template, so the template {name} is used;"
                " set data.template to choose"
            )
        if self._lengths.num_endless:
            found.append(
                f"{self._lengths.num_endless:,} answers do not end with a special token"
                f" under the template {name}: a model does not learn to stop there"
            )
        return found


def blocks(
    source: sources.Source, key: str
) -> Iterator[tuple[list[rows.Row], layouts.Layout]]:
    """Blocks of rows with the source's layout, which the first block decides."""
    limit, layout = source.config.max_examples, None
    stream = source.read()
    taken = itertools.islice(stream, limit)
    while block := list(itertools.islice(taken, BLOCK_ROWS)):
        if layout is None:
            readable = [row.columns for row in block if row.columns is not None]
            layout = layouts.find(source.config, readable, key)
        yield block, layout
    source.has_more = limit is not None and next(stream, None) is not None


def _unused(
    block: list[rows.Row], layout: layouts.Layout, config: config_lib.SourceConfig
) -> set[str]:
    named = (config.weight_column, config.source_column, config.group_column)
    found = {name for row in block for name in row.columns or ()}
    return found - {*layout.columns(), *named}


def convert(
    layout: layouts.Layout, config: config_lib.SourceConfig, row: rows.Row
) -> layouts.Conversation | rows.RowError:
    """The row's conversation, or why there is none."""
    if row.columns is None:
        return rows.RowError(row.reason, row.cause)
    try:
        return layouts.convert(layout, config, row.columns)
    except rows.RowError as error:
        return error

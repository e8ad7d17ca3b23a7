"""Rows to examples, block by block: convert, check, render, tokenise, write."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import itertools
import time
from collections.abc import Iterator

import numpy as np

from clusterjax import config as config_lib
from clusterjax import datatypes, progress
from clusterjax.data import chat, checks, encoding, layouts, rows, sources, store
from clusterjax.data import report as report_lib
from clusterjax.data import tokenizer as tokenizer_lib

BLOCK_ROWS = 1024
SAY_EVERY_SECONDS = 10.0


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
        part: report_lib.Part,
    ):
        self._config, self._tokenizer = config, tokenizer
        self._template, self._part = template, part
        self.rejects = checks.Rejects(config.on_error)
        self.duplicates = checks.Duplicates(config.drop_duplicates)
        self.report = report_lib.Report(config, part, template, tokenizer)
        self._excluded: set[bytes] = set()
        self.source_names: dict[str, int] = {}
        self.group_names: dict[str, int] = {}
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
        entry = self.report.begin(source)
        first_reject = len(self.rejects.all)
        # The tokenizer leaves Python's lock alone, so the next block is prepared while
        # one is tokenised.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting: tuple[list[_Pending], concurrent.futures.Future] | None = None
            for block, layout in blocks(source, key):
                if not entry.layout:
                    entry.describe_columns(block, layout, source.config)
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
        self.report.end(source, key)

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
                self.report.source.num_elsewhere += 1
            else:
                self.report.source.num_read += 1
                self._reject(source, row.index, conversation)
            return None
        digests = checks.digest(conversation)
        if fraction and digests.is_held_out(fraction) != held_out:
            self.report.source.num_elsewhere += 1
            return None
        self.report.source.num_read += 1
        uid = f"{source.name}:{row.index}:{digests.short_hex()}"
        try:
            self._check_new(digests, origin, row.index)
            rendered = self._template.render(conversation)
        except rows.RowError as error:
            self._reject(source, row.index, error, uid)
            return None
        unwritten = ("answers_shortened",) * bool(rendered.num_unwritten)
        self.report.notes.update((*conversation.notes, *unwritten))
        return _Pending(origin, row.index, uid, digests.short, rendered, conversation)

    def _check_new(self, digests: checks.Digests, origin: int, row: int) -> None:
        if digests.normalized in self._excluded:
            raise rows.RowError("in_eval", "the same text is in the held-out data")
        first = self.duplicates.earlier(digests, (origin, row))
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
        self.report.source.num_examples += len(kept)
        num_labels = [int(np.count_nonzero(e.label_mask)) for _, e in kept]
        self.report.lengths.add((len(e.tokens) for _, e in kept), sum(num_labels))
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
            shortest = self.report.lengths.shortest_prompt
            self.report.lengths.shortest_prompt = min(prompt, shortest or prompt)
            detail = f"the prompt has {prompt} tokens, data.max_length is {limit}"
            error = rows.RowError("no_label_tokens", detail)
            self._reject(source, item.row, error, item.uid)
            return False
        if length <= limit:
            last = int(encoded.tokens[encoded.label_mask][-1])
            self.report.lengths.num_endless += last not in self._tokenizer.added_ids
        else:
            cut = encoded.full_labels - labels
            self.report.lengths.add_truncated(item.uid, length - limit, cut)
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

    def _say(self, source: sources.Source) -> None:
        now = time.monotonic()
        if now - self._said > SAY_EVERY_SECONDS:
            self._said = now
            progress.say(f"  {source.name}: {self.report.source.num_read:,} rows read")


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

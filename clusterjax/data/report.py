"""The data report: what was read, from where, and everything that was left out."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

from clusterjax import config as config_lib
from clusterjax import errors
from clusterjax.data import chat, checks, layouts, rows, sources
from clusterjax.data import tokenizer as tokenizer_lib

Part = Literal["train", "eval"]

# What was changed in rows that became examples.
NOTES = {
    "turns_joined": "consecutive turns of one speaker were joined",
    "trailing_turns_cut": "turns after the last answer were cut off",
    "answers_shortened": "answers that the template shortens carry no label",
}


@dataclasses.dataclass
class SourceEntry:
    """One source in the report.

    Attributes:
      name, path: of the source.
      layout: name of its layout, '' until the first block is read.
      columns: columns that are read; `columns_unused`: the others.
      num_read: rows that belong to this part.
      num_examples: rows that became examples.
      num_elsewhere: rows that belong to the other part.
      blank_lines: blank lines, which are no rows.
      files: files and the rows at which they begin.
    """

    name: str
    path: str
    layout: str = ""
    columns: tuple[str, ...] = ()
    columns_unused: tuple[str, ...] = ()
    num_read: int = 0
    num_examples: int = 0
    num_elsewhere: int = 0
    blank_lines: int = 0
    files: tuple[dict[str, Any], ...] = ()

    def describe_columns(
        self,
        block: Iterable[rows.Row],
        layout: layouts.Layout,
        config: config_lib.SourceConfig,
    ) -> None:
        """Notes which of the columns of the first block are used."""
        named = (config.weight_column, config.source_column, config.group_column)
        used = [*layout.columns(), *filter(None, named)]
        found = {name for row in block for name in row.columns or ()}
        self.layout = layout.name
        self.columns = tuple(used)
        self.columns_unused = tuple(sorted(found - set(used)))


class Report:
    """Gathers the report while rows stream by.

    Attributes:
      lengths: lengths and labels of the examples.
      source: entry of the source that is being read.
      notes: kinds of changed conversations, counted.
    """

    def __init__(
        self,
        config: config_lib.DataConfig,
        part: Part,
        template: chat.ChatTemplate,
        tokenizer: tokenizer_lib.Tokenizer,
    ):
        self._config, self._part = config, part
        self._template, self._tokenizer = template, tokenizer
        self.lengths = checks.Lengths(config.max_length)
        self.source: SourceEntry
        self.notes: collections.Counter[str] = collections.Counter()
        self._entries: list[SourceEntry] = []
        self._subsets: list[str] = []
        self._warnings: list[str] = []

    def begin(self, source: sources.Source) -> SourceEntry:
        """The entry of a source whose rows come next."""
        self.source = SourceEntry(source.name, source.config.path)
        self._entries.append(self.source)
        return self.source

    def end(self, source: sources.Source, key: str) -> None:
        """Completes the entry of a source that was read to its end.

        Raises:
          errors.DataError: a file without a row, with `on_error=stop`.
        """
        entry = self.source
        entry.blank_lines = source.num_blank_lines
        entry.files = tuple(source.describe_parts())
        for path, cause in source.problems:
            if self._config.on_error == "stop":
                raise errors.DataError(
                    f"{path} {cause}; take it out, or set data.on_error=skip"
                )
            self._warnings.append(f"{path} {cause}")
        taken = entry.num_read + entry.num_elsewhere
        if source.has_more:
            self._subsets.append(
                f"{source.name}: only the first {taken:,} rows were read"
                f" ({key}.max_examples)"
            )
        if entry.num_elsewhere:
            other = "held out" if self._part == "train" else "left for training"
            self._subsets.append(
                f"{source.name}: {entry.num_elsewhere:,} of {taken:,} rows {other}"
                f" (data.eval_fraction={self._config.eval_fraction})"
            )

    def check_not_empty(self, rejects: checks.Rejects) -> None:
        """Raises errors.DataError when not one example is left."""
        if self._total("num_examples"):
            return
        read = self._total("num_read")
        reasons = {k: v["count"] for k, v in rejects.by_reason().items()}
        listed = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
        cause = f"no example is left of {read:,} rows ({listed or 'no rows'})"
        if reasons.get("no_label_tokens"):
            cause = (
                f"0 of {read:,} examples have a label token:"
                f" data.max_length={self._config.max_length} tokens, the shortest"
                f" prompt has {self.lengths.shortest_prompt}; raise data.max_length"
                f" ({listed})"
            )
        raise errors.DataError(f"{self._part} data: {cause}")

    def content(
        self, rejects: checks.Rejects, duplicates: checks.Duplicates
    ) -> dict[str, Any]:
        """The report as plain values. Guarantee: num_read = examples + rejects."""
        read, examples = self._total("num_read"), self._total("num_examples")
        if read != examples + len(rejects.all):
            raise AssertionError("a row was neither kept nor rejected")
        changed = [f"{NOTES[note]}: {n:,} rows" for note, n in self.notes.items()]
        return {
            "part": self._part,
            "num_read": read,
            "num_examples": examples,
            "num_rejects": len(rejects.all),
            "rows_in_other_part": self._total("num_elsewhere"),
            "rejects": rejects.by_reason(),
            "sources": [dataclasses.asdict(entry) for entry in self._entries],
            "template": {
                "name": self._template.name,
                "spans": "marks" if self._template.has_marks else "prefixes",
                "begin_token": self._tokenizer.adds_bos,
            },
            "max_length": self._config.max_length,
            "length": self.lengths.summary(),
            "duplicates": duplicates.counts(),
            "subsets": self._subsets + changed,
            "warnings": self._warnings + self._template_warnings(),
        }

    def _total(self, name: str) -> int:
        return sum(getattr(entry, name) for entry in self._entries)

    def _template_warnings(self) -> list[str]:
        name, found = self._template.name, []
        if self._config.template == "auto" and name != "tokenizer":
            found.append(
                f"the tokenizer has no chat template, so the template {name} is used;"
                " set data.template to choose"
            )
        if self.lengths.num_endless:
            found.append(
                f"{self.lengths.num_endless:,} answers do not end with a special token"
                f" under the template {name}: a model does not learn to stop there"
            )
        return found


def describe(report: dict[str, Any]) -> list[str]:
    """Lines for people: every row that was left out, and every cut, is in them."""
    length, name = report["length"], report["part"]
    lines = [
        f"{name}: {report['num_examples']:,} examples of {report['num_read']:,} rows,"
        f" {length['tokens']:,} tokens, {length['label_share']:.0%} labels, template"
        f" {report['template']['name']}"
    ]
    for reason, entry in report["rejects"].items():
        kind = checks.RULES.get(reason, f"that can't be used ({reason})")
        first = ", ".join(entry["first"][: checks.SHOWN])
        lines.append(f"  left out {entry['count']:,} {kind}: {first}")
    cut = length["truncated"]
    if cut["count"]:
        lines.append(
            f"  cut {cut['count']:,} examples to data.max_length="
            f"{report['max_length']}, which lost {cut['label_tokens_cut']:,} label"
            f" tokens: {', '.join(cut['first'][: checks.SHOWN])}"
        )
    lines += [f"  {text}" for text in (*report["subsets"], *report["warnings"])]
    return lines

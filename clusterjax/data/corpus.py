"""From rows to a tokenised corpus, cached under the hash of all that it depends on."""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from clusterjax import config as config_lib
from clusterjax import datatypes, errors, files, progress
from clusterjax.data import builder as builder_lib
from clusterjax.data import chat, checks, layouts, sources, store
from clusterjax.data import report as report_lib
from clusterjax.data import tokenizer as tokenizer_lib

# Part of the cache key: goes up when the same data would give another corpus.
VERSION = 1


def load(
    config: config_lib.DataConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    directory: epath.PathLike | None = None,
) -> datatypes.Corpus:
    """The training corpus of `config.sources`.

    Args:
      config: what is read and how.
      tokenizer: the model's.
      directory: folder for report.json, rejects.jsonl and, unless
        `config.cache_dir` is set, the cache; None writes no report and keeps no cache.

    Returns:
      The corpus, its arrays mapped from disk.

    Raises:
      errors.ConfigError: a setting that can't be.
      errors.DataError: data that can't be used; names file, line and cause.
    """
    return _load(config, tokenizer, directory, "train")


def load_eval(
    config: config_lib.DataConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    directory: epath.PathLike | None = None,
) -> datatypes.Corpus | None:
    """The held-out corpus: of `config.eval_sources`, or `config.eval_fraction`.

    Args, errors: as `load`. None when the config holds nothing out.
    """
    if not config.eval_sources and not config.eval_fraction:
        return None
    return _load(config, tokenizer, directory, "eval")


class FoundRow(NamedTuple):
    """Where an example comes from.

    Attributes:
      place: file and line, for people.
      columns: the row as it stands there.
    """

    place: str
    columns: dict[str, Any]


def find_row(
    config: config_lib.DataConfig, uid: str, part: report_lib.Part = "train"
) -> FoundRow:
    """The row of an example's id `source:row:hash`.

    Raises:
      errors.DataError: there is no such row, or its text is another by now.
    """
    _check(config)
    own = part == "eval" and config.eval_sources
    entries = config.eval_sources if own else config.sources
    opened = sources.open_all(entries, config, "data.sources")
    try:
        name, row, digest = uid.rsplit(":", 2)
        source = next(source for source in opened if source.name == name)
        index = int(row)
    except (ValueError, StopIteration) as error:
        names = ", ".join(source.name for source in opened)
        raise errors.DataError(
            f"example id {uid!r} is not source:row:hash with one of the sources {names}"
        ) from error
    for block, layout in builder_lib.blocks(source, "data.sources"):
        for found in block:
            if found.index == index:
                place = source.place(index)
                conversation = builder_lib.convert(layout, source.config, found)
                if not isinstance(conversation, layouts.Conversation):
                    raise errors.DataError(f"{uid}: {place} is no example any more")
                if checks.digest(conversation).short_hex() != digest:
                    raise errors.DataError(f"{uid}: {place} has another text by now")
                return FoundRow(place, dict(found.columns or {}))
    raise errors.DataError(f"{uid}: {name} has no row {index}")


def _check(config: config_lib.DataConfig) -> None:
    if not config.sources:
        raise errors.ConfigError(
            "data.sources is empty; name at least one file or data set"
        )
    if not 0 <= config.eval_fraction < 1:
        raise errors.ConfigError(
            f"data.eval_fraction={config.eval_fraction} must be in [0, 1)"
        )
    if config.eval_fraction and config.eval_sources:
        raise errors.ConfigError(
            "data.eval_fraction and data.eval_sources are both set; use one of them"
        )
    for key in ("sources", "eval_sources"):
        for i, source in enumerate(getattr(config, key)):
            if source.max_examples is not None and source.max_examples < 1:
                raise errors.ConfigError(
                    f"data.{key}[{i}].max_examples={source.max_examples} must be at"
                    " least 1, or None for all"
                )
    for name in ("max_length", "max_line_bytes"):
        if getattr(config, name) < 2:
            raise errors.ConfigError(f"data.{name} must be at least 2")


def _load(
    config: config_lib.DataConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    directory: epath.PathLike | None,
    part: report_lib.Part,
) -> datatypes.Corpus:
    _check(config)
    job = _Job(config, tokenizer, part)
    ingredients = job.ingredients()
    text = json.dumps(ingredients, sort_keys=True)
    key = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    target = None if directory is None else epath.Path(directory)
    root = _cache_root(config, target)
    if target is not None and not store.is_whole(root / key):
        _say_changes(target / _file(part, "report.json"), ingredients)
    folder = store.make_once(root, key, lambda path: job.build(path, ingredients))
    corpus, meta = store.open_corpus(folder)
    for line in report_lib.describe(meta["report"]):
        progress.say(line)
    if target is not None:
        files.write_json(target / _file(part, "report.json"), meta["report"])
        rejects = (folder / store.REJECTS).read_bytes()
        files.write_bytes(target / _file(part, "rejects.jsonl"), rejects)
    return corpus


def _file(part: report_lib.Part, name: str) -> str:
    return name if part == "train" else f"{part}_{name}"


def _cache_root(
    config: config_lib.DataConfig, directory: epath.Path | None
) -> pathlib.Path:
    """A local folder, since arrays are mapped from it."""
    if config.cache_dir:
        return pathlib.Path(os.path.expanduser(config.cache_dir))
    if directory is None:
        root = tempfile.mkdtemp(prefix="clusterjax-corpus-")
        atexit.register(shutil.rmtree, root, ignore_errors=True)
        return pathlib.Path(root)
    if "://" in os.fspath(directory):
        return sources.user_cache() / "corpora"
    return pathlib.Path(directory) / "cache"


def _say_changes(report: epath.Path, ingredients: dict[str, Any]) -> None:
    """Says why the corpus of an earlier start is not used again."""
    try:
        earlier = files.read_json(report)["ingredients"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    changed = [
        f"{group}: {name}" if name else group
        for group in ingredients
        for name in _differences(earlier.get(group), ingredients[group])
    ]
    if changed:
        progress.say(f"data: reading anew, since this changed: {', '.join(changed)}")


def _differences(earlier: Any, now: Any) -> list[str]:
    if isinstance(earlier, dict) and isinstance(now, dict):
        names = dict.fromkeys([*now, *earlier])
        return [name for name in names if earlier.get(name) != now.get(name)]
    return [""] if earlier != now else []


class _Job:
    """Makes one corpus. `origin` is the index of a configured source."""

    def __init__(
        self,
        config: config_lib.DataConfig,
        tokenizer: tokenizer_lib.Tokenizer,
        part: report_lib.Part,
    ):
        self._config, self._tokenizer = config, tokenizer
        self._part: report_lib.Part = part
        own_eval = bool(config.eval_sources)
        self._sources = sources.open_all(config.sources, config, "data.sources")
        self._other: list[sources.Source] = []
        self._key = "data.sources"
        if own_eval:
            held = sources.open_all(config.eval_sources, config, "data.eval_sources")
            if part == "train":
                self._other = held
            else:
                self._sources, self._key = held, "data.eval_sources"
        self._template = chat.load(config.template, tokenizer)

    def ingredients(self) -> dict[str, Any]:
        """Everything that the corpus depends on, under names for people."""
        config = dataclasses.asdict(self._config)
        for name in ("cache_dir", "builtin_dir", "sources", "eval_sources", "template"):
            config.pop(name)  # stands below by content, or does not matter
        listed = [
            dataclasses.asdict(source.config) | {"path": "", "name": source.name}
            for source in (*self._sources, *self._other)
        ]
        digests: dict[str, str] = {}
        for source in (*self._sources, *self._other):
            digests |= source.digests()
        return {
            "file": digests,
            "data": config,
            "sources": listed,
            "tokenizer": self._tokenizer.fingerprint,
            "template": self._template.fingerprint,
            "part": self._part,
            "version": VERSION,
        }

    def build(self, folder: pathlib.Path, ingredients: dict[str, Any]) -> None:
        """Reads, checks, renders, tokenises and writes everything to `folder`."""
        builder = builder_lib.Builder(
            self._config, self._tokenizer, self._template, self._part
        )
        if self._other:
            builder.exclude(self._other)
        with store.Writer(folder) as writer:
            for origin, source in enumerate(self._sources):
                builder.read(origin, source, f"{self._key}[{origin}]", writer)
            builder.report.check_not_empty(builder.rejects)
            writer.finish([source.name for source in self._sources])
        report = builder.report.content(builder.rejects, builder.duplicates)
        report["ingredients"] = ingredients
        meta = {
            "report": report,
            "fingerprint": _fingerprint(folder, self._tokenizer.fingerprint),
            "num_read": report["num_read"],
            "source_names": list(builder.source_names),
            "group_names": list(builder.group_names),
            "sizes": store.sizes(folder),
        }
        store.finish(folder, meta, builder.rejects.all)


def _fingerprint(folder: pathlib.Path, tokenizer: str) -> str:
    names = ("content_hash", "uid", "source_id")
    arrays = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in names]
    return files.hash_arrays(tokenizer, *map(np.asarray, arrays))

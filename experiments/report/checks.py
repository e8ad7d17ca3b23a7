"""What was read and left out, and how the config differs from the defaults."""

from __future__ import annotations

import collections
import dataclasses
import json
from typing import Any

import numpy as np

from clusterjax import config as config_lib
from clusterjax import datatypes
from experiments.report import record as record_lib
from experiments.report import style


def data(record: record_lib.RunRecord) -> str:
    """Counts by source, length figures, rejects by reason."""
    corpus = record.corpus
    rejects = list(corpus.rejects)
    if record.feats is not None:
        rejects += record.feats.rejects
    read = corpus.num_read or corpus.num_examples + len(corpus.rejects)
    intro = (
        f"<p>{read:,} rows read, {corpus.num_examples:,} examples,"
        f" {len(corpus.rejects):,} rejected while reading"
        + (
            f", {len(record.feats.rejects):,} without a usable feature"
            if record.feats is not None
            else ""
        )
        + f"; {int(corpus.lengths.sum()):,} tokens, of which"
        f" {style.percent(corpus.num_labels.sum() / max(corpus.lengths.sum(), 1))}"
        " are labels.</p>"
    )
    return (
        intro + _sources(record) + _lengths(record) + _rejects(rejects) + _facts(record)
    )


def _sources(record: record_lib.RunRecord) -> str:
    corpus, kept_N = record.corpus, record.kept_N
    rows = []
    for s in np.argsort(-np.bincount(corpus.source_id), kind="stable"):
        inside = corpus.source_id == s
        labels = corpus.num_labels[inside]
        rows.append(
            (
                corpus.source_names[s],
                f"{inside.sum():,}",
                style.percent(inside.mean()),
                f"{(kept_N & inside).sum():,}",
                style.percent(kept_N[inside].mean()),
                f"{corpus.lengths[inside].mean():.0f}",
                f"{labels.mean():.0f}",
                style.percent(labels.sum() / corpus.num_labels.sum()),
            )
        )
    heads = (
        "source",
        "examples",
        "of all",
        "kept",
        "kept of it",
        "tokens each",
        "labels each",
        "of all labels",
    )
    numeric = range(1, len(heads))
    return "<h3>Sources</h3>" + style.folded_table(heads, rows, 12, numeric=numeric)


def _lengths(record: record_lib.RunRecord, bins: int = 40) -> str:
    """Histograms of tokens and label tokens per example, drawn in SVG."""
    corpus, limit = record.corpus, record.config.data.max_length
    top = max(int(corpus.lengths.max()), 1)
    edges = np.linspace(0, top, bins + 1)
    blocks = "".join(
        f"<div><p class='note'>{title}: median {np.median(values):.0f}, mean"
        f" {values.mean():.0f}, largest {values.max():,}</p>"
        + histogram(np.histogram(values, edges)[0], shade)
        + "<p class='note' style='display:flex;justify-content:space-between;"
        f"margin:0'><span>0</span><span>{top:,} tokens</span></p></div>"
        for title, values, shade in (
            ("Tokens per example", corpus.lengths, "#0072B2"),
            ("Label tokens per example", corpus.num_labels, "#009E73"),
        )
    )
    cut = int((corpus.lengths >= limit).sum())
    remark = style.note(
        f"{cut:,} examples fill the limit of {limit:,} tokens (data.max_length)."
    )
    return f'<h3>Lengths</h3><div class="pair">{blocks}</div>{remark}'


def histogram(count: np.ndarray, shade: str, height: int = 70) -> str:
    """Bars of equal width; hover gives the count."""
    width, top = 100 / len(count), max(int(count.max()), 1)
    bars = "".join(
        f'<rect x="{i * width:.3f}" y="{height * (1 - n / top):.2f}"'
        f' width="{width * 0.92:.3f}" height="{height * n / top:.2f}" fill="{shade}">'
        f"<title>{n:,}</title></rect>"
        for i, n in enumerate(count.tolist())
    )
    return (
        f'<svg viewBox="0 0 100 {height}" preserveAspectRatio="none" width="100%"'
        f' height="{height}" style="border-bottom:1px solid #b9c1c8">{bars}</svg>'
    )


def _rejects(rejects: list[datatypes.Reject]) -> str:
    if not rejects:
        return "<h3>Rejects</h3>" + style.note("None: every row became an example.")
    by_reason = collections.defaultdict(list)
    for reject in rejects:
        by_reason[reject.reason].append(reject)
    rows = [
        (
            reason,
            f"{len(items):,}",
            ", ".join(f"{item.source}:{item.row}" for item in items[:6])
            + (" …" if len(items) > 6 else ""),
            items[0].detail,
        )
        for reason, items in sorted(by_reason.items(), key=lambda pair: -len(pair[1]))
    ]
    heads = ("reason", "rows", "the first ones (source:row)", "for example")
    return (
        "<h3>Rejects</h3>"
        + style.table(heads, rows, numeric=(1,))
        + style.note("All of them: data/rejects.jsonl in the run folder.")
    )


def _facts(record: record_lib.RunRecord) -> str:
    """The data report as it is, folded."""
    if not record.data_report:
        return ""
    text = json.dumps(record.data_report, indent=2, ensure_ascii=False)
    return (
        "<details><summary>data/report.json</summary>"
        f"<pre>{style.escape(text)}</pre></details>"
    )


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested config → `{"group.key": value}`; sources are numbered."""
    if dataclasses.is_dataclass(value):
        pairs = [
            (field.name, getattr(value, field.name))
            for field in dataclasses.fields(value)
        ]
    elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        pairs = [(f"[{i}]", item) for i, item in enumerate(value)]
    else:
        return {prefix: value}
    result: dict[str, Any] = {}
    for name, item in pairs:
        joint = "" if name.startswith("[") or not prefix else "."
        result |= flat(item, prefix + joint + name)
    return result


def settings(record: record_lib.RunRecord) -> str:
    """Keys that differ from their defaults, all keys folded, and the environment."""
    default, chosen = flat(config_lib.Config()), flat(record.config)
    source = flat(config_lib.SourceConfig(), "source")
    meanings = {name: text for name, _, _, text in config_lib.describe()}
    of_source = {
        name: text for name, _, _, text in config_lib.describe(config_lib.SourceConfig)
    }
    rows = []
    for name, value in chosen.items():
        usual = default.get(name, source.get("source." + name.rpartition(".")[2]))
        if value != usual:
            meaning = meanings.get(name) or of_source.get(name.rpartition(".")[2], "")
            rows.append((name, repr(value), repr(usual), meaning))
    body = (
        style.table(("key", "this run", "default", "meaning"), rows)
        if rows
        else style.note("Every key has its default.")
    )
    every = style.table(("key", "value"), [(k, repr(v)) for k, v in chosen.items()])
    body += f"<details><summary>All {len(chosen)} keys</summary>{every}</details>"
    if record.environment:
        text = json.dumps(record.environment, indent=2, ensure_ascii=False)
        body += (
            "<details><summary>Environment: versions, devices, command</summary>"
            f"<pre>{style.escape(text)}</pre></details>"
        )
    return body

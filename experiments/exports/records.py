"""What is exported of each kept example: text, tokens, labels, cluster, weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from clusterjax import datatypes, errors
from clusterjax.data import builder, checks, layouts, sources
from experiments import saved_run

IGNORED_LABEL = -100


def records(run: saved_run.SavedRun, *, text: bool = True) -> Iterator[dict[str, Any]]:
    """One record for each kept entry, in order of the corpus.

    Columns: `example_id` (row of the corpus), `uid`, `source`, `row`, `cluster_id`,
    `weight` (w_i = M·π_c/q_c, mean 1), `input_ids`, `labels` (−100 where there is no
    label, not shifted), and with `text` the conversation as `messages`.

    Raises:
      errors.PlanError: the run has no plan yet.
      errors.DataError: a source has another text by now.
    """
    plan, corpus = run.plan, run.corpus
    if plan is None:
        raise errors.PlanError(
            f"{run.folder} holds no plan yet; run the stages up to select first"
        )
    found = _messages(run, set(plan.uid.tolist())) if text else {}
    for entry, i in enumerate(plan.example_id.tolist()):
        record = {
            "example_id": i,
            "uid": str(plan.uid[entry]),
            "source": corpus.source_names[corpus.source_id[i]],
            "row": int(corpus.row[i]),
            "cluster_id": int(plan.cluster_id[entry]),
            "weight": float(plan.static_weight[entry]),
            **_tokens(corpus, i),
        }
        if text:
            record["messages"] = found[record["uid"]]
        yield record


def tokenized(run: saved_run.SavedRun) -> Iterator[dict[str, list[int]]]:
    """`input_ids`, `attention_mask` and `labels` of each kept entry, nothing else."""
    for record in records(run, text=False):
        yield {
            "input_ids": record["input_ids"],
            "attention_mask": [1] * len(record["input_ids"]),
            "labels": record["labels"],
        }


def _tokens(corpus: datatypes.Corpus, i: int) -> dict[str, list[int]]:
    tokens, is_label = corpus.example(i)
    labels = np.where(is_label, tokens, IGNORED_LABEL)
    labels[0] = IGNORED_LABEL  # nothing comes before it that could predict it
    return {"input_ids": tokens.tolist(), "labels": labels.tolist()}


def _messages(
    run: saved_run.SavedRun, wanted: set[str]
) -> dict[str, list[dict[str, str]]]:
    """uid → turns, read again from the sources; other columns of turns are left out."""
    found: dict[str, list[dict[str, str]]] = {}
    names: dict[tuple[str, int], str] = {}
    for uid in wanted:
        name, row, _ = uid.rsplit(":", 2)
        names[name, int(row)] = uid
    for source in sources.open_all(run.config.data.sources, run.config.data, "data"):
        for block, layout in builder.blocks(source, "data.sources"):
            for row in block:
                uid = names.get((source.name, row.index))
                if uid is None:
                    continue
                conversation = builder.convert(layout, source.config, row)
                if isinstance(conversation, layouts.Conversation) and (
                    checks.digest(conversation).short_hex() == uid.rsplit(":", 1)[1]
                ):
                    found[uid] = [
                        {"role": turn["role"], "content": turn["content"]}
                        for turn in conversation.messages
                    ]
    missing = wanted - found.keys()
    if missing:
        raise errors.DataError(
            f"{len(missing):,} kept examples are not in the sources any more, or with"
            f" another text, e.g. {min(missing)}; run the stages on the new data, or"
            " export without text (--tokens_only)"
        )
    return found

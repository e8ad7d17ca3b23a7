"""One example's whole way: source row, text, tokens, feature, cluster, plan, updates.

    python -m experiments.trace --workdir runs/quickstart --example 17

The example is named by its row in the corpus or by its uid. The weights of its steps
are computed a second time, from raw label masks and sizes, and must equal those in the
assembled batches; if they do not, the command fails.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from clusterjax import data, errors, steps
from clusterjax import plan as plan_lib
from experiments import saved_run, weight_check

_TEXT_WIDTH = 88


def find(run: saved_run.SavedRun, name: str) -> int:
    """Row of the corpus that `name` (row or uid) means.

    Raises:
      errors.DataError: there is no such example; a reject is told with its reason.
    """
    corpus = run.corpus
    found = np.flatnonzero(corpus.uid == name)
    if len(found):
        return int(found[0])
    if name.isdigit() and int(name) < corpus.num_examples:
        return int(name)
    for reject in corpus.rejects:
        if name in (reject.uid, f"{reject.source}:{reject.row}"):
            raise errors.DataError(
                f"{name} did not become an example: {reject.reason} ({reject.detail})"
            )
    raise errors.DataError(
        f"there is no example {name!r}; give a row from 0 to"
        f" {corpus.num_examples - 1:,}, or a uid like {corpus.uid[0]}"
    )


def trace(run: saved_run.SavedRun, name: str) -> list[str]:
    """Lines that tell the example's way.

    Raises:
      errors.DataError: there is no such example.
      weight_check.WeightError: a weight in a batch is not what METHOD §4 says.
    """
    i = find(run, name)
    lines = _source_lines(run, i) + _token_lines(run, i)
    lines += _feature_lines(run, i) + _cluster_lines(run, i) + _plan_lines(run, i)
    if run.schedule is None:
        return [*lines, "Schedule: none yet; run the stage select"]
    return lines + _update_lines(run, i)


def _source_lines(run: saved_run.SavedRun, i: int) -> list[str]:
    corpus = run.corpus
    lines = [
        f"Example {i}   uid {corpus.uid[i]}",
        f"Source: {corpus.source_names[corpus.source_id[i]]}, row {corpus.row[i]:,}",
    ]
    if corpus.group is not None and corpus.group[i] >= 0:
        lines.append(f"Task family: {corpus.group_names[corpus.group[i]]}")
    return lines + _row_lines(run, i)


def _row_lines(run: saved_run.SavedRun, i: int) -> list[str]:
    """The columns of the source's row, if its text is still the one that was read."""
    try:
        found = data.find_row(run.config.data, str(run.corpus.uid[i]))
    except errors.DataError as error:
        return [f"Row: {error}"]
    return [
        f"Row as read from {found.place}",
        *(f"  {name}: {_short(value)}" for name, value in found.columns.items()),
    ]


def _short(value: object, limit: int = 160) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _token_lines(run: saved_run.SavedRun, i: int) -> list[str]:
    tokens, is_label = run.corpus.example(i)
    first = int(np.argmax(is_label)) if is_label.any() else len(tokens)
    text = run.tokenizer.decode(tokens)
    lines = ["", "Text", *("  | " + line for line in text.splitlines())]
    lines += [
        "",
        f"Tokens: {len(tokens)}, of which {int(is_label[1:].sum())} are labels, the"
        f" first at position {first}. [Labels] are in brackets.",
    ]
    pieces = [run.tokenizer.decode([token]) for token in tokens.tolist()]
    shown = [
        f"[{_visible(piece)}]" if label else _visible(piece)
        for piece, label in zip(pieces, is_label.tolist())
    ]
    return lines + _wrapped(shown)


def _visible(piece: str) -> str:
    return piece.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅"


def _wrapped(words: list[str]) -> list[str]:
    lines, line = [], " "
    for word in words:
        if len(line) + len(word) + 1 > _TEXT_WIDTH:
            lines.append(line)
            line = " "
        line += " " + word
    return [*lines, line]


def _feature_lines(run: saved_run.SavedRun, i: int) -> list[str]:
    feats = run.feats
    if feats is None:
        return ["", "Feature: none; this run selects without features"]
    row = np.flatnonzero(feats.example_id == i)
    if not len(row):
        reason = [r for r in feats.rejects if r.uid == run.corpus.uid[i]]
        why = f"{reason[0].reason} ({reason[0].detail})" if reason else "not computed"
        return ["", f"Feature: none: {why}"]
    r = int(row[0])
    norm = feats.norm
    rank = int((norm > norm[r]).sum()) + 1
    return [
        "",
        f"Feature: {feats.kind}, {feats.values.shape[1]:,} numbers, norm {norm[r]:.5g}"
        f" (place {rank:,} of {len(norm):,} from the greatest)",
        f"  mean loss {feats.loss[r]:.5f} nats per label token"
        f" (median of all {np.median(feats.loss):.5f})",
    ]


def _cluster_lines(run: saved_run.SavedRun, i: int) -> list[str]:
    feats, clusters = run.feats, run.clusters
    if feats is None or clusters is None or i not in feats.example_id:
        return ["", "Cluster: none"]
    r = int(np.flatnonzero(feats.example_id == i)[0])
    c = int(clusters.cluster_id[r])
    # From the feature itself, not the stored distance.
    difference = feats.values[r].astype(np.float64) - clusters.centroids
    distance_K = (difference**2).sum(1)
    inside = clusters.cluster_id == c
    nearer = int((clusters.distance[inside] < clusters.distance[r]).sum())
    size = int(inside.sum())
    nearest = int(distance_K.argmin())
    moved = (
        ""
        if nearest == c
        else f"; centre {nearest} is nearer ({distance_K[nearest]:.5f}) but was full"
    )
    return [
        "",
        f"Cluster: {c} of {clusters.num_clusters}, {size:,} examples;"
        f" squared distance {distance_K[c]:.5f} to its centre{moved}",
        f"  {nearer:,} of them are nearer, {size - nearer - 1:,} farther",
    ]


def _plan_lines(run: saved_run.SavedRun, i: int) -> list[str]:
    plan = run.plan
    if plan is None:
        return ["", "Plan: none yet; run the stage select"]
    row = np.flatnonzero(plan.candidate_id == i)
    if not len(row):
        return ["", "Plan: not a candidate (see above)"]
    r = int(row[0])
    c = int(plan.candidate_cluster[r])
    rule = f"method {plan.method}"
    if plan.method == "cluster":
        rule += f", keep {plan.settings['keep']}, quota {plan.settings['quota']}"
    reason = plan_lib.KEPT_BY_NAMES[plan.kept_by[r]]
    verdict = {
        "pruned": "pruned",
        "rule": "kept by the rule",
        "must_keep": "kept because selection.must_keep names it",
        "source_minimum": "kept for selection.min_per_source",
    }[reason]
    copies = int(plan.copies[r])
    times = f", {copies} times" if copies > 1 else ""
    return [
        "",
        f"Plan: {verdict}{times} ({rule})",
        f"  quota {plan.quota[c]:,} of {plan.cluster_size[c]:,} in its cluster, whose"
        f" share π is {plan.cluster_share[c]:.6f}"
        f" (weighting {plan.weighting}, normalise {plan.normalise})",
    ]


def _update_lines(run: saved_run.SavedRun, i: int) -> list[str]:
    schedule = run.schedule
    assert schedule is not None
    where = schedule.where(i)
    if not where:
        return ["", "Updates: none; the example is in no step"]
    lines = [
        "",
        f"Updates: {len(where)} of {schedule.num_steps:,} steps, on"
        f" {run.num_shards} data shards",
        "  epoch   step  shard  micro-step  row  segment  positions"
        "      u per label token",
    ]
    for epoch, step in where:
        placed = schedule.place(
            step, run.num_shards, run.config.allocation.accumulation_steps
        )
        lines += _place_lines(placed, i, epoch)
    lines.append("")
    for _, step in where:
        check = weight_check.check_step(run, step)
        lines.append(
            f"Checked step {step}: {check.num_tokens:,} weights, derived from label"
            " masks and sizes, equal those of the batch"
        )
        lines.append(
            f"  (largest difference {check.worst:.1e}, allowed"
            f" {weight_check.TOLERANCE:.0e}; the weights sum to {check.total:.9f})"
        )
    return lines


def _place_lines(placed: steps.Placement, i: int, epoch: int) -> list[str]:
    lines = []
    for j in np.flatnonzero(placed.step.example_id == i):
        first = int(placed.start[j])
        last = first + int(placed.length[j]) - 1
        lines.append(
            f"  {epoch:5d}  {placed.step.step:5d}  {placed.shard[j]:5d}"
            f"  {placed.micro_step[j]:10d}  {placed.row[j]:3d}  {placed.segment[j]:7d}"
            f"  {f'{first}–{last}':<13}  {placed.step.weight[j]:.6e}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", required=True, help="run folder")
    parser.add_argument("--example", required=True, help="row of the corpus, or uid")
    arguments = parser.parse_args()
    try:
        lines = trace(saved_run.load(arguments.workdir), arguments.example)
    except errors.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except weight_check.WeightError as error:
        print(f"WRONG WEIGHTS: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

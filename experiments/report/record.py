"""Everything that the report shows of one run, in memory or read from its folder."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from etils import epath

from clusterjax import allocation, config, datatypes, files
from clusterjax import plan as plan_lib
from experiments import history as history_lib
from experiments import saved_run


class Decoder(Protocol):
    """The part of a tokenizer that the report needs."""

    def decode(self, ids: Any) -> str:
        """Text of token ids."""
        ...


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the steps were placed on devices (`Schedule.place`)."""

    num_shards: int
    accumulation_steps: int


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """One run. Panels whose values are None are left out of the page.

    Attributes:
      config: the resolved config.
      corpus: training examples.
      tokenizer: anything with `decode(ids) -> str`.
      feats: gradient features, or None (plain baselines have none).
      clusters: clusters of those features, or None.
      plan: what was kept, or None.
      schedule: which step holds what, or None.
      layout: data shards R and micro-steps A of the run.
      metrics: lines of `metrics.jsonl`.
      ledger: `{"stage", "seconds", "detail"}` in order.
      summary: contents of `summary.json`.
      environment: contents of `environment.json`.
      data_report: contents of `data/report.json`.
      feature_figures: contents of `features/figures.json`.
    """

    config: config.Config
    corpus: datatypes.Corpus
    tokenizer: Decoder
    feats: datatypes.GradientFeatures | None = None
    clusters: datatypes.Clustering | None = None
    plan: plan_lib.SelectionPlan | None = None
    schedule: allocation.Schedule | None = None
    layout: Layout = Layout(1, 1)
    metrics: Sequence[Mapping[str, Any]] = ()
    ledger: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data_report: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    feature_figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def texts(self, i: int) -> tuple[str, str]:
        """(prompt, answer) of example i: its unlabelled and its labelled tokens."""
        tokens, labels = self.corpus.example(i)
        first = int(np.argmax(labels)) if labels.any() else len(tokens)
        return (
            self.tokenizer.decode(tokens[:first].tolist()).strip(),
            self.tokenizer.decode(tokens[labels].tolist()).strip(),
        )

    @functools.cached_property
    def history(self) -> history_lib.History:
        """Training and held-out loss on the clock of the whole run."""
        return history_lib.build(self.metrics, self.ledger)

    @property
    def num_kept(self) -> int:
        """M, or N without a plan."""
        if self.plan is None:
            return self.corpus.num_examples
        return len(np.unique(self.plan.example_id))

    @property
    def kept_N(self) -> np.ndarray:
        """bool [N], whether each example is in the plan."""
        kept_N = np.zeros(self.corpus.num_examples, bool)
        if self.plan is None:
            return ~kept_N
        kept_N[self.plan.example_id] = True
        return kept_N


def read(workdir: epath.PathLike) -> RunRecord:
    """Reads a run folder.

    Raises:
      errors.WorkdirError: the folder holds no run.
    """
    folder = epath.Path(workdir)
    run = saved_run.load(folder)
    ledger = folder / "ledger.json"
    return RunRecord(
        config=run.config,
        corpus=run.corpus,
        tokenizer=run.tokenizer,
        feats=run.feats,
        clusters=run.clusters,
        plan=run.plan,
        schedule=run.schedule,
        layout=Layout(run.num_shards, run.config.allocation.accumulation_steps),
        metrics=saved_run.read_lines(folder / "metrics.jsonl"),
        ledger=files.read_json(ledger) if ledger.exists() else [],
        summary=saved_run.read_json(folder / "summary.json"),
        environment=saved_run.read_json(folder / "environment.json"),
        data_report=saved_run.read_json(folder / "data" / "report.json"),
        feature_figures=saved_run.read_json(folder / "features" / "figures.json"),
    )

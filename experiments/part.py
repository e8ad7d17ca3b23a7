"""One part of a run's training: the steps of one plan."""

from __future__ import annotations

from typing import Any

from clusterjax import allocation, collection, train


def fit(
    run: Any,
    schedule: allocation.Schedule,
    *,
    stop: int,
    total: int,
    start: int = 0,
    collect: collection.Collection | None = None,
) -> train.Result:
    """Trains a `run.Run` from one step of it to another.

    Args:
      run: the run, whose folder holds the checkpoints of all parts.
      schedule: of this part.
      stop: step of the run to stop before.
      total: steps of the whole run, for the learning rate.
      start: step of the run at which the schedule takes over.
      collect: gets the feature of every example that is trained on.

    Raises:
      errors.UserError, train.Preempted: as `train.fit`.
    """
    config = run.config
    return train.fit(
        run.model,
        run.corpus,
        schedule,
        config.train,
        run.mesh,
        run.folder,
        tokenizer=run.tokenizer,
        eval_corpus=run.eval_corpus,
        model_cfg=config.model,
        eval_cfg=config.eval,
        mesh_cfg=config.mesh,
        perf=config.perf,
        report=config.report,
        start_at=start,
        stop_at=stop,
        total_steps=total,
        collect=collect,
    )

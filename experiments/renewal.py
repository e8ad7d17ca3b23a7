"""Training under plans that are renewed on the way (`selection.refresh_every`).

Every so many steps the features, clusters and plan are made again from the parameters
of that moment, in `<workdir>/renewal-<k>/`, and training goes on under the new plan.
Clusters keep the names of the old ones that they continue. Every part resumes like a
run of its own: what is saved is not made again, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from clusterjax import datatypes, progress, train
from clusterjax.clustering import matching
from experiments import first_epoch, part

Stage = Callable[[Any], None]

# Renewed plans cover a fixed number of steps, in as many epochs as that takes.
_MANY_EPOCHS = 10_000


def train_all(run: Any, features: Stage, cluster: Stage, select: Stage) -> train.Result:
    """Trains a `run.Run` to its end.

    Args:
      run: the run, with model, corpus, plan and schedule.
      features, cluster, select: stages that fill a run from what is in its folder, or
        make and save what is missing.
    """
    begin = first_epoch.num_steps(run.config, run.corpus.num_examples)
    total = begin + run.schedule.num_steps
    every = run.config.selection.refresh_every or total
    starts = range(begin, total, every)
    newest = _newest_checkpoint(run)
    current, result = run, None
    for k, start in enumerate(starts):
        stop = min(start + every, total)
        if k:
            before = current.clusters
            current = _renewed(run, current, result, k, stop - start)
            features(current)
            cluster(current)
            _keep_names(current, before)
            select(current)
        if newest > stop:
            continue  # a later part has begun: its plan is saved
        result = part.fit(run, current.schedule, start=start, stop=stop, total=total)
    assert result is not None
    return result


def _renewed(
    run: Any, current: Any, result: train.Result | None, k: int, steps: int
) -> Any:
    """A run for part k whose model is the one trained so far."""
    config = run.config
    allocation = dataclasses.replace(
        config.allocation,
        num_epochs=_MANY_EPOCHS,
        max_steps=steps,
        seed=config.allocation.seed + k,
    )
    progress.say(f"  renewing features, clusters and plan (renewal-{k})")
    renewed = dataclasses.replace(
        current,
        config=dataclasses.replace(config, allocation=allocation),
        folder=run.folder / f"renewal-{k}",
        model=run.model if result is None else result.model,
        features=None,
        clusters=None,
        plan=None,
        schedule=None,
    )
    renewed.corpus = run.corpus  # no argument of its constructor
    return renewed


def _keep_names(run: Any, before: datatypes.Clustering | None) -> None:
    """Names the clusters after those that they continue, when there are as many."""
    after = run.clusters
    if before is None or after is None or before.num_clusters != after.num_clusters:
        return
    names = matching.match_centroids(before.centroids, after.centroids)
    order = np.argsort(names)
    run.clusters = dataclasses.replace(
        after,
        cluster_id=names[after.cluster_id].astype(after.cluster_id.dtype),
        centroids=after.centroids[order],
        floor_sizes=after.floor_sizes[order],
    )


def _newest_checkpoint(run: Any) -> int:
    folder = run.folder / "checkpoints"
    if not folder.exists():
        return -1
    return max((int(p.name) for p in folder.iterdir() if p.name.isdigit()), default=-1)

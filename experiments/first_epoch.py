"""Features from the training passes of a first epoch (`features.during_first_epoch`).

The first epoch trains on all data with the plain mean loss; the features of its
examples are collected on the way, and the later epochs train on what is selected by
them. The plan of the first epoch lies in `<workdir>/first_epoch/`, that of the later
ones in `<workdir>/plan/` as in any other run.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from clusterjax import (
    allocation,
    collection,
    datatypes,
    errors,
    files,
    progress,
    selection,
)
from clusterjax import config as config_lib
from clusterjax import mesh as mesh_lib
from clusterjax.features import collected, model_state
from clusterjax.selection import quotas
from experiments import part

# The later epochs cover a fixed number of steps, in as many epochs as that takes.
_MANY_EPOCHS = 10_000
_WITHOUT_FEATURES = ("full", "random")


def check(config: config_lib.Config) -> None:
    """Refuses a config whose first epoch can't collect what selection needs.

    Raises:
      errors.ConfigError: with the key to change.
    """
    if not config.features.during_first_epoch:
        return
    collected.check(config.features, config.model.compute_dtype)
    if config.selection.method in _WITHOUT_FEATURES:
        raise errors.ConfigError(
            f"selection.method={config.selection.method!r} needs no features; set"
            " features.during_first_epoch=False"
        )
    if config.selection.method == "target":
        raise errors.ConfigError(
            "selection.method='target' compares with features of held-out examples,"
            " which training does not pass over; set features.during_first_epoch=False"
        )
    if config.selection.refresh_every:
        raise errors.ConfigError(
            "set selection.refresh_every or features.during_first_epoch, not both"
        )
    if config.model.lora.dropout:
        raise errors.ConfigError(
            f"model.lora.dropout={config.model.lora.dropout} would be in the collected"
            " features; set it to 0, or features.during_first_epoch=False"
        )
    if config.selection.never_keep:
        raise errors.ConfigError(
            "selection.never_keep names examples that the first epoch would train on;"
            " take them out of the data, or set features.during_first_epoch=False"
        )
    if config.allocation.last_step == "drop":
        raise errors.ConfigError(
            "allocation.last_step='drop' leaves examples of the first epoch without a"
            " feature; set it to 'pad'"
        )
    if config.allocation.max_steps is None:
        _later_steps(config, 1)


def num_steps(config: config_lib.Config, num_examples: int) -> int:
    """Steps of the first epoch; 0 when features come from a pass of their own."""
    if not config.features.during_first_epoch:
        return 0
    return math.ceil(num_examples / config.allocation.batch_size)


def later_allocation(
    config: config_lib.Config, num_examples: int
) -> config_lib.AllocationConfig:
    """Settings of the schedule that the selected examples are trained by.

    Raises:
      errors.ConfigError: `allocation.max_steps` ends inside the first epoch.
    """
    seeded = dataclasses.replace(
        config.allocation, seed=config.seed + config.allocation.seed
    )
    first = num_steps(config, num_examples)
    if not first:
        return seeded
    if config.allocation.max_steps is None:
        later = _later_steps(config, num_examples)
    else:
        later = config.allocation.max_steps - first
    if later < 1:
        raise errors.ConfigError(
            f"allocation.max_steps={config.allocation.max_steps} ends before the first"
            f" epoch does, which has {first:,} steps; raise it, or set"
            " features.during_first_epoch=False"
        )
    return dataclasses.replace(seeded, num_epochs=_MANY_EPOCHS, max_steps=later)


def collect(run: Any) -> collection.Collection:
    """Trains the first epoch of a `run.Run`; returns what it collected.

    A second call goes on from the newest checkpoint, or reads what was collected.
    """
    config, corpus = run.config, run.corpus
    later = later_allocation(config, corpus.num_examples).max_steps
    assert later is not None
    schedule = _schedule(run)
    schedule.plan.save(run.folder / "first_epoch" / "plan")
    total = schedule.num_steps + later
    progress.say("  the first epoch is on all data; it collects the features")
    shards = mesh_lib.num_shards(run.mesh)
    slots = collection.slots_needed(
        schedule.place(step, shards) for step in range(schedule.num_steps)
    )
    found = collection.Collection(
        run.folder / "first_epoch" / "features", schedule.num_steps, slots
    )
    with run.ledger.stage("train") as entry:
        part.fit(run, schedule, stop=schedule.num_steps, total=total, collect=found)
        entry.detail = f"{schedule.num_steps:,} of {total:,} steps, on all data"
    return found


def features_of(run: Any, found: collection.Collection) -> datatypes.GradientFeatures:
    """Features from what `collect` returned."""
    raw_NH, loss_N = found.gather(run.corpus.num_examples)
    origin = files.hash_arrays(
        model_state.fingerprint(model_state.split(run.model)),
        config_lib.fingerprint(run.config.train.optimizer),
        _schedule(run).fingerprint,
    )
    return collected.from_training(
        raw_NH, loss_N, run.corpus, run.config.features, origin
    )


def _schedule(run: Any) -> allocation.Schedule:
    """One epoch over everything, weighted as `selection.method=full` weighs it."""
    config = run.config
    everything = config_lib.SelectionConfig(
        method="full", normalise=config.selection.normalise
    )
    plan = selection.select(None, None, everything, corpus=run.corpus)
    return allocation.allocate(
        plan,
        run.corpus.lengths,
        run.corpus.num_labels,
        dataclasses.replace(
            config.allocation,
            num_epochs=1,
            max_steps=None,
            order="shuffled",
            seed=config.seed + config.allocation.seed,
        ),
    )


def _later_steps(config: config_lib.Config, num_examples: int) -> int:
    """Steps of the later epochs, when the size of the plan is known beforehand.

    The learning rate of the first step depends on the length of the whole run.
    """
    chosen, epochs = config.selection, config.allocation.num_epochs
    if epochs < 2:
        raise errors.ConfigError(
            f"allocation.num_epochs={epochs} leaves no epoch to select for; set 2 or"
            " more, or features.during_first_epoch=False"
        )
    is_open = chosen.method == "cluster" and chosen.quota == "min"
    if is_open or chosen.budget == "tokens":
        key = "quota='min'" if is_open else "budget='tokens'"
        raise errors.ConfigError(
            f"with selection.{key} the number of steps is not known before the first"
            " epoch, and the learning rate needs it; set allocation.max_steps (of the"
            " whole run), or selection.quota='waterfill' with"
            " selection.target_fraction"
        )
    kept = chosen.num_kept
    if kept is None or chosen.method == "cluster":
        kept = quotas.target_count(chosen.target_fraction, num_examples)
    return (epochs - 1) * math.ceil(kept / config.allocation.batch_size)

"""How noisy a run's steps are, at its start and at every checkpoint it kept.

    python -m experiments.mechanism runs/a [--steps 0,20,60] [--renew]

Measured on whole-model sketches whose projections are not those that chose. At every
checkpoint the gradients are sketched anew: how much of the plan's worth is left, how
far the gradients have turned, and, with `--renew`, what a plan made anew from that
moment's features would bring. Step 0 needs a plan only (`--config.stages=select`).
Writes `mechanism.json` into the run folder, where `experiments.compare` finds it.
Checkpoints stay with `train.keep_checkpoints`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath

from clusterjax import (
    allocation,
    checkpoint,
    clustering,
    config,
    datatypes,
    errors,
    features,
    files,
    models,
    selection,
    step,
    subset,
)
from clusterjax import mesh as mesh_lib
from experiments import artifacts, feature_pass, measures, saved_run

# Far from the seeds that choose, which are small: the measuring sketch is another one.
SEED = 104_729
SKETCH = config.FeaturesConfig(kind="probe", k_in=16, k_out=16, dim=4096, seed=SEED)
FILE = "mechanism.json"
_PRINTED = ("noise", "order_noise", "mean_error", "mean_error_random", "cosine")


def kept_coverage(run: saved_run.SavedRun) -> float | None:
    """Share of ground-truth groups in the kept set; None without groups."""
    assert run.plan is not None
    if run.corpus.group is None:
        return None
    kept_N = np.zeros(run.corpus.num_examples, bool)
    kept_N[run.plan.example_id] = True
    return measures.coverage(run.corpus.group, kept_N)


def cluster_purity(run: saved_run.SavedRun) -> float | None:
    """Purity of the plan's clusters by ground-truth group; None without both."""
    plan = run.plan
    assert plan is not None
    if run.corpus.group is None or plan.num_clusters == 1:
        return None
    return measures.purity(plan.candidate_cluster, run.corpus.group[plan.candidate_id])


def figures(run: saved_run.SavedRun) -> dict[str, dict[str, Any]]:
    """Step (as text) → figures, at the start and wherever they were measured before.

    The sketch of the starting model is shared by all runs beside this one.
    """
    found = files.read_json(run.folder / FILE) if (run.folder / FILE).exists() else {}
    return found if "0" in found else {**at_start(run), **found}


def at_start(run: saved_run.SavedRun) -> dict[str, dict[str, Any]]:
    """`{"0": fields of measures.Mechanism}`, on the model that training starts from."""
    return {"0": dataclasses.asdict(_measure(run, _start(run), run.schedule))}


def during(
    run: saved_run.SavedRun, steps: list[int], renew: bool
) -> dict[str, dict[str, Any]]:
    """Figures at checkpoints: `measures.Mechanism`, and what became of the gradients.

    Args:
      run: a finished run with checkpoints.
      steps: checkpoints to look at.
      renew: whether a plan is made anew at each of them, and measured beside.

    Returns:
      Step → fields of `measures.Mechanism`, `cosine` of each example's gradient with
      that at the start (mean), and with `renew` `renewed`: the figures of the new plan.
    """
    start, found = _start(run), {}
    for done in steps:
        model = _at(run, done)
        sketch = _sketch(run, lambda model=model: model, run.folder, f"{done}")
        figures = dataclasses.asdict(_measure(run, sketch, run.schedule))
        figures["cosine"] = measures.staleness(start, sketch)
        if renew:
            planned = _measure(run, sketch, _replanned(run, model))
            figures["renewed"] = dataclasses.asdict(planned)
        found[f"{done}"] = figures
    return found


def checkpoint_steps(run: saved_run.SavedRun) -> list[int]:
    """Steps of the checkpoints that the run kept.

    Raises:
      errors.WorkdirError: there are none, or the run trained adapters only.
    """
    folder = run.folder / "checkpoints"
    if run.config.model.lora.rank:
        raise errors.WorkdirError(
            f"{run.folder} trained adapters (model.lora.rank): the sketches of"
            " checkpoints are made for full fine-tuning only"
        )
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    found = [int(name) for name in names if name.isdigit()]
    if not found:
        raise errors.WorkdirError(
            f"{folder} holds no checkpoints; keep them with train.checkpoint_every and"
            " train.keep_checkpoints"
        )
    return sorted(found)


def _measure(
    run: saved_run.SavedRun,
    sketch: datatypes.GradientFeatures,
    schedule: allocation.Schedule | None,
) -> measures.Mechanism:
    assert schedule is not None
    return measures.mechanism(
        sketch,
        schedule,
        sketch_seed=SKETCH.seed,
        chosen_by=(run.config.features.kind, run.config.features.seed),
        rng=np.random.default_rng(run.config.seed),
    )


def _start(run: saved_run.SavedRun) -> datatypes.GradientFeatures:
    path = run.config.model.path
    return _sketch(run, lambda: models.load(path)[1], run.folder.parent, "start")


def _at(run: saved_run.SavedRun, done: int) -> Any:
    """The run's model with the parameters of a checkpoint."""
    _, model = models.load(run.config.model.path)
    template, _ = step.split(model)
    params = checkpoint.read_params(run.folder / "checkpoints", done)
    return template.merge(params, {})[0]


def _sketch(
    run: saved_run.SavedRun, load: Callable[[], Any], parent: epath.Path, name: str
) -> datatypes.GradientFeatures:
    """Whole-model sketches of all examples, kept on disk."""
    mark = config.fingerprint(SKETCH) + run.corpus.fingerprint[:8]
    folder = parent / f"sketch-{name}-{mark}"
    if not (folder / "features.npz").exists():
        made = features.compute(load(), run.corpus, SKETCH, perf=run.config.perf)
        artifacts.save_features(made, folder)
    return artifacts.load_features(folder)


def _replanned(run: saved_run.SavedRun, model: Any) -> allocation.Schedule:
    """The schedule that the run's settings give with this model's features."""
    cfg, seed = run.config, run.config.seed
    mesh = mesh_lib.build(config.MeshConfig())
    feats = feature_pass.compute(model, run.corpus, cfg, mesh, run.folder / "replanned")
    key = jax.random.key(seed + cfg.clustering.seed)
    clusters = clustering.fit(feats, cfg.clustering, mesh, key, perf=cfg.perf)
    settings = dataclasses.replace(cfg.selection, seed=seed + cfg.selection.seed)
    plan = selection.select(
        clusters, feats, settings, corpus=run.corpus, subset_rules=subset
    )
    return allocation.allocate(
        plan,
        run.corpus.lengths,
        run.corpus.num_labels,
        dataclasses.replace(cfg.allocation, seed=seed + cfg.allocation.seed),
        feats=feats,
        herd=subset.herded_order,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workdir", help="folder of a finished run")
    parser.add_argument("--steps", help="checkpoints; default: all that it kept")
    parser.add_argument(
        "--renew", action="store_true", help="measure plans made anew as well"
    )
    options = parser.parse_args()
    try:
        run = saved_run.load(options.workdir)
        steps = _steps(run, options.steps)
        found = at_start(run) if 0 in steps else {}
        found |= during(run, [s for s in steps if s], options.renew)
    except errors.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    files.write_json(run.folder / FILE, found)
    for done, values in found.items():
        text = ", ".join(f"{k} {v:.3f}" for k, v in values.items() if k in _PRINTED)
        print(f"step {done}: {text}")
    print(f"Written: {run.folder / FILE}")
    return 0


def _steps(run: saved_run.SavedRun, wanted: str | None) -> list[int]:
    if run.plan is None:
        raise errors.WorkdirError(f"{run.folder} holds no plan; finish the run first")
    if wanted == "0":
        return [0]
    kept = [0, *checkpoint_steps(run)]
    steps = list(map(int, wanted.split(","))) if wanted else kept
    if missing := sorted(set(steps) - set(kept)):
        raise errors.WorkdirError(
            f"{run.folder} kept no checkpoint of step {missing[0]}; it has"
            f" {', '.join(map(str, kept))}"
        )
    return steps


if __name__ == "__main__":
    sys.exit(main())

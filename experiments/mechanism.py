"""The measures of `measures.py` for a saved run: sketches, coverage, purity."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from etils import epath

from clusterjax import config, datatypes, features, models
from experiments import artifacts, measures, saved_run

# Added to the seed of the features that chose, so the measuring sketch is another one.
SEED_STEP = 104_729
SKETCH = config.FeaturesConfig(kind="probe", k_in=16, k_out=16, dim=4096)


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


def figures(run: saved_run.SavedRun) -> dict[str, Any]:
    """Mechanism at the start and at the end of training, and how stale features grow.

    The sketch of the starting model is shared by all runs beside this one.
    """
    assert run.schedule is not None
    seed = run.config.features.seed + run.config.seed + SEED_STEP
    settings = dataclasses.replace(SKETCH, seed=seed)
    start = _sketch(run, run.config.model.path, settings, run.folder.parent)
    chosen_by = run.config.features.kind, run.config.features.seed + run.config.seed
    result: dict[str, Any] = {"start": _measure(run, start, settings, chosen_by)}
    if (run.folder / "model").exists():
        end = _sketch(run, str(run.folder / "model"), settings, run.folder)
        result["end"] = _measure(run, end, settings, chosen_by)
        result["cosine_start_end"] = measures.staleness(start, end)
    return result


def _measure(
    run: saved_run.SavedRun,
    sketch: datatypes.GradientFeatures,
    settings: config.FeaturesConfig,
    chosen_by: tuple[str, int],
) -> dict[str, Any]:
    assert run.schedule is not None
    found = measures.mechanism(
        sketch,
        run.schedule,
        sketch_seed=settings.seed,
        chosen_by=chosen_by,
        rng=np.random.default_rng(run.config.seed),
    )
    return dataclasses.asdict(found)


def _sketch(
    run: saved_run.SavedRun,
    model_path: str,
    settings: config.FeaturesConfig,
    parent: epath.Path,
) -> datatypes.GradientFeatures:
    """Whole-model sketches of all examples, kept on disk."""
    mark = config.fingerprint(settings) + run.corpus.fingerprint[:8]
    folder = parent / f"sketch-{mark}"
    if not (folder / "features.npz").exists():
        _, model = models.load(model_path)
        made = features.compute(model, run.corpus, settings, perf=run.config.perf)
        artifacts.save_features(made, folder)
    return artifacts.load_features(folder)

"""A run folder, read back: config, corpus, features, clusters, plan, schedule."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from typing import Any

import ml_collections
import numpy as np
from etils import epath

from clusterjax import allocation, config, data, datatypes, errors, files, models
from clusterjax import plan as plan_lib
from clusterjax.data import tokenizer as tokenizer_lib
from experiments import artifacts, first_epoch


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """What a run left. Values of stages that did not run are None.

    Attributes:
      folder: the run folder.
      config: the resolved config.
      tokenizer: the model's.
      corpus: training examples.
      feats: gradient features.
      clusters: clusters of those features.
      plan: what was kept.
      schedule: which step holds what.
      num_shards: R, data shards of the devices that the run had.
    """

    folder: epath.Path
    config: config.Config
    tokenizer: tokenizer_lib.Tokenizer
    corpus: datatypes.Corpus
    feats: datatypes.GradientFeatures | None
    clusters: datatypes.Clustering | None
    plan: plan_lib.SelectionPlan | None
    schedule: allocation.Schedule | None
    num_shards: int


def load(folder: epath.PathLike) -> SavedRun:
    """Reads a run folder.

    Raises:
      errors.WorkdirError: the folder holds no run.
      errors.PlanError: the plan belongs to other data.
    """
    folder = epath.Path(folder)
    cfg = read_config(folder)
    tokenizer = tokenizer_lib.Tokenizer.load(
        models.checkpoints.directory_of(cfg.model.path)
    )
    # The run has told already what was read and left out.
    with contextlib.redirect_stdout(io.StringIO()):
        corpus = data.load(cfg.data, tokenizer, directory=folder / "data")
    features = folder / "features"
    feats = clusters = plan = schedule = None
    if (features / "features.npz").exists():
        feats = artifacts.load_features(features)
    if (folder / "plan" / "clusters.npz").exists():
        clusters = artifacts.load_clustering(folder / "plan")
    if (folder / "plan" / "plan.json").exists():
        plan = plan_lib.SelectionPlan.load(folder / "plan")
        schedule = allocation.allocate(
            plan,
            corpus.lengths,
            corpus.num_labels,
            first_epoch.later_allocation(cfg, corpus.num_examples),
            feats=feats,
        )
    return SavedRun(
        folder,
        cfg,
        tokenizer,
        corpus,
        feats,
        clusters,
        plan,
        schedule,
        num_shards(cfg.mesh, read_json(folder / "environment.json")),
    )


def read_config(folder: epath.PathLike) -> config.Config:
    """The config of a run folder, as frozen dataclasses."""
    path = epath.Path(folder) / "config.json"
    if not path.exists():
        raise errors.WorkdirError(
            f"{folder} holds no run (no config.json); give the --workdir of a run"
        )
    return config.resolve(_to_config_dict(files.read_json(path)))


def read_json(path: epath.Path) -> dict[str, Any]:
    """Contents of a JSON file, {} when there is none."""
    return files.read_json(path) if path.exists() else {}


def read_lines(path: epath.Path) -> list[dict[str, Any]]:
    """Whole lines of a JSON-lines file; [] when there is none."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def num_shards(mesh: config.MeshConfig, environment: dict[str, Any]) -> int:
    """R = data × fsdp of a mesh on the devices that `environment` lists."""
    devices = len(environment.get("devices", [])) or mesh.num_simulated_devices or 1
    sizes = np.array([mesh.data, mesh.fsdp, mesh.tensor])
    known = int(np.prod(sizes[sizes > 0]))
    data_size, fsdp_size = (devices // known if s < 0 else s for s in sizes[:2])
    return max(int(data_size * fsdp_size), 1)


def _to_config_dict(tree: Any) -> Any:
    if isinstance(tree, dict):
        pairs = {name: _to_config_dict(value) for name, value in tree.items()}
        return ml_collections.ConfigDict(pairs)
    if isinstance(tree, list):
        return tuple(map(_to_config_dict, tree))
    return tree

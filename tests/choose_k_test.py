"""The aid for choosing K, from a run folder to table and page."""

import json

import numpy as np
import pytest

from clusterjax import errors
from experiments import artifacts, choose_k
from tests import planning_cases


def test_true_number_of_groups_stands_out(rng, tmp_path):
    centers = 5 * rng.standard_normal((6, 12))
    values = centers[np.arange(600) % 6] + rng.standard_normal((600, 12))
    feats = planning_cases.features(600, values=values)
    artifacts.save_features(feats, tmp_path / "features")
    choices = choose_k.choose(tmp_path, [2, 4, 6, 8, 12], sample=500, seed=0)
    best = max(choices, key=lambda choice: choice.silhouette)
    assert best.num_clusters == 6
    # Up to six, each centre takes a group of its own; after that it halves one.
    inertia = {choice.num_clusters: choice.inertia for choice in choices}
    assert inertia[4] - inertia[6] > 3 * (inertia[6] - inertia[8])
    saved = json.loads((tmp_path / "choose_k.json").read_text())
    assert [row["num_clusters"] for row in saved] == [2, 4, 6, 8, 12]
    page = (tmp_path / "choose_k.html").read_text()
    assert "Mean silhouette" in page and f"{best.silhouette:+.3f}" in page


def test_a_folder_without_features_is_named(tmp_path):
    with pytest.raises(errors.WorkdirError, match="stages=features"):
        choose_k.choose(tmp_path, [2], sample=10, seed=0)

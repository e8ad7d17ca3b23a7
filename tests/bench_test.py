"""What the benchmarks compute besides times: agreement, medians, ratios."""

import argparse
import json
import pathlib

import numpy as np
import pytest

from clusterjax import errors
from clusterjax.features import agreement
from experiments.bench import __main__ as bench
from experiments.bench import attribution, clustering, passes, planning, record


def test_every_subject_is_a_module():
    folder = pathlib.Path(bench.__file__).parent
    for subject in bench.SUBJECTS:
        text = (folder / f"{subject}.py").read_text(encoding="utf-8")
        assert "def main(" in text, subject


def test_agreement_of_inner_products(rng):
    """Rotations keep every product; scaling rows keeps cosines only."""
    exact = rng.standard_normal((20, 12)) + 1
    rotation, _ = np.linalg.qr(rng.standard_normal((12, 12)))
    found = attribution.agreement(exact @ rotation * 3, exact)
    assert found == pytest.approx({"products": 1.0, "cosines": 1.0})
    scaled = exact * rng.lognormal(size=(20, 1))
    found = attribution.agreement(scaled, exact)
    assert found["cosines"] == pytest.approx(1.0) and found["products"] < 0.9
    products = (exact @ exact.T)[np.triu_indices(20, 1)]
    other = rng.standard_normal((20, 12))
    expected = np.corrcoef(products, (other @ other.T)[np.triu_indices(20, 1)])[0, 1]
    assert attribution.agreement(other, exact)["products"] == pytest.approx(expected)


def test_attribution_rows_are_medians_of_turns():
    def turns(*wall):
        return [{"wall": w, "processor": 2 * w} for w in wall]

    times = {"per_example, sparse": turns(1, 2, 9), "trak": turns(10, 10, 18)}
    quality = {"trak": {"products": 0.5, "cosines": 0.25}}
    table = attribution._table(times, quality, 32)
    assert table.rows[0] == (
        attribution._TITLES["per_example, sparse"], 16, 4 / 32, 1, 1, None, None,
    )  # fmt: skip
    # Ratios within a turn are 10, 5 and 2.
    assert table.rows[1][1:] == (3.2, 20 / 32, 5, 5, 0.5, 0.25)
    assert table.texts()[1][3:] == ("5.00", "5.00", "0.5000", "0.2500")


def test_clustering_rows_are_medians_and_ratios_within_a_turn(capsys):
    def turns(inertia, *wall):
        return [{"wall": w, "processor": w / 2, "inertia": inertia} for w in wall]

    runs = {"clusterjax": turns(10.0, 1, 2, 4), "sklearn": turns(10.5, 3, 8, 8)}
    details = {}
    rows = clustering.report("blobs", 4, runs, details)
    assert rows[0] == ("blobs", 4, "clusterjax", 2, 1, 1.0, 1, 1)
    assert rows[1] == ("blobs", 4, "sklearn", 8, 4, 1.05, 3, 3)
    assert details["blobs, K = 4, sklearn"] == runs["sklearn"]
    assert "1.05000 × our inertia" in capsys.readouterr().out


def test_planning_notes_blocks_in_milliseconds(capsys):
    timed = planning.Times()
    with timed("  select"):
        pass
    timed.figures.append(("peak", 1.5))
    times, figures = timed.tables()
    assert times.rows[0][0] == "select" and times.rows[0][1] < 1000
    assert times.heads[1] == "wall (ms)" and figures.rows == [("peak", 1.5)]
    assert "s processor" in capsys.readouterr().out


def test_a_cheaper_pass_is_measured_by_full_training(tmp_path):
    options = argparse.Namespace(layers=[6], max_tokens=[48], smaller="a/tiny")
    assert passes.variants(options) == {
        "plain": {},
        "first 6 layers": {"features.num_layers": 6},
        "first 48 tokens": {"features.max_tokens": 48},
        "first 6 layers, 48 tokens": {
            "features.num_layers": 6,
            "features.max_tokens": 48,
        },
        "bfloat16": {"features.compute_dtype": "bfloat16"},
        "smaller model (tiny)": {"features.model": "a/tiny"},
    }
    # A run that went on after a stop has two entries of a stage.
    entries = [
        {"stage": "features", "seconds": 2.0, "processor_seconds": 3.0},
        {"stage": "train", "seconds": 9.0, "processor_seconds": 16.0},
        {"stage": "features", "seconds": 1.0, "processor_seconds": 1.0},
    ]
    (tmp_path / "ledger.json").write_text(json.dumps(entries))
    seconds = passes.stage(tmp_path, "features")
    assert seconds == {"wall": 3.0, "processor": 4.0}
    found = agreement.Agreement(5, 0.5, 0.25, None, 1.0)
    texts = record.Table(
        "passes",
        passes._HEADS,
        [passes._row("cheap", seconds, passes.stage(tmp_path, "train"), found)],
        passes._DIGITS,
    ).texts()
    assert texts == [("cheap", "3.0", "4.0", "0.2500", "0.500", "0.250", "–", "1.000")]
    with pytest.raises(errors.UserError, match="no stage cluster"):
        passes.stage(tmp_path, "cluster")

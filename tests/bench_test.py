"""What the benchmarks compute besides times: agreement, medians, ratios."""

import argparse
import importlib
import json

import numpy as np
import pytest

from clusterjax import errors
from clusterjax.features import agreement
from experiments.bench import __main__ as bench
from experiments.bench import (
    answers,
    attribution,
    clustering,
    collecting,
    passes,
    planning,
    record,
    training,
)


def test_every_subject_is_a_module():
    """All in one process: settings of one must not clash with those of another."""
    for subject in bench.SUBJECTS:
        module = importlib.import_module(f"experiments.bench.{subject}")
        assert callable(module.main), subject


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


def test_clustering_is_compared_on_blobs_and_on_features(tmp_path, monkeypatch):
    seen = {(40, 6): [], (40, 3): []}

    def peer(python, name, path, k, *_):
        values = np.load(path)
        seen[values.shape].append(values)
        return {"wall": 1.0, "processor": 1.0, "inertia": 1.0}

    monkeypatch.setattr(clustering, "peer", peer)
    features = np.eye(5, 3, dtype=np.float32) + 1
    np.save(tmp_path / "features.npy", features)
    options = argparse.Namespace(
        **{"rows": 40, "dim": 6, "clusters": [2, 3], "seeds": 1, "iterations": 2},
        **{"features": str(tmp_path / "features.npy"), "peer_python": "none"},
        draw=0,
    )
    tables = clustering.measure(options, ["kmeans", "equal"], {})
    assert [table.name for table in tables] == ["kmeans", "equal"]
    for table in tables:
        found = {(row[0].split(",")[0], row[1]) for row in table.rows}
        assert found == {(data, k) for data in ("blobs", "features") for k in (2, 3)}
    # Each part and each peer reads the very rows that the tables name.
    for values in seen.values():
        assert len(values) == 6
        assert all(np.array_equal(values[0], other) for other in values)
    directions = features / np.linalg.norm(features, axis=1, keepdims=True)
    assert np.max(seen[40, 3][0] @ directions.T, axis=1).min() > 0.9


def test_a_training_turn_takes_each_step_twice_and_keeps_both():
    clock = iter(range(1, 10))

    def step():
        return training.Seconds(next(clock), 0)

    taken = training.turn({"peer": step, "ours": step})
    walls = {name: step.wall for name, step in taken.items()}
    assert walls == {"peer_first": 1, "peer": 2, "ours_first": 3, "ours": 4}


def test_training_is_told_by_medians_of_ratios_within_a_turn():
    def pairs(*wall):
        return [(w, 2 * w) for w in wall]

    found = {
        "peer": "torch",
        "peer_seconds": pairs(4, 6, 8),
        "ours_seconds": pairs(2, 2, 8),  # ratios 2, 3 and 1
        "packed_seconds": pairs(1, 3, 2),  # 4, 2 and 4
        "peer_first_seconds": pairs(5, 5, 5),
        "ours_first_seconds": pairs(10, 10, 5),  # 0.5, 0.5 and 1
        "packed_first_seconds": pairs(5, 4, 4),  # 1, 1.25 and 1.25
        "weighted_seconds": pairs(3, 3, 3),
        "plain_seconds": pairs(2, 3, 4),
        **{"tokens": 360, "labels": 90, "weighted_flops_over_plain": 1.5},
    }
    speed, ratios, weights = training.tables(found)
    assert [row[1:] for row in ratios.rows] == [(2, 2), (4, 4), (0.5, 0.5), (1.25,) * 2]
    assert [row[1:] for row in speed.rows] == [(20, 5), (30, 7.5), (None, 15)]
    assert [row[1] for row in weights.rows] == [1, 1, 1.5]


def test_collecting_is_told_by_medians_and_ratios_within_a_round():
    def rounds(*wall):
        return [{"wall": w, "processor": 2 * w} for w in wall]

    found = {
        "examples": 8,
        "tokens": 900,
        "rounds": {"step": rounds(1, 2, 4), "collects": rounds(1.5, 2.2, 9)},
        "flops_ratio": 1.02,
    }
    steps, setup = collecting.tables(found)
    assert steps.rows[0] == ("step", 2, 4, 1, 1)
    # Ratios within a round are 1.5, 1.1 and 2.25.
    assert steps.rows[1] == ("collects", 2.2, 4.4, 1.5, 1.5)
    assert setup.rows[-1][1] == 1.02


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


def test_answers_are_paired_with_those_of_random():
    def of(**by_task):
        return {f"skills_{task}": value for task, value in by_task.items()}

    found = {
        "paper": {
            0: of(choice=0.5, exact=0.1, bits=2.0),
            1: of(choice=0.7, exact=0.1, bits=2.5),
        },
        "random": {
            0: of(choice=0.4, exact=0.2, bits=2.1),
            1: of(choice=0.5, exact=0.2, bits=2.4),
            2: of(choice=0.9, exact=0.2, bits=9.0),
        },
    }
    paper, random = answers.table(found).texts()
    # Differences 0.1 and 0.2: half of a 95 % t-interval is 12.706 × 0.05.
    assert paper[:4] == ("paper", "2", "0.600 ± 1.271", "+0.150 ± 0.635")
    assert paper[5] == "−0.100 ± 0.000" and paper[7] == "+0.000 ± 1.271"
    assert random[1] == "3" and random[3] == random[5] == random[7] == "–"


def test_answers_are_kept_in_the_run_folder(tmp_path, monkeypatch):
    asked = []

    def evaluate(options):
        asked.append((options.model, options.tasks))
        return {
            "skills_choice": {"acc,none": 0.25, "acc_norm,none": 0.5},
            "skills_exact": {"exact_match,none": 0.0},
            "skills_bits": {"bits_per_byte,none": 2.5},
        }

    monkeypatch.setattr(answers.evaluate, "evaluate", evaluate)
    with pytest.raises(errors.UserError, match="train.save_model=True"):
        answers.scores(tmp_path)
    (tmp_path / "model").mkdir()
    expected = {"skills_choice": 0.25, "skills_exact": 0.0, "skills_bits": 2.5}
    assert answers.scores(tmp_path) == answers.scores(tmp_path) == expected
    assert asked == [(f"{tmp_path}/model", "skills_choice,skills_exact,skills_bits")]
    with pytest.raises(errors.UserError, match="best: the results hold"):
        answers.measure([], ["best"])

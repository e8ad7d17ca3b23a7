"""Comparisons: the grid, paired statistics, measures by brute force, resuming."""

import dataclasses
import json
import pathlib
import subprocess

import numpy as np
import pytest
import synthetic_run

from clusterjax import config, datatypes, errors
from experiments import (
    compare,
    comparison,
    comparison_page,
    grid,
    intervals,
    measures,
)

BASE = """
from clusterjax import config as config_lib


def get_config():
    config = config_lib.default()
    config.data.sources = (config_lib.source(path="rows.jsonl"),)
    return config
"""


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "base.py"
    path.write_text(BASE)
    return str(path)


def _comparison(base, **changes):
    made = grid.Comparison(
        base=base,
        methods={
            "full": {"selection.method": "full"},
            "random": {"selection.method": "random"},
            "cluster": {},
        },
        seeds=(0, 1),
        budget_of="cluster",
    )
    return dataclasses.replace(made, **changes)


def test_the_method_that_sets_the_budget_runs_first(base):
    names = [trial.name for trial in grid.trials(_comparison(base))]
    assert names == [
        "cluster-s0", "full-s0", "random-s0", "cluster-s1", "full-s1", "random-s1",
    ]  # fmt: skip


def test_baselines_get_the_size_of_the_plan(base):
    made = _comparison(base)
    sized = {
        trial.method: grid.trial_config(made, grid.with_size(trial, made, 70, 0.23))
        for trial in grid.trials(made)
        if trial.seed == 1
    }
    assert sized["random"].selection.num_kept == 70
    assert sized["full"].selection.num_kept is None
    assert sized["cluster"] == grid.trial_config(made, grid.trials(made)[3])
    assert {cfg.seed for cfg in sized.values()} == {1}
    tokens = dataclasses.replace(made, budget_kind="tokens")
    trial = next(t for t in grid.trials(tokens) if t.method == "random")
    chosen = grid.trial_config(tokens, grid.with_size(trial, tokens, 70, 0.23))
    assert chosen.selection.budget == "tokens"
    assert chosen.selection.target_fraction == 0.23


def test_a_stated_size_is_left_alone(base):
    methods = {
        "cluster": {},
        "few": {"selection.method": "random", "selection.target_fraction": 0.05},
    }
    made = _comparison(base, methods=methods)
    few = next(t for t in grid.trials(made) if t.method == "few")
    assert grid.with_size(few, made, 70, 0.23) == few


def test_budgets_multiply_all_methods_but_full(base):
    methods = {
        "full": {"selection.method": "full"},
        "random": {"selection.method": "random"},
        "even": {"selection.quota": "waterfill"},
    }
    made = _comparison(base, methods=methods, budget_of="", budgets=(0.2, 0.4))
    found = [t.name for t in grid.trials(made) if t.seed == 0]
    assert found == ["full-s0", "random-b0.2-s0", "random-b0.4-s0", "even-b0.2-s0",
                     "even-b0.4-s0"]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"methods": {"a": {"selection.ratoi": 0.5}}, "budget_of": ""}, "ratoi"),
        ({"budget_of": "clusters"}, "not one of the methods full, random, cluster"),
        ({"budgets": (0.5,)}, "not both"),
        ({"budgets": (0.5,), "budget_of": ""}, "quota='waterfill'"),
        ({"seeds": ()}, "at least one method and one seed"),
    ],
)
def test_impossible_comparisons_are_named(base, changes, text):
    with pytest.raises(errors.ConfigError, match=text):
        grid.trials(_comparison(base, **changes))


@pytest.mark.parametrize("name", ["quickstart", "methods", "ablations"])
def test_the_configs_that_come_along(name, monkeypatch):
    monkeypatch.chdir(pathlib.Path(__file__).parent.parent)
    made = grid.load(f"configs/compare_{name}.py")
    planned = grid.trials(made)
    assert len(planned) == len(made.methods) * len(made.seeds)
    assert planned[0].method == made.budget_of
    configs = [
        grid.trial_config(made, grid.with_size(trial, made, 700, 0.2))
        for trial in planned
    ]
    assert len({config.fingerprint(cfg) for cfg in configs}) == len(planned)


def test_keys_from_the_command_line():
    keys = grid.parse_keys(["a.b=3", "c=text", "d=0.5", "e=('q', 'v')", "f=None"])
    assert keys == {"a.b": 3, "c": "text", "d": 0.5, "e": ("q", "v"), "f": None}
    with pytest.raises(errors.ConfigError, match="KEY=VALUE"):
        grid.parse_keys(["a.b"])


def test_interval_by_hand():
    """Mean 2, standard deviation 1, t(0.975, 2) = 4.302653: ± 4.302653 / √3."""
    found = intervals.interval([1.0, 2.0, 3.0])
    assert (found.mean, found.count) == (2.0, 3)
    assert found.half_width == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert found.text(2) == "2.00 ± 2.48"
    assert intervals.interval([1.5]).text(2) == "1.50"
    assert intervals.interval([]).text() == "–"


def test_pairing_takes_out_what_seeds_share():
    values = {0: 1.0, 1: 5.0, 2: 9.0, 3: 7.0}
    reference = {0: 1.1, 1: 5.2, 2: 9.0, 9: 0.0}
    found = intervals.paired(values, reference)
    assert found.mean == pytest.approx(-0.1) and found.count == 3
    assert found.half_width < 0.3
    assert found.text(2, sign=True) == "−0.10 ± 0.25"


def _row(method, seed, loss, **changes):
    point = {"step": 9, "seconds": 50.0, "label_tokens": 900, "loss": loss}
    start = {"step": 0, "seconds": 10.0, "label_tokens": 0, "loss": 4.0}
    sources = {"a": loss - 0.5, "b": loss + 1.5}
    row = comparison.Row(
        method=method,
        seed=seed,
        budget=None,
        command="-m experiments.run",
        folder=f"runs/{method}-{seed}",
        kept=300 if method == "full" else 100,
        examples=300,
        kept_labels=1000,
        steps=9,
        stages={"data": 4.0, "train": 40.0, "report": 99.0},
        fingerprints={"data": "d", "features": "f"},
        heldout=[{**start, "sources": sources}, {**point, "sources": sources}],
    )
    return dataclasses.replace(row, **changes)


@pytest.fixture
def result():
    rows = []
    for seed in (0, 1, 2):
        noise = 0.3 * seed
        rows += [
            _row("full", seed, 2.0 + noise),
            _row("random", seed, 2.2 + noise),
            _row(
                "cluster <b>", seed, 2.1 + noise + 0.001 * seed,
                stages={"data": 4.0, "features": 6.0, "cluster": 1.0, "select": 0.5,
                        "train": 20.0},
                coverage=0.9, purity=0.75,
                mechanism={"0": dataclasses.asdict(
                    measures.Mechanism(0.7, 0.8, 0.1, 0.2, 5))},
            ),
        ]  # fmt: skip
    return comparison.Comparison(rows)


def test_table_by_hand(result):
    rows = {
        row[0]: dict(zip(comparison.HEADS, row)) for row in comparison.table(result)
    }
    cluster = rows["cluster <b>"]
    assert cluster["kept"] == "100 (33.3 %)"
    assert cluster["label tokens kept"] == "1,000"
    assert cluster["− full"].startswith("+0.1010 ± 0.002")
    assert cluster["− random"].startswith("−0.0990 ± 0.002")
    assert cluster["mean over sources"].startswith("2.9010 ± ")
    assert cluster["selection (s)"].startswith("7.5 ±")
    assert cluster["total (s)"].startswith("32 ±") or cluster["total (s)"].startswith(
        "31"
    )
    assert rows["full"]["− full"] == "–" and rows["full"]["total (s)"].startswith(
        "44 ±"
    )
    text = comparison.markdown(result)
    assert "exact match" not in text and "paired by seed" in text
    assert "| cluster <b> | 0 | 0.700 ± 0.000 | 0.800" in text


def test_page_is_self_contained_and_escaped(result, tmp_path):
    comparison_page.write(result, tmp_path / "compare.html", "a & b")
    text = (tmp_path / "compare.html").read_text(encoding="utf-8")
    assert "cluster <b>" not in text.split("<script")[0].split("</script>")[-1]
    assert "<h1>a &amp; b</h1>" in text
    assert text.count("<section") == 6 and "Balance, clusters, answers" in text


def test_reused_stages_count_at_their_first_cost():
    stages = {"data": 9.0, "features": 30.0, "train": 40.0}
    rows = [
        _row("cluster", 0, 2.0, stages=stages),
        _row("cluster", 1, 2.0, stages={"data": 1.0, "features": 0.2, "train": 41.0}),
        _row("random", 0, 2.0, stages={"data": 1.5, "train": 42.0}),
        _row("other", 0, 2.0, stages={"data": 1.0, "features": 5.0, "train": 1.0},
             fingerprints={"data": "d", "features": "other model"}),
    ]  # fmt: skip
    counted = compare.with_shared_seconds(rows)
    assert [row.seconds for row in counted] == [79.0, 80.0, 51.0, 15.0]


def _fake_run(calls):
    """Stands for `experiments.run`: leaves config and summary, as a finished run."""

    def run(command, **_):
        calls.append(command)
        flags = dict(item.split("=", 1) for item in command if "=" in item)
        folder = flags.pop("--workdir")
        keys = {k.removeprefix("--config."): v for k, v in flags.items()}
        seed = int(keys["seed"])
        cfg = config.Config(
            seed=seed,
            data=config.DataConfig(sources=(config.SourceConfig(path="rows.jsonl"),)),
            selection=config.SelectionConfig(
                method=keys.get("selection.method", "cluster")
            ),
        )
        assert keys["data.cache_dir"] and keys["features.store_dir"]
        cfg = dataclasses.replace(
            cfg,
            features=config.FeaturesConfig(store_dir=keys["features.store_dir"]),
        )
        with open(f"{folder}/config.json", "w") as file:
            json.dump(dataclasses.asdict(cfg), file)
        summary = {"final_eval": {"loss": 2.0}, "num_kept": 5, "seconds_total": 1.0}
        with open(f"{folder}/summary.json", "w") as file:
            json.dump(summary, file)
        return subprocess.CompletedProcess(command, 0)

    return run


def test_each_run_is_made_once(base, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(compare.subprocess, "run", _fake_run(calls))
    monkeypatch.setattr(compare, "_size", lambda folder, kind: (70, 0.2))
    monkeypatch.setattr(
        compare.Runner,
        "_row",
        lambda self, trial, _: _row(trial.method, trial.seed, 2.0),
    )
    methods = {"cluster": {}, "full": {"selection.method": "full"}}
    made = _comparison(base, methods=methods)
    runner = compare.Runner(made, tmp_path / "runs")
    assert len(runner.run_all()) == 4 and len(calls) == 4
    assert len(runner.run_all()) == 4 and len(calls) == 4
    (tmp_path / "runs" / "full-s1" / "summary.json").unlink()
    runner.run_all()
    assert len(calls) == 5 and f"--workdir={tmp_path}/runs/full-s1" in calls[-1]
    old = tmp_path / "old-version"
    old.mkdir()
    (old / "summary.json").write_text("{}")
    (old / "config.json").write_text('{"gone": 1}')
    assert not compare._is_finished(old, config.Config())
    elsewhere = dataclasses.replace(made, finished=(f"{tmp_path}/runs/cluster-s0",))
    compare.Runner(elsewhere, tmp_path / "again").run_all()
    assert len(calls) == 8  # cluster-s0 is not made again


def test_a_failed_run_shows_its_last_lines(base, tmp_path, monkeypatch):
    def fail(command, stdout, **_):
        stdout.write("error: data.sources is empty\n")
        stdout.flush()
        return subprocess.CompletedProcess(command, 2)

    monkeypatch.setattr(compare.subprocess, "run", fail)
    with pytest.raises(errors.UserError, match=r"data\.sources is empty"):
        compare.Runner(_comparison(base), tmp_path / "runs").run_all()


def test_coverage_and_purity_by_hand():
    group = np.array([0, 0, 1, 2, 2, -1])
    kept = np.array([True, False, False, True, False, True])
    assert measures.coverage(group, kept) == pytest.approx(2 / 3)
    cluster = np.array([0, 0, 0, 1, 0, 1])
    # Cluster 0 holds groups 0 0 1 2, cluster 1 holds group 2: 2 + 1 of 5 known.
    assert measures.purity(cluster, group) == pytest.approx(3 / 5)


def _sketch(run, rng, width=12):
    """Gradients of every example, some sources pointing their own way."""
    corpus = run.corpus
    direction = rng.standard_normal((len(corpus.source_names), width))
    raw = direction[corpus.source_id] + rng.standard_normal(
        (corpus.num_examples, width)
    )
    norm = np.linalg.norm(raw, axis=1)
    return dataclasses.replace(
        run.feats,
        values=(raw / norm[:, None]).astype(np.float32),
        norm=norm.astype(np.float32),
        kind="probe",
    )


def _measure(run, sketch, **changes):
    keys = {
        "sketch_seed": 5,
        "chosen_by": ("proxy", 5),
        "rng": np.random.default_rng(1),
    }
    return measures.mechanism(sketch, run.schedule, **{**keys, **changes})


def test_mean_gradient_of_everything_has_no_error(rng):
    run = synthetic_run.saved(
        selection_keys={"keep": "all", "share": "tokens"},
        allocation_keys={"max_steps": 1, "last_step": "pad"},
    )
    whole = dataclasses.replace(run.config.allocation, batch_size=300)
    run = dataclasses.replace(run, schedule=_reallocated(run, whole))
    found = _measure(run, _sketch(run, rng))
    assert found.mean_error < 1e-5
    assert found.mean_error_random < 1e-5  # random subsets of all examples are all


def _reallocated(run, cfg):
    from clusterjax import allocation

    return allocation.allocate(run.plan, run.corpus.lengths, run.corpus.num_labels, cfg)


def test_noise_equals_brute_force(rng):
    """Planned steps token by token from the weights, against the fast form."""
    run = synthetic_run.saved()
    sketch = _sketch(run, rng)
    gradient = sketch.values.astype(np.float64) * sketch.norm[:, None]
    steps, full = [], []
    for step in run.schedule:
        total = np.zeros(12)
        for i, u in zip(step.example_id, step.weight):
            for _ in range(int(run.corpus.num_labels[i])):
                total += u * gradient[i]
        steps.append(total)
        if len(step.example_id) == 16:
            full.append(total)
    assert len(steps) > len(full)
    noise = ((full - np.mean(full, 0)) ** 2).sum() / (len(full) - 1)
    center = np.mean(steps, 0)
    labels = run.corpus.num_labels
    everything = (labels[:, None] * gradient).sum(0) / labels.sum()
    found = _measure(run, sketch)
    expected = np.linalg.norm(center - everything) / np.linalg.norm(everything)
    assert found.mean_error == pytest.approx(expected, rel=1e-4)
    draws = np.random.default_rng(3)
    plain = []
    for _ in range(40):
        order = draws.permutation(300)[:288].reshape(18, 16)
        means = np.stack(
            [(labels[o][:, None] * gradient[o]).sum(0) / labels[o].sum() for o in order]
        )
        plain.append(((means - means.mean(0)) ** 2).sum() / 17)
    assert found.noise == pytest.approx(noise / np.mean(plain), rel=0.15)


def test_balanced_steps_are_quieter_where_clusters_tell_gradients_apart(rng):
    """Gradients that are equal inside a cluster: planned steps have no noise at all."""
    run = synthetic_run.saved()
    center = rng.standard_normal((4, 12))[run.clusters.cluster_id]
    norm = np.linalg.norm(center, axis=1)
    sketch = dataclasses.replace(
        _sketch(run, rng),
        values=(center / norm[:, None]).astype(np.float32),
        norm=norm.astype(np.float32),
    )
    found = _measure(run, sketch)
    assert found.noise < 1e-6 and found.order_noise < 1e-6


def test_a_plan_is_never_measured_on_the_sketch_that_chose(rng):
    run = synthetic_run.saved()
    with pytest.raises(errors.ConfigError, match="would flatter"):
        _measure(run, _sketch(run, rng), chosen_by=("probe", 5))


def test_staleness_is_the_mean_cosine(rng):
    run = synthetic_run.saved()
    before = _sketch(run, rng)
    assert measures.staleness(before, before) == pytest.approx(1, abs=1e-6)
    opposite = dataclasses.replace(before, values=-before.values)
    assert measures.staleness(before, opposite) == pytest.approx(-1, abs=1e-6)


def test_a_kept_example_without_gradient_is_named(rng):
    run = synthetic_run.saved()
    sketch = _sketch(run, rng)
    kept = int(run.plan.example_id[3])
    names = [f.name for f in dataclasses.fields(datatypes.GradientFeatures)]
    without = {
        name: np.delete(getattr(sketch, name), kept, axis=0)
        for name in names
        if isinstance(getattr(sketch, name), np.ndarray)
    }
    with pytest.raises(errors.PlanError, match=f"no gradient of example {kept}"):
        _measure(run, dataclasses.replace(sketch, **without))

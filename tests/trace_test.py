"""The traced weights: a second derivation that must find planted faults."""

import dataclasses
import json

import numpy as np
import pytest
import synthetic_run

from clusterjax import batching, config, errors
from experiments import run, trace, weight_check

CASES = {
    "paper": ({}, {}),
    "example normaliser": ({"normalise": "example"}, {}),
    "token share": ({"share": "tokens", "keep": "nearest"}, {"num_epochs": 3.0}),
    "sqrt": ({"weighting": "sqrt", "quota": "waterfill"}, {}),
    "uniform weights": ({"weighting": "uniform"}, {}),
    "one mean": ({"weighting": "none"}, {}),
    "rare clusters": ({"quota": "waterfill", "target_fraction": 0.9}, {}),
    "padded rows": ({}, {"packing": False, "accumulation_steps": 2}),
    "dropped last step": ({}, {"last_step": "drop"}),
    "random": ({"method": "random"}, {}),
    "full": ({"method": "full"}, {}),
    "uniform sampling": ({"method": "uniform"}, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("weighted", [False, True])
def test_batches_hold_the_derived_weights(case, weighted):
    selection_keys, allocation_keys = CASES[case]
    run = synthetic_run.saved(
        weighted=weighted,
        selection_keys=selection_keys,
        allocation_keys=allocation_keys,
    )
    assert run.schedule is not None
    for step in range(run.schedule.num_steps):
        assert weight_check.check_step(run, step).worst <= weight_check.TOLERANCE


def test_weights_of_an_epoch_sum_to_its_steps_when_clusters_are_rare():
    run = synthetic_run.saved(
        num_examples=400,
        num_clusters=24,  # more clusters than the 16 examples of a step
        selection_keys={"quota": "waterfill"},
    )
    assert run.schedule is not None
    checks = [
        weight_check.check_step(run, step)
        for step in range(run.schedule.steps_per_epoch)
    ]
    assert np.mean([check.total for check in checks]) == pytest.approx(1, abs=1e-12)
    assert max(check.total for check in checks) > 1.001


def test_two_clusters_by_hand():
    """π_c = n_c / 4 over the label tokens of the cluster in the one step of four."""
    run = synthetic_run.saved(
        num_examples=4, num_clusters=2, selection_keys={"keep": "all"}
    )
    assert (
        run.plan is not None and run.schedule is not None and run.clusters is not None
    )
    size = np.bincount(run.clusters.cluster_id, minlength=2)
    step = run.schedule.step(0)
    derived = weight_check.derive_weights(run, 0)
    for i, c in zip(step.example_id.tolist(), step.cluster_id.tolist()):
        in_cluster = step.example_id[step.cluster_id == c]
        labels = run.corpus.num_labels[in_cluster].sum()
        expected = size[c] / 4 / labels
        found = [u for (j, _), u in derived.items() if j == i]
        assert found == pytest.approx([expected] * len(found), rel=1e-12)
    assert len(step.example_id) == 4


@pytest.mark.parametrize(
    "fault",
    [
        lambda plan: {"cluster_share": plan.cluster_share[::-1]},
        lambda plan: {"weighting": "none"},
        lambda plan: {"normalise": "example"},
        lambda plan: {"cluster_share": plan.cluster_share * (1 + 1e-5)},
    ],
)
def test_a_wrong_weight_is_found(fault):
    """The schedule is made from a spoilt plan, the derivation from the true one."""
    run = synthetic_run.saved()
    assert run.plan is not None and run.schedule is not None
    run.schedule.plan = dataclasses.replace(run.plan, **fault(run.plan))
    with pytest.raises(weight_check.WeightError):
        weight_check.check_step(run, 0)


def test_a_weight_beside_its_label_is_found(monkeypatch):
    run = synthetic_run.saved()
    fill = batching.fill

    def shifted(corpus, placed):
        batch = fill(corpus, placed)
        return batch._replace(loss_weights=np.roll(batch.loss_weights, 1, axis=-1))

    monkeypatch.setattr(batching, "fill", shifted)
    with pytest.raises(weight_check.WeightError, match="only one of batch"):
        weight_check.check_step(run, 0)


def test_trace_tells_the_whole_way(monkeypatch):
    run = synthetic_run.saved()
    monkeypatch.setattr(trace, "_row_lines", lambda run, i: ["Row as read from here"])
    assert run.plan is not None and run.schedule is not None
    kept = int(run.plan.example_id[0])
    text = "\n".join(trace.trace(run, str(kept)))
    for word in (
        f"Example {kept}",
        synthetic_run.INJECTION,
        "labels, the first at position",
        "Feature: proxy, 24 numbers",
        "Cluster: ",
        "Plan: kept by the rule (method cluster, keep farthest, quota min)",
        "Updates: 2 of",
        "Checked step",
    ):
        assert word in text, word
    for _, step in run.schedule.where(kept):
        assert f"Checked step {step}:" in text
    pruned = str(int(run.plan.pruned_id[0]))
    text = "\n".join(trace.trace(run, pruned))
    assert "Plan: pruned" in text and "in no step" in text
    assert trace.find(run, run.corpus.uid[5]) == 5


def test_command_on_a_real_folder(tmp_path, monkeypatch, capsys):
    rows = [
        {"instruction": f"Add {i} and {2 * i}.", "response": f"It is {3 * i}."}
        for i in range(40)
    ]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = config.Config(
        stages="select",
        data=config.DataConfig(sources=(config.SourceConfig(path=str(data)),)),
        selection=config.SelectionConfig(method="random"),
        allocation=config.AllocationConfig(batch_size=8),
    )
    made = run.execute(cfg, tmp_path / "run")
    assert made.corpus is not None
    kept = int(made.plan.example_id[0])
    capsys.readouterr()
    arguments = ["trace", "--workdir", str(tmp_path / "run"), "--example"]
    monkeypatch.setattr("sys.argv", [*arguments, made.corpus.uid[kept]])
    assert trace.main() == 0
    text = capsys.readouterr().out
    assert f"sums.jsonl line {kept + 1}" in text
    assert f"response: 'It is {3 * kept}.'" in text
    assert "Checked step" in text
    monkeypatch.setattr("sys.argv", [*arguments, "99"])
    assert trace.main() == 2
    assert "row from 0 to 39" in capsys.readouterr().err


def test_trace_names_what_it_can_not_find():
    run = synthetic_run.saved()
    with pytest.raises(errors.DataError, match="no_label_tokens"):
        trace.find(run, "json:900")
    with pytest.raises(errors.DataError, match="row from 0 to 299"):
        trace.find(run, "300")

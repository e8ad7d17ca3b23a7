"""Plans for other trainers: file formats, sampler, commands."""

import dataclasses
import json
import pathlib

import data_inputs
import numpy as np
import planning_cases
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow_datasets as tfds

from clusterjax import allocation, config, data, sampler, selection
from clusterjax import plan as plan_lib
from experiments import plan as plan_command
from experiments import plan_check, plan_table, saved_run
from experiments.exports import array_record, hub, jsonl, records, step_table


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A saved run on real text: a JSONL file, 40 examples, 3 clusters."""
    folder = tmp_path_factory.mktemp("run")
    path = data_inputs.write_lines(folder / "pairs.jsonl", data_inputs.pairs(40))
    cfg = config.Config(
        data=data_inputs.settings(path),
        selection=config.SelectionConfig(ratio=0.75, keep="random"),
        allocation=config.AllocationConfig(batch_size=6, accumulation_steps=2),
    )
    tokenizer = data_inputs.tokenizer()
    corpus = data.load(cfg.data, tokenizer, directory=folder / "data")
    feats = dataclasses.replace(
        planning_cases.features(40, num_labels=corpus.num_labels),
        uid=corpus.uid,
        source_id=corpus.source_id,
        source_names=corpus.source_names,
        corpus_fingerprint=corpus.fingerprint,
    )
    clusters = planning_cases.clusters(planning_cases.sized([18, 12, 10]))
    plan = selection.select(clusters, feats, cfg.selection)
    plan.save(folder / "plan")
    schedule = allocation.allocate(
        plan, corpus.lengths, corpus.num_labels, cfg.allocation
    )
    from etils import epath

    return saved_run.SavedRun(
        epath.Path(folder), cfg, tokenizer, corpus, feats, clusters, plan, schedule, 4
    )


@pytest.fixture
def command(run, monkeypatch, capsys):
    """Runs `experiments.plan` on the run; returns (exit code, printed text)."""
    monkeypatch.setattr(saved_run, "load", lambda folder: run)

    def call(*arguments):
        code = plan_command.main(list(map(str, arguments)))
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


def test_records_carry_text_tokens_and_weight(run):
    found = list(records.records(run))
    assert [r["example_id"] for r in found] == run.plan.example_id.tolist()
    for record in found:
        i = record["row"]
        assert record["messages"] == [
            {"role": "user", "content": f"What is {i} + {i}?"},
            {"role": "assistant", "content": f"It is {2 * i}."},
        ]
        label = np.array(record["labels"])
        tokens = np.array(record["input_ids"])
        assert (label[label != -100] == tokens[label != -100]).all()
        assert f"It is {2 * i}." in run.tokenizer.decode(tokens[label != -100])
        assert "What is" not in run.tokenizer.decode(tokens[label != -100])
    weight = np.array([r["weight"] for r in found])
    assert weight.mean() == pytest.approx(1)
    expected = run.plan.num_kept * run.plan.cluster_share / run.plan.quota
    np.testing.assert_allclose(weight, expected[run.plan.cluster_id])


def test_jsonl(run, tmp_path, command):
    code, text = command(
        "export", run.folder, "--format", "jsonl", "--out", tmp_path / "kept.jsonl"
    )
    assert code == 0 and f"{run.plan.num_kept} kept examples" in text
    lines = (tmp_path / "kept.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == list(records.records(run))


def test_hub_directory_in_arrow_form(run, tmp_path):
    expected = list(records.records(run))
    assert hub.write(records.records(run), tmp_path) == len(expected)
    with pa.ipc.open_stream(tmp_path / "data-00000-of-00001.arrow") as stream:
        assert stream.read_all().to_pylist() == expected
    info = json.loads((tmp_path / "dataset_info.json").read_text())
    assert info["features"]["weight"] == {"dtype": "double", "_type": "Value"} or (
        info["features"]["weight"] == {"dtype": "float64", "_type": "Value"}
    )


def test_hub_directory_loads_with_the_datasets_library(run, tmp_path):
    datasets = pytest.importorskip("datasets")
    hub.write(records.records(run), tmp_path)
    loaded = datasets.load_from_disk(str(tmp_path))
    assert loaded.to_list() == list(records.records(run))


def test_tokens_only_has_exactly_three_columns(run, tmp_path, command):
    out = tmp_path / "kept"
    arguments = ("--format", "hub", "--tokens_only", "--out", out)
    assert command("export", run.folder, *arguments)[0] == 0
    with pa.ipc.open_stream(out / "data-00000-of-00001.arrow") as stream:
        table = stream.read_all()
    assert table.column_names == ["input_ids", "attention_mask", "labels"]
    lengths = [len(ids) for ids in table["input_ids"].to_pylist()]
    assert [sum(mask) for mask in table["attention_mask"].to_pylist()] == lengths


def test_array_record_directory_loads_with_tfds(run, tmp_path):
    expected = list(records.records(run, text=False))
    out = tmp_path / "kept"
    assert array_record.write(iter(expected), out) == len(expected)
    source = tfds.builder_from_directory(str(out)).as_data_source("train")
    for row, record in zip(source, expected, strict=True):
        assert row["uid"].decode() == record["uid"]
        assert row["weight"] == np.float32(record["weight"])
        assert row["input_ids"].tolist() == record["input_ids"]
        assert row["labels"].tolist() == record["labels"]


def test_step_table_is_the_schedule(run, tmp_path):
    path = tmp_path / "steps.parquet"
    step_table.write(run.schedule, path)
    table = pq.read_table(path).to_pydict()
    step = np.array(table["step"])
    for expected in run.schedule:
        mine = np.flatnonzero(step == expected.step)
        assert (
            np.array(table["example_id"])[mine].tolist() == expected.example_id.tolist()
        )
        found = np.array(table["token_weight"])[mine]
        np.testing.assert_array_equal(found, expected.weight)
        labels = np.array(table["num_labels"])[mine]
        if len(set(expected.cluster_id)) == 3:
            assert found @ labels == pytest.approx(1, abs=1e-12)


def test_the_documented_reader_needs_no_clusterjax(run, tmp_path, monkeypatch):
    text = (pathlib.Path(__file__).parent.parent / "docs" / "plan.md").read_text()
    code = next(
        block for block in text.split("```python\n")[1:] if "read_table" in block
    ).split("```")[0]
    assert "clusterjax" not in code
    step_table.write(run.schedule, tmp_path / "steps.parquet")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code, names)
    for step in run.schedule:
        expected = list(zip(step.example_id.tolist(), step.weight.tolist()))
        assert names["steps"][step.step] == expected


def test_changed_text_is_noticed(run, tmp_path):
    path = data_inputs.write_lines(
        tmp_path / "pairs.jsonl", data_inputs.pairs(39) + data_inputs.pairs(1, 77)
    )
    uid = run.corpus.uid[39]
    plan = dataclasses.replace(run.plan, copies=np.ones(40, np.int32))
    changed = dataclasses.replace(
        run,
        plan=plan,
        config=dataclasses.replace(run.config, data=data_inputs.settings(path)),
    )
    with pytest.raises(Exception, match=str(uid)):
        list(records.records(changed))


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_sampler_yields_the_schedule_over_any_number_of_ranks(run, num_ranks):
    samplers = [
        sampler.StepSampler.load(
            run.folder / "plan", run.config.allocation, rank=r, num_ranks=num_ranks
        )
        for r in range(num_ranks)
    ]
    assert all(len(s) == run.schedule.num_steps for s in samplers)
    for index, step in enumerate(run.schedule):
        found = sorted(item for s in samplers for item in s[index])
        expected = sorted(zip(step.example_id.tolist(), step.weight.tolist()))
        assert found == expected
    sizes = [[len(s[i]) for s in samplers] for i in range(run.schedule.num_steps)]
    assert all(max(row) - min(row) <= 1 for row in sizes)


def test_sampler_resumes_and_works_as_a_batch_sampler(run):
    whole = sampler.StepSampler(run.schedule)
    rest = sampler.StepSampler(run.schedule, start_step=3)
    assert list(rest) == list(whole)[3:]
    with pytest.raises(IndexError):
        rest[len(rest)]
    examples = sampler.WeightedExamples([{"value": 10 * i} for i in range(40)])
    batch = [examples[key] for key in whole[0]]
    ids = run.schedule.step(0).example_id
    assert [row["value"] for row in batch] == (10 * ids).tolist()
    assert [row["token_weight"] for row in batch] == run.schedule.step(
        0
    ).weight.tolist()


def test_grain_reads_the_sampler(run):
    import grain

    steps = grain.MapDataset.source(sampler.StepSampler(run.schedule))
    assert [len(step) for step in steps] == [len(s.entry) for s in run.schedule]


def test_show(run, command):
    code, text = command("show", run.folder / "plan")
    assert code == 0
    assert f"keeps {run.plan.num_kept} of 40" in text
    for cluster in range(3):
        assert f"{run.plan.cluster_share[cluster]:.4f}" in text


def test_verify_and_a_planted_fault(run, command, monkeypatch):
    code, text = command("verify", run.folder)
    assert code == 0, text
    assert "derived a second time" in text and "effective sample size" in text
    wrong = dataclasses.replace(run.plan, quota=run.plan.quota + 1)
    broken = dataclasses.replace(run, plan=wrong)
    with pytest.raises(plan_check.Violation, match="quotas"):
        plan_check.verify(broken)
    schedule = allocation.Schedule(
        dataclasses.replace(run.plan, cluster_share=np.array([0.2, 0.3, 0.5])),
        run.schedule.length,
        run.schedule.num_labels,
        run.config.allocation,
    )
    with pytest.raises(plan_check.Violation, match="METHOD"):
        plan_check.verify(dataclasses.replace(run, schedule=schedule))


def test_diff(run, command, tmp_path):
    order = np.array([2, 0, 1])
    clusters = dataclasses.replace(
        run.clusters,
        cluster_id=order[run.clusters.cluster_id].astype(np.int32),
        centroids=run.clusters.centroids[np.argsort(order)],
    )
    other = selection.select(
        clusters, run.feats, dataclasses.replace(run.config.selection, ratio=0.5)
    )
    other.save(tmp_path / "plan")
    code, text = command("diff", run.folder, tmp_path / "plan")
    assert code == 0
    assert "selection.ratio: 0.75 → 0.5" in text
    assert "matched by centroids: 3 of 3 and 3; 0 candidates changed" in text
    lines = plan_table.difference(run.plan, run.plan)
    assert lines[0] == "same settings and inputs"
    pairs, how = plan_table.match_clusters(
        dataclasses.replace(run.plan, centroids=np.zeros((0, 0), np.float32)),
        other,
        np.arange(40),
        np.arange(40),
    )
    assert how == "shared candidates" and pairs == [(0, 2), (1, 0), (2, 1)]


def test_commands_say_what_is_wrong(command, tmp_path):
    code, text = command("show", tmp_path)
    assert code == 2 and "holds no plan" in text
    assert plan_lib.SelectionPlan.exists(tmp_path) is False


def test_jsonl_writes_whole_files_only(tmp_path):
    def failing():
        yield {"a": 1}
        raise RuntimeError("broken source")

    with pytest.raises(RuntimeError, match="broken"):
        jsonl.write(failing(), tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == []

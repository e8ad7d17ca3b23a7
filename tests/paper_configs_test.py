"""The paper's configs, each with a small file of its public layout and a tiny model."""

import importlib
import json

import multiprocess_run
import numpy as np
import pytest

from clusterjax import config as config_lib
from clusterjax import data, models
from clusterjax.data import tokenizer as tokenizer_lib
from clusterjax.models import hf_config
from experiments import estimate, run

NAMES = (
    "magicoder_codellama_7b",
    "evol_codellama_7b",
    "magicoder_codellama_13b",
    "medinstruct_llama2_7b",
)
SIZES = {  # parameters of the published models
    "codellama_7b": 6_738_415_616,
    "codellama_13b": 13_015_864_320,
    "llama2_7b": 6_738_415_616,
    "smollm2_135m": 134_515_008,
}


def _rows(name: str, count: int = 48) -> list[dict[str, object]]:
    """Rows with the columns of the published files."""
    rng = np.random.default_rng(0)
    result = []
    for i in range(count):
        a, b = rng.integers(10, 99, 2)
        question = f"Question {i}: what is the sum of {a} and {b}?"
        answer = f"The sum is {a + b}. " * int(rng.integers(1, 6))
        if name.startswith("magicoder"):
            code = {"lang": "python", "raw_index": i, "index": i, "seed": "x = 1"}
            result.append({**code, "problem": question, "solution": answer})
        elif name.startswith("evol"):
            result.append({"instruction": question, "output": answer})
        else:
            text = "a patient of 50" if i % 2 else "<noinput>"
            result.append({"instruction": question, "input": text, "output": answer})
    return result


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A checkpoint of one layer with the tokenizer of the built-in model."""
    folder = tmp_path_factory.mktemp("tiny")
    multiprocess_run.make_model(folder)
    tokenizer = tokenizer_lib.Tokenizer.load(folder)
    return folder, tokenizer


def _config(name, folder):
    """The config of a name, with the data and model of a test."""
    config = importlib.import_module(f"configs.{name}").get_config()
    path = folder / config.data.sources[0].path.rpartition("/")[2]
    rows = _rows(name)
    lines = path.suffix == ".jsonl"
    text = "\n".join(map(json.dumps, rows)) if lines else json.dumps(rows)
    path.write_text(text, encoding="utf-8")
    config.data.sources[0].path = str(path)
    config.data.cache_dir = str(folder / "cache")
    return config


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_the_papers(name):
    cfg = config_lib.resolve(importlib.import_module(f"configs.{name}").get_config())
    optimizer = cfg.train.optimizer
    assert (cfg.allocation.batch_size, cfg.allocation.num_epochs) == (512, 2)
    assert (optimizer.name, optimizer.learning_rate) == ("adafactor", 5e-5)
    assert (optimizer.warmup_steps, optimizer.schedule) == (15, "linear")
    assert optimizer.clip_norm is None and not optimizer.adafactor_parameter_scale
    assert (cfg.clustering.num_clusters, cfg.selection.keep) == (4, "farthest")
    assert (cfg.selection.normalise, cfg.selection.quota) == ("token", "min")
    assert cfg.data.max_length == 1216
    assert cfg.model.param_dtype == "float32"
    assert config_lib.cautions(cfg) == []


@pytest.mark.parametrize("name", NAMES)
def test_file_of_the_public_layout_is_read(name, tiny, tmp_path):
    _, tokenizer = tiny
    cfg = config_lib.resolve(_config(name, tmp_path))
    corpus = data.load(cfg.data, tokenizer)
    assert corpus.num_examples == corpus.num_read == 48
    tokens, is_label = corpus.example(0)
    prompt, answer = (tokenizer.decode(tokens[m]) for m in (~is_label, is_label))
    assert "Question 0" in prompt and "The sum is" not in prompt
    assert answer.startswith(" The sum is") or answer.startswith("The sum is")


@pytest.mark.parametrize(
    "name",
    [
        "magicoder_codellama_7b",
        *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES[1:]),
    ],
)
def test_runs_from_file_to_trained_model(name, tiny, tmp_path):
    """The whole run, with a small batch and a tiny checkpoint in place of the model."""
    folder, _ = tiny
    config = _config(name, tmp_path)
    config.model.path = str(folder)
    config.clustering.min_cluster_size = 1
    config.selection.ratio = 1.0
    config.allocation.batch_size = 8
    config.allocation.accumulation_steps = 2
    config.allocation.max_steps = 2
    config.report.html = False
    done = run.execute(config_lib.resolve(config), tmp_path / "run")
    assert done.plan.num_clusters == 4
    assert len(set(done.plan.quota.tolist())) == 1
    losses = [line["loss"] for line in done.result.history if line["kind"] == "train"]
    assert len(losses) == 2 and np.isfinite(losses).all()
    assert (tmp_path / "run" / "model" / "config.json").exists()


@pytest.mark.parametrize("name", SIZES)
def test_model_sizes_are_the_published_ones(name):
    cfg = config_lib.resolve(config_lib.default())
    path = f"configs/models/{name}.json"
    model = estimate.read_model(cfg, path)
    shapes = (item.shape for item in models.parameters.table(model).values())
    assert sum(int(np.prod(shape)) for shape in shapes) == SIZES[name]
    assert hf_config.parse(model.source_json, path) == model

"""Settings: every key explained, every mistake named."""

import dataclasses
import pathlib
import re

import pytest

from clusterjax import config as config_lib
from clusterjax import errors


def test_every_key_has_a_meaning():
    for cls in (config_lib.Config, config_lib.SourceConfig):
        for name, kind, _, text in config_lib.describe(cls):
            assert len(text) > 8, (name, kind)


def test_default_resolves_to_the_dataclass_defaults():
    assert config_lib.resolve(config_lib.default()) == config_lib.Config()


def test_sources_become_dataclasses():
    config = config_lib.default()
    config.data.sources = (config_lib.source(path="a.jsonl", max_examples=3),)
    resolved = config_lib.resolve(config)
    assert resolved.data.sources == (
        config_lib.SourceConfig(path="a.jsonl", max_examples=3),
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("selection.keep", "fartest", "did you mean 'farthest'"),
        ("selection.ratio", 0.0, "selection.ratio=0.0 must be > 0"),
        ("selection.ratio", 1.01, "selection.ratio=1.01 must be ≤ 1"),
        ("allocation.batch_size", 0, "allocation.batch_size=0 must be ≥ 1"),
        ("features.layers", ("a",), r"features.layers\[0\]='a' has type str"),
    ],
)
def test_wrong_values_are_named(key, value, message):
    config = config_lib.default()
    group, name = key.split(".")
    config[group][name] = value
    with pytest.raises(errors.ConfigError, match=message):
        config_lib.resolve(config)


def test_unknown_key_of_a_source_is_named_with_the_nearest():
    config = config_lib.default()
    source = config_lib.source(path="a.jsonl")
    with source.unlocked():
        source.max_example = 3
    config.data.sources = (source,)
    with pytest.raises(errors.ConfigError, match="did you mean .*max_examples"):
        config_lib.resolve(config)


def test_fingerprint_ignores_what_changes_no_result():
    config = config_lib.Config()
    faster = dataclasses.replace(config, perf=config_lib.PerfConfig(prefetch=7))
    other = dataclasses.replace(config, seed=1)
    assert config_lib.fingerprint(config) == config_lib.fingerprint(faster)
    assert config_lib.fingerprint(config) != config_lib.fingerprint(other)


def test_bfloat16_masters_earn_a_caution():
    """A learning rate of 5e-5 vanishes beside bfloat16 weights; float32 by default."""
    chosen = config_lib.default()
    chosen.train.optimizer.learning_rate = 5e-5
    assert config_lib.resolve(chosen).model.param_dtype == "float32"
    assert config_lib.cautions(config_lib.resolve(chosen)) == []
    chosen.model.param_dtype = "bfloat16"
    [text] = config_lib.cautions(config_lib.resolve(chosen))
    assert "model.param_dtype=bfloat16" in text and "learning_rate=5e-05" in text
    assert "float32" in text


def test_every_key_is_used():
    root = pathlib.Path(config_lib.__file__).parent
    paths = [*root.rglob("*.py"), *(root.parent / "experiments").rglob("*.py")]
    text = "\n".join(p.read_text() for p in paths if p.name != "config.py")
    for cls in (config_lib.Config, config_lib.SourceConfig):
        for name, _, _, _ in config_lib.describe(cls):
            key = name.rpartition(".")[2]
            assert re.search(rf"\.{key}\b", text), f"{name} does nothing"

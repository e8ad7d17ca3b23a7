"""Methods × seeds × budgets: which runs a comparison consists of."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from clusterjax import config as config_lib
from clusterjax import errors

# Methods whose size `selection.num_kept` sets.
SIZED = (
    "random",
    "stratified",
    "uniform",
    "highest_loss",
    "largest_norm",
    "k_center",
    "near_duplicate",
    "target",
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What is compared; a config file returns one from `get_config()`.

    Attributes:
      base: config file that all runs start from.
      methods: name → config keys that make the method, e.g.
        `{"random": {"selection.method": "random"}}`.
      seeds: values of the config key `seed`; equal seeds are paired.
      budgets: shares of the data that every method keeps, in (0, 1]; () = each its own.
      budget_of: method whose plan sets the budget of the others, seed by seed.
      budget_kind: whether a budget counts examples or label tokens.
      shared: config keys for all runs.
      finished: folders of runs made elsewhere; one with the same config counts.
      full: the method that paired differences are taken to first.
      random: the method that paired differences are taken to second.
      mechanism: whether gradient noise is measured on an independent sketch.
    """

    base: str
    methods: Mapping[str, Mapping[str, Any]]
    seeds: Sequence[int] = (0,)
    budgets: Sequence[float] = ()
    budget_of: str = ""
    budget_kind: Literal["examples", "tokens"] = "examples"
    shared: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    finished: Sequence[str] = ()
    full: str = "full"
    random: str = "random"
    mechanism: bool = False


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run.

    Attributes:
      method: name in `Comparison.methods`.
      seed: value of the config key `seed`.
      budget: share of the data, or None for the method's own.
      keys: config keys that differ from the base config.
    """

    method: str
    seed: int
    budget: float | None
    keys: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of its folder."""
        budget = "" if self.budget is None else f"-b{self.budget:g}"
        return re.sub(r"[^\w.-]+", "-", f"{self.method}{budget}-s{self.seed}")


def trials(comparison: Comparison) -> list[Trial]:
    """All runs, those first that set the budget of others.

    Raises:
      errors.ConfigError: a comparison that can't be.
    """
    _check(comparison)
    methods = sorted(comparison.methods, key=lambda name: name != comparison.budget_of)
    result = []
    for seed in comparison.seeds:
        for name in methods:
            budgets = list(comparison.budgets) or [None]
            if _config(comparison, name, {}).selection.method == "full":
                budgets = [None]
            for budget in budgets:
                keys = {**comparison.shared, **comparison.methods[name], "seed": seed}
                if budget is not None:
                    keys |= _budget_keys(comparison, name, budget)
                result.append(Trial(name, seed, budget, keys))
    return result


def with_size(
    trial: Trial, comparison: Comparison, num_kept: int, share: float
) -> Trial:
    """The trial at the budget of another method's plan.

    A method that states `selection.target_fraction` or `num_kept` itself, or whose size
    follows its clusters, stays as it is.

    Args:
      trial: any trial.
      comparison: it belongs to.
      num_kept: examples that the other plan keeps.
      share: share of all examples (or label tokens) that it keeps.
    """
    method = trial_config(comparison, trial).selection
    stated = comparison.methods[trial.method].keys()
    if stated & {"selection.target_fraction", "selection.num_kept"}:
        return trial
    if method.method in SIZED:
        keys = {"selection.num_kept": num_kept}
        if comparison.budget_kind == "tokens":
            keys = {"selection.budget": "tokens", "selection.target_fraction": share}
    elif method.method == "cluster" and method.quota == "waterfill":
        keys = {"selection.target_fraction": share}
    else:
        return trial
    return dataclasses.replace(trial, keys={**trial.keys, **keys})


def trial_config(comparison: Comparison, trial: Trial) -> config_lib.Config:
    """The resolved config of a trial.

    Raises:
      errors.ConfigError: a key that does not exist, or a value of the wrong type.
    """
    return _config(comparison, trial.method, trial.keys)


def arguments(trial: Trial) -> list[str]:
    """The trial's keys as command-line flags of `experiments.run`."""
    return [f"--config.{key}={value}" for key, value in trial.keys.items()]


def load(path: str) -> Comparison:
    """The comparison that a config file's `get_config()` returns."""
    module = _module(path)
    made = module.get_config()
    if not isinstance(made, Comparison):
        raise errors.ConfigError(
            f"{path}: get_config() must return a grid.Comparison, not a"
            f" {type(made).__name__}; for a single run use experiments.run"
        )
    return made


def parse_keys(items: Sequence[str]) -> dict[str, Any]:
    """`["a.b=3", "c=text"]` → `{"a.b": 3, "c": "text"}`."""
    keys = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals:
            raise errors.ConfigError(f"--set {item}: expected KEY=VALUE")
        try:
            keys[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            keys[name] = text
    return keys


def _check(comparison: Comparison) -> None:
    if not comparison.methods or not comparison.seeds:
        raise errors.ConfigError("a comparison needs at least one method and one seed")
    name = comparison.budget_of
    if name and name not in comparison.methods:
        raise errors.ConfigError(
            f"budget_of={name!r} is not one of the methods"
            f" {', '.join(comparison.methods)}"
        )
    if name and comparison.budgets:
        raise errors.ConfigError("set budgets or budget_of, not both")
    for method in comparison.methods:
        _config(comparison, method, {})


def _budget_keys(comparison: Comparison, name: str, budget: float) -> dict[str, Any]:
    selection = _config(comparison, name, {}).selection
    if selection.method == "cluster" and selection.quota == "min":
        raise errors.ConfigError(
            f"method {name!r} has selection.quota='min', whose size follows the"
            " smallest cluster and not a budget; use selection.quota='waterfill',"
            " or budget_of"
        )
    keys: dict[str, Any] = {"selection.target_fraction": budget}
    if selection.method in SIZED and comparison.budget_kind == "tokens":
        keys["selection.budget"] = "tokens"
    return keys


def _config(
    comparison: Comparison, method: str, keys: Mapping[str, Any]
) -> config_lib.Config:
    config = _module(comparison.base).get_config()
    every = {**comparison.shared, **comparison.methods[method], **keys}
    for name, value in every.items():
        try:
            config.update_from_flattened_dict({name: value})
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise errors.ConfigError(
                f"method {method!r}: {name}={value!r} does not fit the config of"
                f" {comparison.base}: {error}"
            ) from error
    return config_lib.resolve(config)


def _module(path: str) -> Any:
    if not pathlib.Path(path).exists():
        raise errors.ConfigError(f"there is no config file {path}")
    spec = importlib.util.spec_from_file_location("comparison_config", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

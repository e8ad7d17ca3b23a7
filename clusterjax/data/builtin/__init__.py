"""Embedded data sets: real text without a network, as TFDS builders.

`stdlib_functions` is mined from the running Python's standard library; `skills` is
generated. Both are read through `builder.as_data_source(split)` with the splits `train`
and `heldout`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import sys
from typing import Any

import tensorflow_datasets as tfds

from clusterjax import errors
from clusterjax.data.builtin import skills, stdlib_functions, storage

NAMES = ("stdlib_functions", "skills")


def prepare(
    name: str, data_dir: str | pathlib.Path, **settings: Any
) -> tfds.core.DatasetBuilder:
    """The builder of an embedded set, its data made in `data_dir` if missing.

    Args:
      name: `stdlib_functions` or `skills`.
      data_dir: folder of made sets; a second call with the same settings reads it.
      **settings: fields of `StdlibFunctionsConfig` or `SkillsConfig`.

    Returns:
      A TFDS builder; read `builder.as_data_source('train')` or `'heldout'`. Each
      example has the text columns `instruction`, `response`, `source`, `family` and
      `key`.

    Raises:
      errors.ConfigError: an unknown name or setting, or a wrong type.
    """
    if name == "stdlib_functions":
        builder_class, config_class = (
            stdlib_functions.StdlibFunctions,
            stdlib_functions.StdlibFunctionsConfig,
        )
        library = f"{sys.version} {stdlib_functions.library_root()}"
    elif name == "skills":
        builder_class, config_class = skills.Skills, skills.SkillsConfig
        library = ""
    else:
        raise errors.ConfigError(
            f"there is no embedded set {name!r}; the sets are {' and '.join(NAMES)}"
        )
    values = _checked(name, config_class, settings)
    label = "-".join(f"{key}_{value}" for key, value in values.items())
    label += f"-{_origin(library)}"
    config = config_class(name=label, **values)
    return storage.make_once(
        lambda folder: builder_class(
            config=config, data_dir=str(folder), file_format=storage.FILE_FORMAT
        ),
        pathlib.Path(data_dir),
    )


def _origin(library: str) -> str:
    """Eight hex digits for the code and the library that the data come from.

    Data made by other code, or mined from another Python, must not be mistaken for
    these.
    """
    digest = hashlib.sha256(library.encode())
    for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _checked(name: str, config_class: type, settings: dict[str, Any]) -> dict[str, Any]:
    inherited = {field.name for field in dataclasses.fields(tfds.core.BuilderConfig)}
    known = {
        field.name: field.default
        for field in dataclasses.fields(config_class)
        if field.name not in inherited
    }
    values = dict(known)
    for key, value in settings.items():
        if key not in known:
            raise errors.ConfigError(
                f"{name} has no setting {key!r}; its settings are {', '.join(known)}"
            )
        kind = type(known[key])
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise errors.ConfigError(
                f"{name}.{key}={value!r} must be of type {kind.__name__}"
            )
        values[key] = value
    return values

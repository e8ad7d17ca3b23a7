"""Hugging Face data sets, by hub name or saved directory (extra `hub`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from etils import epath

from clusterjax import config as config_lib
from clusterjax import errors
from clusterjax.data import rows, sources


class HubSource(sources.Source):
    """A split of a `datasets.Dataset`."""

    def __init__(
        self, config: config_lib.SourceConfig, name: str, data: Any, label: str
    ):
        super().__init__(config, name)
        self._data, self._label = data, label

    def read(self) -> Iterator[rows.Row]:
        self.problems.clear()
        if not len(self._data):
            self.problems.append((self._label, "holds no rows"))
        try:
            for index, columns in enumerate(self._data):
                yield rows.Row(index, columns)
        except Exception as error:  # the library raises many kinds
            raise errors.DataError(
                f"{self._label} can't be read: {_first_line(error)}"
            ) from error

    def digests(self) -> dict[str, str]:
        # The library's own hash of the data and everything that was done to them.
        content = {self._label: self._data._fingerprint}
        for entry in self._data.cache_files:
            path = epath.Path(entry["filename"])
            content[os.fspath(path)] = sources.file_digest(path)
        return content

    def place(self, index: int) -> str:
        return f"{self._label} row {index}"


def _library(key: str) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise errors.ConfigError(
            f"{key}.path is a Hugging Face data set, which needs the extra `hub`:"
            " pip install 'clusterjax[hub]'"
        ) from error
    return datasets


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def open_named(config: config_lib.SourceConfig, spec: str, key: str) -> HubSource:
    """`hub:owner/name` or `hub:owner/name/configuration`, by way of the local cache."""
    datasets = _library(key)
    parts = spec.split("/")
    name = parts[2] if len(parts) > 2 else None
    try:
        data = datasets.load_dataset("/".join(parts[:2]), name, split=config.split)
    except Exception as error:
        raise errors.DataError(
            f"{key}.path=hub:{spec} split {config.split!r} can't be loaded:"
            f" {_first_line(error)}"
        ) from error
    label = f"hub:{spec} split {config.split!r}"
    return HubSource(config, config.name or parts[-1], data, label)


def open_directory(
    config: config_lib.SourceConfig, path: epath.Path, key: str
) -> HubSource:
    """A directory that `save_to_disk` wrote, of one data set or of several splits."""
    datasets = _library(key)
    try:
        data = datasets.load_from_disk(os.fspath(path))
    except Exception as error:
        raise errors.DataError(
            f"{key}.path={path} is not a readable data set: {_first_line(error)}"
        ) from error
    if isinstance(data, datasets.DatasetDict):
        if config.split not in data:
            raise errors.ConfigError(
                f"{key}.split={config.split!r} is not in {path} (splits:"
                f" {', '.join(data)})"
            )
        data = data[config.split]
    label = f"{path} split {config.split!r}"
    return HubSource(config, config.name or path.name, data, label)

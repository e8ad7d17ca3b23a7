"""TensorFlow Datasets without TensorFlow: built-in, registered, or a directory."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds
from etils import epath

from clusterjax import config as config_lib
from clusterjax import errors
from clusterjax.data import builtin, rows, sources


class TfdsSource(sources.Source):
    """A split of a prepared TFDS builder, read by random access."""

    def __init__(
        self,
        config: config_lib.SourceConfig,
        name: str,
        builder: tfds.core.DatasetBuilder,
        key: str,
    ):
        super().__init__(config, name)
        self._builder, self._key = builder, key
        self._label = f"{os.fspath(builder.data_path)} split {config.split!r}"
        try:
            builder.info.splits[config.split]
        except Exception as error:  # TFDS raises many kinds
            raise errors.ConfigError(
                f"{key}.split={config.split!r} is not in {name} (splits: "
                f"{', '.join(builder.info.splits) or 'none'})"
            ) from error

    def read(self) -> Iterator[rows.Row]:
        self.problems.clear()
        try:
            self._check_counts()
            open_split: Any = self._builder.as_data_source
            data = open_split(self.config.split)
            count = len(data)
        except Exception as error:  # TFDS and array_record raise many kinds
            raise self._error(error) from error
        if not count:
            self.problems.append((self._label, "holds no rows"))
        for index in range(count):
            try:
                record = data[index]
            except Exception as error:
                raise self._error(error, f" at record {index}") from error
            yield _plain_row(index, record)

    def _check_counts(self) -> None:
        """Compares what dataset_info.json says with the records that are there.

        TFDS believes the former: records beyond the count would be lost unseen.
        """
        # Has no wheels for some platforms, on which other sources still work.
        module: Any = importlib.import_module("array_record.python.array_record_module")
        splits = self._builder.info.splits
        for split in splits.values():
            if not self.config.split.startswith((split.name, "all")):
                continue
            for path, count in zip(split.filepaths, split.shard_lengths):
                if ".array_record" not in path.name:
                    continue
                reader = module.ArrayRecordReader(os.fspath(path))
                held = reader.num_records()
                reader.close()
                if held != count:
                    raise ValueError(
                        f"dataset_info.json says {count} records, {path.name} holds"
                        f" {held}"
                    )

    def _error(self, error: Exception, where: str = "") -> errors.DataError:
        text = str(error).strip().splitlines() or [type(error).__name__]
        return errors.DataError(f"{self._label} can't be read{where}: {text[0]}")

    def digests(self) -> dict[str, str]:
        folder = epath.Path(self._builder.data_path)
        found = {
            os.fspath(path): sources.file_digest(path)
            for path in sorted(folder.iterdir())
            if path.is_file()
        }
        return found | {f"{self._label}": self.config.split}

    def place(self, index: int) -> str:
        return f"{self._label} record {index}"


def _plain_row(index: int, record: dict[str, Any]) -> rows.Row:
    try:
        return rows.Row(index, {name: rows.plain(v) for name, v in record.items()})
    except UnicodeDecodeError as error:
        cause = f"not UTF-8 at byte {error.start + 1} of a text column"
        return rows.Row(index, None, cause, "invalid_utf8")


def open_builtin(
    config: config_lib.SourceConfig, spec: str, folder: str, key: str
) -> TfdsSource:
    """`builtin:name` or `builtin:name?setting=value&…`; families are its groups."""
    name, _, query = spec.partition("?")
    settings = {}
    for part in filter(None, query.split("&")):
        setting, sign, value = part.partition("=")
        if not sign:
            raise errors.ConfigError(f"{key}.path: {part!r} is not setting=value")
        settings[setting] = _number(value)
    root = folder or sources.user_cache() / "builtin"
    builder = builtin.prepare(name, root, **settings)
    config = dataclasses.replace(config, group_column=config.group_column or "family")
    return TfdsSource(config, config.name or name, builder, key)


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def open_registered(config: config_lib.SourceConfig, spec: str, key: str) -> TfdsSource:
    """`tfds:name[/config][:version]`, downloaded and prepared when it is not there."""
    try:
        builder = tfds.builder(spec, file_format="array_record")
        builder.download_and_prepare()
    except Exception as error:
        raise errors.DataError(
            f"{key}.path=tfds:{spec} can't be prepared: {error}"
        ) from error
    return TfdsSource(config, config.name or builder.name, builder, key)


def open_directory(
    config: config_lib.SourceConfig, path: epath.Path, key: str
) -> TfdsSource:
    """A prepared builder's directory; the code that made it is not needed."""
    try:
        builder = tfds.builder_from_directory(path)
    except Exception as error:
        raise errors.DataError(
            f"{key}.path={path} is not a readable TFDS directory: {error}"
        ) from error
    return TfdsSource(config, config.name or builder.name, builder, key)

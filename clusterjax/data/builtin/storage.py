"""How the embedded sets are stored: one feature layout, one folder, made once."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator

import tensorflow_datasets as tfds
from absl import logging

from clusterjax import errors
from clusterjax.data.builtin import splits

FILE_FORMAT = "array_record"


def features() -> tfds.features.FeaturesDict:
    """The columns of every embedded set: the fields of `splits.Example`, as text."""
    return tfds.features.FeaturesDict(
        {name: tfds.features.Text() for name in splits.Example._fields}
    )


def split_generators(
    builder: tfds.core.GeneratorBasedBuilder,
    parts: dict[str, list[splits.Example]],
) -> dict[str, Iterator[tuple[int, dict[str, str]]]]:
    """TFDS's generator for each split."""
    return {
        name: builder._generate_examples(examples)  # pyright: ignore[reportCallIssue]
        for name, examples in parts.items()
    }


def rows(examples: list[splits.Example]) -> Iterator[tuple[int, dict[str, str]]]:
    """(row, columns) of each example."""
    for row, example in enumerate(examples):
        yield row, example._asdict()


def make_once(
    make: Callable[[pathlib.Path], tfds.core.DatasetBuilder], data_dir: pathlib.Path
) -> tfds.core.DatasetBuilder:
    """The builder's data in `data_dir`, written there if it is missing.

    Args:
      make: gives the builder for a data folder.
      data_dir: the cache; created when missing.

    Returns:
      The builder, with its data on disk.

    Guarantees:
      - The data appears under its name in one rename: never half of it, killed when
        it may be.
      - Of several processes one writes while the others wait; what a killed writer
        left is removed by the next.

    Raises:
      errors.DataError: the folder can't be written.
    """
    try:
        with _quiet():
            return _make_once(make, data_dir)
    except OSError as error:
        raise errors.DataError(
            f"the embedded data can't be kept in {data_dir}: {error}; set "
            "data.builtin_dir to a folder that can be written"
        ) from error


def _make_once(
    make: Callable[[pathlib.Path], tfds.core.DatasetBuilder], data_dir: pathlib.Path
) -> tfds.core.DatasetBuilder:
    builder = make(data_dir)
    final = pathlib.Path(builder.data_dir)
    if final.exists():
        return builder
    data_dir.mkdir(parents=True, exist_ok=True)
    with open(data_dir / f".{builder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.exists():
            unfinished = data_dir / f".{builder.name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            writer = make(unfinished)
            writer.download_and_prepare(file_format=FILE_FORMAT)
            final.parent.mkdir(parents=True, exist_ok=True)
            os.replace(writer.data_dir, final)
            shutil.rmtree(unfinished, ignore_errors=True)
    return make(data_dir)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Mutes TFDS, which announces a download and warns of each config not in a list."""
    level = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        tfds.enable_progress_bar()

"""A TFDS data set directory in array_record files, written without TensorFlow."""

from __future__ import annotations

import contextlib
import io
import pathlib
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from clusterjax import errors

_COLUMNS = ("example_id", "uid", "source", "cluster_id", "weight")
_TOKENS = ("input_ids", "labels")


class ClusterjaxPlan(tfds.core.GeneratorBasedBuilder):
    """Examples kept by a clusterjax plan, with static weights."""

    VERSION = tfds.core.Version("1.0.0")
    # TFDS would look for checksums of downloads beside the code; there are none.
    code_path = None  # pyright: ignore[reportAssignmentType]
    pkg_dir_path = pathlib.Path(__file__).parent  # pyright: ignore[reportAssignmentType]

    def __init__(self, records: Iterable[dict[str, Any]] = (), **options: Any):
        self._records = records
        super().__init__(file_format="array_record", **options)

    def _info(self) -> tfds.core.DatasetInfo:
        tokens = tfds.features.Tensor(shape=(None,), dtype=np.int32)
        return tfds.core.DatasetInfo(
            builder=self,
            disable_shuffling=True,  # rows keep the order of the plan
            features=tfds.features.FeaturesDict(
                {
                    "example_id": np.int64,
                    "uid": tfds.features.Text(),
                    "source": tfds.features.Text(),
                    "cluster_id": np.int32,
                    "weight": np.float32,  # TFDS stores no wider floats
                    "input_ids": tokens,
                    "labels": tokens,
                }
            ),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for key, record in enumerate(self._records):
            row = {name: record[name] for name in _COLUMNS}
            tokens = {name: np.asarray(record[name], np.int32) for name in _TOKENS}
            yield key, row | tokens


def write(records: Iterable[dict[str, Any]], folder: pathlib.Path) -> int:
    """Writes the directory that `tfds.builder_from_directory(folder)` reads.

    Raises:
      errors.WorkdirError: the folder exists already.
    """
    if folder.exists():
        raise errors.WorkdirError(f"{folder} exists already; give another --out")
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        builder = ClusterjaxPlan(records, data_dir=unfinished)
        tfds.disable_progress_bar()
        with contextlib.redirect_stdout(io.StringIO()):  # it speaks of downloads
            builder.download_and_prepare()
        count = builder.info.splits["train"].num_examples
        folder.parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(builder.data_dir).rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return count

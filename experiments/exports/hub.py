"""A data set directory as `datasets.load_from_disk` reads it, without that library."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from etils import epath

from clusterjax import files

_ROWS_PER_BATCH = 1000
_TURN = pa.struct([("role", pa.string()), ("content", pa.string())])
_TYPES = {
    "example_id": pa.int64(),
    "uid": pa.string(),
    "source": pa.string(),
    "row": pa.int64(),
    "cluster_id": pa.int32(),
    "weight": pa.float64(),
    "input_ids": pa.list_(pa.int32()),
    "attention_mask": pa.list_(pa.int8()),
    "labels": pa.list_(pa.int32()),
    "messages": pa.list_(_TURN),
}


def write(records: Iterable[dict[str, Any]], folder: epath.PathLike) -> int:
    """Writes `data-00000-of-00001.arrow`, `dataset_info.json` and `state.json`.

    Args:
      records: at least one; all with the columns of the first.
      folder: the data set directory.

    Returns:
      The number of records.
    """
    folder = epath.Path(folder)
    rows = iter(records)
    first = next(rows)
    schema = pa.schema([(name, _TYPES[name]) for name in first])
    count = 0

    def write_arrow(temporary: epath.Path) -> None:
        nonlocal count
        with (
            temporary.open("wb") as file,
            pa.ipc.new_stream(file, schema) as stream,
        ):
            for part in _batches(itertools.chain([first], rows)):
                stream.write_batch(pa.RecordBatch.from_pylist(part, schema))
                count += len(part)

    name = "data-00000-of-00001.arrow"
    files.write_with(folder / name, write_arrow)
    files.write_json(
        folder / "dataset_info.json",
        {
            "description": "Examples kept by a clusterjax plan, with static weights",
            "features": {key: _feature(_TYPES[key]) for key in first},
        },
    )
    state = {"_data_files": [{"filename": name}], "_fingerprint": "0" * 16}
    unset = ("_format_columns", "_format_type", "_output_all_columns", "_split")
    state |= {"_format_kwargs": {}, **dict.fromkeys(unset)}
    files.write_json(folder / "state.json", state | {"_output_all_columns": False})
    return count


def _feature(kind: pa.DataType) -> Any:
    """The `datasets` description of an Arrow type."""
    if pa.types.is_list(kind):
        if kind.value_type == _TURN:
            turn = {field.name: _feature(field.type) for field in _TURN}
            return [turn]
        return {"feature": _feature(kind.value_type), "_type": "Sequence"}
    return {"dtype": str(kind), "_type": "Value"}


def _batches(rows: Iterable[dict[str, Any]]) -> Iterable[list[dict[str, Any]]]:
    rows = iter(rows)
    while part := list(itertools.islice(rows, _ROWS_PER_BATCH)):
        yield part

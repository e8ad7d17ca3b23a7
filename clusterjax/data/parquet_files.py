"""Parquet rows, read in batches, whatever the damage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from clusterjax import errors
from clusterjax.data import rows

_BATCH_ROWS = 1024
_DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)


def read(file: IO[bytes], name: str) -> Iterator[rows.Row]:
    """The rows of a Parquet file.

    Args:
      file: opened for reading bytes.
      name: its name in errors.

    Raises:
      errors.DataError: the file is damaged; what can't be decoded can't be counted as
        rows, so this does not depend on `on_error`.
    """
    first = 0
    try:
        table = pq.ParquetFile(file, page_checksum_verification=True)
        expected = table.metadata.num_rows
        names = table.schema_arrow.names
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise errors.DataError(f"{name} has two columns {twice!r}")
        for batch in table.iter_batches(batch_size=_BATCH_ROWS):
            for index, columns in enumerate(_columns(batch), start=first):
                if isinstance(columns, str):
                    yield rows.Row(index, None, columns, "invalid_utf8")
                else:
                    yield rows.Row(index, columns)
            first += batch.num_rows
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        OverflowError,
        MemoryError,
    ) as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise errors.DataError(
            f"{name} is not a whole Parquet file: {cause} (after row {first})"
        ) from error
    if first != expected:
        raise errors.DataError(
            f"{name} holds {first:,} rows, but says that it has {expected:,}"
        )


def _columns(batch: pa.RecordBatch) -> list[dict[str, Any] | str]:
    """Columns of each row, or the cause why a row's text can't be decoded."""
    try:
        batch.validate(full=True)
        return [rows.plain(columns) for columns in batch.to_pylist()]
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return [_row(batch, i) for i in range(batch.num_rows)]


def _row(batch: pa.RecordBatch, i: int) -> dict[str, Any] | str:
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns):
        try:
            columns[name] = rows.plain(column[i].as_py())
        except UnicodeDecodeError:
            return f"column {name!r} is not UTF-8"
    return columns

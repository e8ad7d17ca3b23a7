"""The whole schedule as a table, for an exact use anywhere: (step, example, u)."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
from etils import epath

from clusterjax import allocation, files

_STEPS_PER_GROUP = 256


def write(schedule: allocation.Schedule, path: epath.PathLike) -> int:
    """Writes a Parquet file with one row for each example of each step, in order.

    Columns: `step`, `epoch`, `example_id` (row of the corpus), `uid`, `cluster_id`,
    `num_labels`, and `token_weight`, u_i of METHOD §4: the loss of each label token is
    multiplied with it, and the products are summed over the step. The columns suffice
    to reproduce clusterjax's updates in another trainer.

    Returns:
      The number of rows.
    """
    schema = pa.schema(
        [
            ("step", pa.int32()),
            ("epoch", pa.int32()),
            ("example_id", pa.int64()),
            ("uid", pa.string()),
            ("cluster_id", pa.int32()),
            ("num_labels", pa.int32()),
            ("token_weight", pa.float64()),
        ],
        metadata={
            "schedule_fingerprint": schedule.fingerprint,
            "plan_fingerprint": schedule.plan.fingerprint,
            "num_steps": str(schedule.num_steps),
            "normalise": schedule.plan.normalise,
        },
    )
    count = 0

    def write_table(temporary: epath.Path) -> None:
        nonlocal count
        with (
            temporary.open("wb") as file,
            pq.ParquetWriter(file, schema, compression="zstd") as writer,
        ):
            for first in range(0, schedule.num_steps, _STEPS_PER_GROUP):
                last = min(first + _STEPS_PER_GROUP, schedule.num_steps)
                parts = [_rows(schedule, step, schema) for step in range(first, last)]
                table = pa.Table.from_batches(parts)
                writer.write_table(table)
                count += table.num_rows

    files.write_with(path, write_table)
    return count


def _rows(
    schedule: allocation.Schedule, index: int, schema: pa.Schema
) -> pa.RecordBatch:
    step = schedule.step(index)
    size = len(step.example_id)
    return pa.record_batch(
        [
            pa.array([step.step] * size, pa.int32()),
            pa.array([step.epoch] * size, pa.int32()),
            pa.array(step.example_id),
            pa.array(schedule.plan.uid[step.entry].tolist(), pa.string()),
            pa.array(step.cluster_id),
            pa.array(schedule.num_labels[step.entry], pa.int32()),
            pa.array(step.weight),
        ],
        schema=schema,
    )

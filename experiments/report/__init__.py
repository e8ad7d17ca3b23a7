"""One self-contained page about one run: `write(record, path)`, `read(workdir)`."""

from experiments.report.page import write
from experiments.report.record import RunRecord, read

__all__ = ["RunRecord", "read", "write"]

"""Rows collected as lists, turned into arrow batches file by file."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from replay_pipeline.storage.arrays import array_of
from replay_pipeline.storage.schemas import TABLES


class Columns:
    """One table in the making: the rows of the file at hand, and batches of all before it."""

    def __init__(self, name: str) -> None:
        self.schema = TABLES[name]
        self.open: dict[str, list[Any]] = {field.name: [] for field in self.schema}
        self._batches: list[pa.RecordBatch] = []

    def append(self, row: dict[str, Any]) -> None:
        """Add one row; absent keys are null."""
        for name, values in self.open.items():
            values.append(row.get(name))

    def extend(self, rows: Mapping[str, list[Any]]) -> None:
        """Add rows by column; every column is there."""
        for name, values in self.open.items():
            values += rows[name]

    def close(self) -> None:
        """Turn the open rows into a batch, which takes a fraction of their memory."""
        if not self.open[self.schema.names[0]]:
            return
        arrays = [array_of(self.open[field.name], field.type) for field in self.schema]
        for values in self.open.values():
            values.clear()
        self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=self.schema))

    def table(self) -> pa.Table:
        """Everything, as one table."""
        self.close()
        return pa.Table.from_batches(self._batches, self.schema)

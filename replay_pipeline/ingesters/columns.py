"""Rows are collected as lists and become one arrow batch per file."""

from collections.abc import Iterator, Mapping
from tempfile import TemporaryFile
from typing import IO, Any
from weakref import finalize

import pyarrow as pa

from replay_pipeline.storage.arrays import array_of
from replay_pipeline.storage.schemas import TABLES

_PART_BYTES = 4_000_000
"""Of rows that are kept in memory; what comes before is laid down on disk."""


class Columns:
    """A table under construction: the rows of the current file, and batches of earlier files.

    Iterating yields the table in parts. Of a large table, only one part is in memory.
    """

    def __init__(self, name: str) -> None:
        self.schema = TABLES[name]
        self.open: dict[str, list[Any]] = {field.name: [] for field in self.schema}
        self.num_rows = 0
        self._batches: list[pa.RecordBatch] = []
        self._n_bytes = 0
        self._file: IO[bytes] | None = None
        self._ends = [0]

    def append(self, row: dict[str, Any]) -> None:
        """Add one row; absent keys are null."""
        for name, values in self.open.items():
            values.append(row.get(name))

    def extend(self, rows: Mapping[str, list[Any]]) -> None:
        """Add rows by column; no column may be missing."""
        for name, values in self.open.items():
            values += rows[name]

    def close(self) -> None:
        """Turn the open rows into a batch, which takes a fraction of their memory."""
        n_rows = len(self.open[self.schema.names[0]])
        if not n_rows:
            return
        arrays = [array_of(self.open[field.name], field.type) for field in self.schema]
        for values in self.open.values():
            values.clear()
        self.num_rows += n_rows
        self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=self.schema))
        self._n_bytes += self._batches[-1].nbytes
        if self._n_bytes > _PART_BYTES:
            if self._file is None:
                self._file = TemporaryFile()  # noqa: SIM115 (it goes with the columns)
                finalize(self, self._file.close)
            with pa.ipc.new_stream(self._file, self.schema) as writer:
                for batch in self._batches:
                    writer.write_batch(batch)
            self._ends.append(self._file.tell())
            self._batches.clear()
            self._n_bytes = 0

    def __iter__(self) -> Iterator[pa.Table]:
        self.close()
        for start in self._ends[:-1]:
            assert self._file is not None
            self._file.seek(start)
            pa.default_memory_pool().release_unused()
            yield pa.ipc.open_stream(self._file).read_all()
        if self._batches or not self.num_rows:
            yield pa.Table.from_batches(self._batches, self.schema)

    def table(self) -> pa.Table:
        """Everything, as one table."""
        return pa.concat_tables(self)

"""Stored tables: parquet files with one schema each, written as a whole or not at all.

Layout under the data root: `<table>/trace_batch=<key>/part-0.parquet`.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from replay_pipeline.errors import SchemaError, StorageError
from replay_pipeline.storage.schemas import REPEATING, SCHEMA_VERSION, TABLES, WRITTEN_BY
from replay_pipeline.storage.store import Place, written_whole

OF_OTHER_VERSION = (
    "another version of this program wrote it: `replay-pipeline run` makes everything again, and the "
    "ledger keeps what is paid for"
)
"""What to do with a data root of another version."""

_VERSION_KEY = b"schema_version"
_WORTH_THREADS = 1_000
"""Rows from which on columns are read side by side; below it, threads cost more than they bring."""


def write_table(table: pa.Table | Iterable[pa.Table], path: Place, name: str) -> Place:
    """Write `table` as parquet with the schema of `TABLES[name]`. Equal rows give equal bytes.

    A table may come in parts, at least one, of which only one is in memory at a time.

    Raises:
        SchemaError: a column is missing, unknown, or of the wrong type.
        StorageError: the file cannot be written.
    """
    parts = [table] if isinstance(table, pa.Table) else table
    schema = TABLES[name].with_metadata({_VERSION_KEY: SCHEMA_VERSION.encode()})
    with (
        written_whole(path) as file,
        # On pages this large a low level finds nearly all repetitions of sessions that a high one
        # does, in a third of the time. Statistics of texts would only repeat the texts.
        pq.ParquetWriter(
            file,
            schema,
            compression="zstd",
            compression_level=3,
            data_page_size=4 << 20,
            use_dictionary=REPEATING[name],
            write_statistics=[field.name for field in schema if not pa.types.is_string(field.type)],
        ) as writer,
    ):
        for part in parts:
            writer.write_table(_as_declared(part, schema, name))
    return path


def _as_declared(table: pa.Table, schema: pa.Schema, name: str) -> pa.Table:
    if missing := set(schema.names) ^ set(table.column_names):
        raise SchemaError(f"{name}: columns {sorted(missing)} are missing or unknown")
    try:
        return table.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(f"{name}: {error}") from error


def readable(path: Place) -> Path | BinaryIO:
    """Return the input for a parquet reader. An object takes one request."""
    return path if isinstance(path, Path) else io.BytesIO(path.read_bytes())


def read_table(path: Place, name: str, *, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a table written by `write_table`, or some of its columns.

    Raises:
        StorageError: the file does not exist or cannot be read.
        SchemaError: it isn't a parquet file, or has another schema or version.
    """
    # A third of the time that `pq.read_table` takes for the small tables that most batches have.
    with _reading(path, name), pq.ParquetFile(readable(path)) as file:
        table = file.read(
            columns=None if columns is None else list(columns),
            use_threads=file.metadata.num_rows > _WORTH_THREADS,
        )
    version = (table.schema.metadata or {}).get(_VERSION_KEY, b"").decode()
    if version != SCHEMA_VERSION:
        raise SchemaError(
            f"{path}: schema version {version or 'unknown'}, this program reads {SCHEMA_VERSION}; "
            f"{OF_OTHER_VERSION}"
        )
    wanted = TABLES[name].names if columns is None else list(columns)
    if missing := set(wanted) - set(table.column_names):
        raise SchemaError(f"{path}: columns {sorted(missing)} are missing; {OF_OTHER_VERSION}")
    return table.select(wanted)


@contextmanager
def _reading(path: Place, name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise StorageError(
            f"{path}: no such table; run `replay-pipeline {WRITTEN_BY[name]}` first"
        ) from error
    except StorageError:
        raise
    except (OSError, pa.ArrowInvalid) as error:
        raise SchemaError(
            f"{path}: not a readable parquet file ({error}); `replay-pipeline verify` lists all damage"
        ) from error


def table_of(rows: list[dict[str, Any]], name: str) -> pa.Table:
    """Build the table `name` from one dict per row. Missing keys become null.

    Raises:
        SchemaError: a value does not fit its column.
    """
    schema = TABLES[name]
    try:
        return pa.table(
            {
                field.name: pa.array([r.get(field.name) for r in rows], field.type)
                for field in schema
            },
            schema=schema,
        )
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise SchemaError(f"{name}: {error}") from error


class DataRoot:
    """The folder or bucket with every table, manifest, receipt, and the dataset.

    It is a local folder or a prefix on an object store, as returned by `as_path`.
    """

    def __init__(self, path: Place) -> None:
        self.path = path

    def part(self, name: str, batch: str) -> Place:
        """Return the path of the rows of `batch` in the table `name`."""
        return self.path / self.name_of(name, batch)

    def name_of(self, name: str, batch: str) -> str:
        """Return the path of `part` relative to the root."""
        return f"{name}/trace_batch={batch}/part-0.parquet"

    def write(self, name: str, batch: str, table: pa.Table | Iterable[pa.Table]) -> Place:
        """Replace the rows of `batch`. Raises the errors of `write_table`."""
        return write_table(table, self.part(name, batch), name)

    def read(self, name: str, batch: str, *, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of `batch`, or some of their columns. Raises the errors of `read_table`."""
        return read_table(self.part(name, batch), name, columns=columns)

    def n_rows(self, name: str, batch: str) -> int:
        """Return the number of rows of `batch` without reading them. Raises the errors of `read_table`."""
        path = self.part(name, batch)
        with _reading(path, name):
            return pq.read_metadata(readable(path)).num_rows

    def has(self, name: str, batch: str) -> bool:
        """Return whether `batch` has been written."""
        return self.part(name, batch).exists()

    def batches(self, name: str) -> list[str]:
        """Return the keys of the batches in the table `name`, sorted."""
        return sorted(
            part.parent.name.removeprefix("trace_batch=")
            for part in (self.path / name).glob("trace_batch=*/part-0.parquet")
        )

    def read_all(self, name: str) -> pa.Table:
        """Return the rows of all batches, in the order of their keys."""
        parts = [self.read(name, batch) for batch in self.batches(name)]
        return pa.concat_tables(parts) if parts else TABLES[name].empty_table()

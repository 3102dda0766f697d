"""Tables at rest: parquet files of one schema each, written whole or not at all.

Layout under the data root: `<table>/trace_batch=<key>/part-0.parquet`.
"""

import io
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from replay_pipeline.errors import SchemaError, StorageError
from replay_pipeline.storage.schemas import REPEATING, SCHEMA_VERSION, TABLES, WRITTEN_BY
from replay_pipeline.storage.store import Place, written_whole

_VERSION_KEY = b"schema_version"
_WORTH_THREADS = 1_000
"""Rows from which on columns are read side by side; below it, threads cost more than they bring."""


def write_table(table: pa.Table | Iterable[pa.Table], path: Place, name: str) -> Place:
    """Write `table` as parquet with the schema of `TABLES[name]`; equal rows give equal bytes.

    Of a table in parts, at least one, only the part at hand is in memory.

    Raises:
        SchemaError: a column is missing, unknown or of another type.
        StorageError: the file cannot be written.
    """
    if isinstance(table, WrittenTable):
        with written_whole(path) as file, table.path.open("rb") as written:
            shutil.copyfileobj(written, file)
        return path
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


class WrittenTable:
    """A table that `write_table` wrote elsewhere: its bytes are taken over, and read if asked for."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name

    def __iter__(self) -> Iterator[pa.Table]:
        yield read_table(self.path, self.name)


def _as_declared(table: pa.Table, schema: pa.Schema, name: str) -> pa.Table:
    if missing := set(schema.names) ^ set(table.column_names):
        raise SchemaError(f"{name}: columns {sorted(missing)} are missing or unknown")
    try:
        return table.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(f"{name}: {error}") from error


def readable(path: Place) -> Path | BinaryIO:
    """Return the input for a parquet reader. An object is fetched in one request."""
    return path if isinstance(path, Path) else io.BytesIO(path.read_bytes())


def read_table(path: Place, name: str, *, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a table written by `write_table`, or some of its columns.

    Raises:
        StorageError: the file does not exist or cannot be read.
        SchemaError: it is no parquet file, or of another schema or version.
    """
    # A third of the time that `pq.read_table` takes for the small tables that most batches have.
    with _reading(path, name), pq.ParquetFile(readable(path)) as file:
        table = file.read(
            columns=None if columns is None else list(columns),
            use_threads=file.metadata.num_rows > _WORTH_THREADS,
        )
    if (version := version_of(table)) != SCHEMA_VERSION:
        raise SchemaError(
            f"{path}: schema version {version or 'unknown'}, this program reads {SCHEMA_VERSION}; "
            "`replay-pipeline upgrade` converts older tables"
        )
    wanted = TABLES[name].names if columns is None else list(columns)
    if missing := set(wanted) - set(table.column_names):
        raise SchemaError(
            f"{path}: columns {sorted(missing)} are missing; `replay-pipeline upgrade` adds those "
            "that an older version did not have"
        )
    return table.select(wanted)


def version_of(table: pa.Table) -> str:
    """Return the schema version that a table was written with; empty for a file of another program."""
    return (table.schema.metadata or {}).get(_VERSION_KEY, b"").decode()


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
            f"{path}: not a readable parquet file ({error}); `replay-pipeline verify` lists all damage, and `replay-pipeline repair` fixes it"
        ) from error


def table_of(rows: list[dict[str, Any]], name: str) -> pa.Table:
    """Build the table `name` from one dict per row; absent keys are null.

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

    A folder, or a prefix of an object store: what `as_path` gives.
    """

    def __init__(self, path: Place) -> None:
        self.path = path

    def part(self, name: str, batch: str) -> Place:
        """Return the path of the rows of `batch` in table `name`."""
        return self.path / self.name_of(name, batch)

    def name_of(self, name: str, batch: str) -> str:
        """Return the path of `part` below the root."""
        return f"{name}/trace_batch={batch}/part-0.parquet"

    def write(self, name: str, batch: str, table: pa.Table | Iterable[pa.Table]) -> Place:
        """Replace the rows of `batch`. Raises what `write_table` raises."""
        return write_table(table, self.part(name, batch), name)

    def read(self, name: str, batch: str, *, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of `batch`, or some of their columns. Raises what `read_table` raises."""
        return read_table(self.part(name, batch), name, columns=columns)

    def n_rows(self, name: str, batch: str) -> int:
        """Return how many rows `batch` has, without reading them. Raises what `read_table` raises."""
        path = self.part(name, batch)
        with _reading(path, name):
            return pq.read_metadata(readable(path)).num_rows

    def has(self, name: str, batch: str) -> bool:
        """Return whether `batch` has been written."""
        return self.part(name, batch).exists()

    def batches(self, name: str) -> list[str]:
        """Return keys of the batches that table `name` holds, sorted."""
        return sorted(
            part.parent.name.removeprefix("trace_batch=")
            for part in (self.path / name).glob("trace_batch=*/part-0.parquet")
        )

    def read_all(self, name: str) -> pa.Table:
        """Return the rows of all batches, in order of their keys."""
        parts = [self.read(name, batch) for batch in self.batches(name)]
        return pa.concat_tables(parts) if parts else TABLES[name].empty_table()

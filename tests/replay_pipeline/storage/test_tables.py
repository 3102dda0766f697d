import errno
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

from replay_pipeline.cli import app
from replay_pipeline.errors import SchemaError, StorageError
from replay_pipeline.storage import store
from replay_pipeline.storage.schemas import TABLES, WRITTEN_BY
from replay_pipeline.storage.tables import (
    DataRoot,
    read_table,
    table_of,
    write_table,
    written_whole,
)

ROWS = [{"state_id": f"s{i}", "outcome": "pair", "n_asked": 3} for i in range(5)]


def test_a_table_comes_back_as_it_was_written(tmp_path):
    table = table_of(ROWS, "outcomes")
    path = write_table(table, tmp_path / "a" / "outcomes.parquet", "outcomes")
    assert read_table(path, "outcomes").equals(table)


def test_equal_rows_give_equal_bytes(tmp_path):
    one = write_table(table_of(ROWS, "outcomes"), tmp_path / "one.parquet", "outcomes")
    two = write_table(table_of(ROWS, "outcomes"), tmp_path / "two.parquet", "outcomes")
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("name", sorted(TABLES))
def test_every_table_can_be_empty(tmp_path, name):
    path = write_table(table_of([], name), tmp_path / f"{name}.parquet", name)
    assert read_table(path, name).schema.equals(TABLES[name])


def test_a_missing_or_unknown_column_is_refused(tmp_path):
    table = table_of(ROWS, "outcomes")
    with pytest.raises(SchemaError, match="margin"):
        write_table(table.drop(["margin"]), tmp_path / "x.parquet", "outcomes")
    with pytest.raises(SchemaError, match="extra"):
        write_table(table.append_column("extra", pa.nulls(5)), tmp_path / "x.parquet", "outcomes")
    assert not list(tmp_path.iterdir())


def test_a_value_that_does_not_fit_names_the_table():
    with pytest.raises(SchemaError, match="outcomes"):
        table_of([{"state_id": "s", "n_asked": "many"}], "outcomes")


def test_another_schema_version_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "old.parquet"
    pq.write_table(
        table_of(ROWS, "outcomes").replace_schema_metadata({b"schema_version": b"0"}), path
    )
    with pytest.raises(SchemaError, match="replay-pipeline run"):
        read_table(path, "outcomes")


def test_what_is_no_parquet_file_is_refused_with_its_path(tmp_path):
    path = tmp_path / "no.parquet"
    path.write_text("hello")
    with pytest.raises(SchemaError, match=r"no\.parquet"):
        read_table(path, "outcomes")


def test_a_table_that_was_never_written_says_which_stage_is_missing(tmp_path):
    with pytest.raises(StorageError, match="run `replay-pipeline pairs` first"):
        read_table(tmp_path / "none.parquet", "outcomes")


def test_an_interrupted_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def interrupt():
        with written_whole(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_clear_error_and_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "outcomes.parquet"
    write_table(table_of(ROWS, "outcomes"), path, "outcomes")
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        write_table(table_of(ROWS[:1], "outcomes"), path, "outcomes")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_a_file_is_one_clear_error(tmp_path):
    (tmp_path / "root").write_text("a file")
    with pytest.raises(StorageError, match="cannot be written"):
        DataRoot(tmp_path / "root").write("outcomes", "b", table_of(ROWS, "outcomes"))


def test_batches_are_listed_and_read_in_order(tmp_path):
    root = DataRoot(tmp_path)
    for key in ("2026-02", "2026-01"):
        root.write("outcomes", key, table_of([{"state_id": key}], "outcomes"))
    assert root.batches("outcomes") == ["2026-01", "2026-02"]
    assert root.read_all("outcomes")["state_id"].to_pylist() == ["2026-01", "2026-02"]
    assert root.read_all("positives").num_rows == 0
    assert isinstance(root.path, Path)


def test_every_table_names_a_command_that_writes_it():
    assert list(WRITTEN_BY) == list(TABLES)
    assert set(WRITTEN_BY.values()) <= set(typer.main.get_command(app).commands)

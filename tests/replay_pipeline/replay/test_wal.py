import sqlite3

import pytest

from replay_pipeline.replay.money.database import use_wal


@pytest.fixture
def two(tmp_path):
    """Two connections to one database, of which the first is in the middle of a write."""
    first, second = (
        sqlite3.connect(tmp_path / "new.sqlite", isolation_level=None, timeout=60) for _ in range(2)
    )
    first.execute("create table t(x)")
    first.execute("begin immediate")
    yield first, second
    first.close()
    second.close()


def test_another_writer_is_waited_for(two):
    first, second = two
    asked = []

    def count(statement: str) -> None:
        asked.append(statement)
        if len(asked) == 3:
            first.execute("commit")

    second.set_trace_callback(count)
    use_wal(second, timeout_s=60)
    assert len(asked) == 3
    second.set_trace_callback(None)
    assert second.execute("pragma journal_mode").fetchone() == ("wal",)


def test_not_for_ever(two):
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        use_wal(two[1], timeout_s=0.05)


def test_what_is_no_database_is_told_at_once(tmp_path):
    path = tmp_path / "text"
    path.write_text("no database, and longer than the header of one" * 20)
    connection = sqlite3.connect(path)
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        use_wal(connection, timeout_s=60)
    connection.close()

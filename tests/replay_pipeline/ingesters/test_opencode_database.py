"""The database of a real OpenCode, recorded (`python -m tests.client.opencode` made it), and what it sent."""

import gzip
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from replay_pipeline.errors import IngestError
from replay_pipeline.ingesters import ingest
from replay_pipeline.ingesters.agents.opencode_database import export_sessions
from replay_pipeline.ingesters.json_lines import text_in
from tests.replay_pipeline.ingesters.logs import states_of
from tests.roots import pipeline_at

RECORDING = Path(__file__).parents[2] / "data" / "opencode.json.gz"
TABLES = ("session", "message", "part")


def recorded() -> dict[str, Any]:
    return json.loads(gzip.decompress(RECORDING.read_bytes()))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """OpenCode's own connection: what it wrote lies in the log beside the database alone."""
    place = tmp_path / "opencode" / "opencode.db"
    place.parent.mkdir()
    with closing(sqlite3.connect(place, isolation_level=None)) as rows:
        rows.execute("PRAGMA journal_mode = WAL")
        rows.execute("PRAGMA wal_autocheckpoint = 0")
        for name, made, _ in recorded()["tables"]:
            if name in TABLES:
                rows.execute(made)
        yield rows


def put(rows: sqlite3.Connection, *, until: int | None = None) -> None:
    """Write the recorded rows, of messages only the first `until`."""
    for name, _, found in recorded()["tables"]:
        if name not in TABLES:
            continue
        if name == "message":
            found = sorted(found, key=lambda row: (row[2], row[0]))[:until]
            kept = {row[0] for row in found}
        elif name == "part":
            found = [row for row in found if row[1] in kept]
        for row in found:
            marks = ", ".join("?" * len(row))
            rows.execute(f"INSERT OR REPLACE INTO {name} VALUES ({marks})", row)


def plain(messages: list[dict[str, Any]]) -> list[Any]:
    """Return the messages behind the system prompt, in one form for what is sent and what is read."""
    return [
        [
            message["role"],
            text_in(message.get("content") or ""),
            message.get("tool_call_id"),
            [
                [call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])]
                for call in message.get("tool_calls") or ()
            ],
        ]
        for message in messages
        if message["role"] != "system"
    ]


def states_in(source: Path) -> list[dict[str, Any]]:
    found = ingest(source, redact=False)
    report = found.report
    assert report.rows == report.rows_used + sum(report.skipped.values())
    return states_of(found)


def test_every_decision_of_its_database_is_the_request_that_opencode_sent(
    writer: sqlite3.Connection, tmp_path: Path
):
    put(writer)
    assert (tmp_path / "opencode" / "opencode.db").stat().st_size < 10_000  # the rest is in its log
    states = states_in(tmp_path / "opencode")
    sent = [plain(each["messages"]) for each in recorded()["sent"]]
    assert len(sent) >= 10
    assert sorted(plain(state["messages"]) for state in states) == sorted(sent)


def test_a_helpers_session_belongs_to_the_one_that_started_it(
    writer: sqlite3.Connection, tmp_path: Path
):
    put(writer)
    found = ingest(tmp_path / "opencode" / "opencode.db")
    main, helper = sorted(found.sessions.to_pylist(), key=lambda row: row["agent_id"] is not None)
    assert helper["parent_session_id"] == main["session_id"]
    assert main["conversation"] == helper["conversation"]
    assert main["agent"] == "opencode"


def test_a_database_is_read_while_opencode_writes_and_is_not_changed(
    writer: sqlite3.Connection, tmp_path: Path
):
    put(writer, until=3)
    folder = tmp_path / "opencode"
    is_done, failures = Event(), []

    def write() -> None:
        with closing(
            sqlite3.connect(folder / "opencode.db", isolation_level=None, timeout=0)
        ) as rows:
            try:
                for number in range(3_000):
                    rows.execute("UPDATE session SET tokens_input = ?", (number,))
            except sqlite3.Error as error:
                failures.append(error)
            finally:
                is_done.set()

    thread = Thread(target=write)
    thread.start()
    n_reads = 0
    while not is_done.is_set() or n_reads < 3:
        assert states_in(folder)
        n_reads += 1
    thread.join()
    assert failures == []
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".db-shm"}
    states_in(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".db-shm"} == before


def test_a_database_that_was_closed_is_read_without_a_file_beside_it(
    writer: sqlite3.Connection, tmp_path: Path
):
    put(writer)
    writer.close()
    folder = tmp_path / "opencode"
    assert [path.name for path in folder.iterdir()] == ["opencode.db"]
    assert states_in(folder)
    assert [path.name for path in folder.iterdir()] == ["opencode.db"]


def test_a_message_that_is_still_written_is_left_for_the_next_time(
    writer: sqlite3.Connection, tmp_path: Path
):
    put(writer)
    main = "(SELECT id FROM session WHERE parent_id IS NULL)"
    last = f"(SELECT id FROM message WHERE session_id = {main} ORDER BY time_created DESC LIMIT 1)"
    writer.execute(
        f"UPDATE message SET data = json_remove(data, '$.time.completed') WHERE id = {last}"
    )
    writer.execute("UPDATE session SET time_updated = unixepoch() * 1000")
    database = tmp_path / "opencode" / "opencode.db"
    settled = ingest(export_sessions(database, tmp_path / "settled", settle_s=60), redact=False)
    every = ingest(export_sessions(database, tmp_path / "all"), redact=False)
    assert len(every.state_ids - settled.state_ids) == 1


def test_a_result_that_was_cleared_is_shown_until_then(writer: sqlite3.Connection, tmp_path: Path):
    put(writer)
    (part_id, created) = writer.execute(
        "SELECT part.id, message.time_created FROM part JOIN message ON message.id = message_id "
        "WHERE json_extract(part.data, '$.callID') = 'call_002_0'"
    ).fetchone()
    writer.execute(
        "UPDATE part SET data = json_set(data, '$.state.time.compacted', ?) WHERE id = ?",
        (created + 1, part_id),
    )
    cleared = [
        message["content"] == "[Old tool result content cleared]"
        for state in states_in(tmp_path / "opencode")
        for message in state["messages"]
        if message.get("tool_call_id") == "call_002_0"
    ]
    assert cleared
    assert all(cleared)


def test_what_failed_at_its_provider_is_not_shown_again(writer: sqlite3.Connection, tmp_path: Path):
    put(writer)
    error = json.dumps({"name": "APIError", "data": {"message": "overloaded"}})
    writer.execute(
        "UPDATE message SET data = json_set(data, '$.error', json(?)) WHERE id = "
        "(SELECT message_id FROM part WHERE json_extract(data, '$.text') = 'Done.')",
        (error,),
    )
    states = states_in(tmp_path / "opencode")
    (failed,) = (state for state in states if state["outcome"] == "retracted")
    assert failed["student_action"]["content"] == "Done."
    assert not [s for s in states for m in s["messages"] if m["content"] == "Done."]


def test_a_database_that_cannot_be_read_is_told_and_holds_up_nothing(
    writer: sqlite3.Connection, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    put(writer)
    path = tmp_path / "opencode" / "copy" / "opencode.db"
    path.parent.mkdir()
    path.write_bytes(b"SQLite format 3\0" + os.urandom(8_000))
    found = ingest(tmp_path / "opencode")
    assert found.report.n_states == len(recorded()["sent"])
    assert found.report.skipped_files == {"foreign": 1}
    assert f"{path}: cannot be read as OpenCode's database" in caplog.text
    with pytest.raises(IngestError, match="not a session of an agent we know"):
        ingest(path)


def test_a_data_root_takes_a_database_in_and_reads_it_once(
    writer: sqlite3.Connection, tmp_path: Path
):
    put(writer, until=6)
    sources = {"ingest": {"sources": [str(tmp_path / "opencode")]}}
    work = pipeline_at(tmp_path / "root", **sources)
    work.ingest_new()
    before = len(list(work.receipts.all()))
    assert before
    work.ingest_new()
    assert len(list(work.receipts.all())) == before
    put(writer)
    work = pipeline_at(tmp_path / "root", **sources)
    work.ingest_new()
    assert not work.failed
    tables = [work.root.read("states", batch) for batch in work.batches()]
    ids = [state_id for table in tables for state_id in table["state_id"].to_pylist()]
    assert len(ids) == len(set(ids)) == len(recorded()["sent"])

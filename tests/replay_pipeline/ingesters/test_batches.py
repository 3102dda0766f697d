import os
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from replay_pipeline.errors import IngestError, StorageError
from replay_pipeline.ingesters import (
    TraceBatch,
    discover,
    ingest,
    read_manifest,
    write_manifest,
)
from tests.replay_pipeline.ingesters.logs import Log

MONDAY = datetime(2026, 3, 2, 12, tzinfo=UTC)


def session(folder: Path, name: str, n_steps: int = 2) -> Log:
    log = Log(name)
    log.user("go")
    for i in range(n_steps):
        log.does(f"m-{name}-{i}")
    dated(log.write(folder))
    return log


def dated(path: Path, day: datetime = MONDAY) -> None:
    os.utime(path, (day.timestamp(), day.timestamp()))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "projects" / "-home-kim-shop"
    for name in ("a", "b", "c"):
        session(folder, name)
    return folder


def found(batches: list[TraceBatch]) -> list[list[tuple[str, int, int | None]]]:
    return [[(s.path.name, s.start, s.end) for s in batch.slices] for batch in batches]


def test_new_files_become_batches_of_limited_size(source: Path):
    size = (source / "a.jsonl").stat().st_size
    assert len(found(discover([source]))) == 1
    assert [len(b) for b in found(discover([source], max_batch_sessions=2))] == [2, 1]
    assert [len(b) for b in found(discover([source], max_batch_bytes=2 * size))] == [2, 1]
    assert [len(b) for b in found(discover([source], max_batch_bytes=1))] == [1, 1, 1]


def test_keys_sort_in_the_order_of_discovery_and_hold_no_comma(source: Path):
    first = discover([source], max_batch_sessions=2)
    session(source, "d")
    second = discover([source], known=first)
    keys = [batch.key for batch in first + second]
    assert keys == sorted(keys)
    assert [key[:15] for key in keys] == [f"2026-03-02-000{i}" for i in (1, 2, 3)]
    assert not any("," in key for key in keys)
    assert discover([source]) == discover([source])


def test_what_a_manifest_covers_is_known(source: Path, tmp_path: Path):
    batches = discover([source])
    for batch in batches:
        write_manifest(batch, tmp_path)
    assert discover([source], known=[read_manifest(b.key, tmp_path) for b in batches]) == []


def test_only_the_new_bytes_of_a_grown_file_are_taken(source: Path):
    first = discover([source])
    size = (source / "b.jsonl").stat().st_size
    log = Log("b")
    log.says("m-new", "more", uuid="b-new", parent="b-u5")
    with (source / "b.jsonl").open("ab") as file:
        file.write(log.bytes)
    (batch,) = discover([source], known=first)
    assert found([batch]) == [[("b.jsonl", size, size + len(log.bytes))]]
    result = ingest(batch.slices)
    assert result.report.n_states == 1
    assert result.report.rows == 1
    assert result.turns.num_rows == 4


def test_a_line_that_is_still_being_written_waits(source: Path):
    path = source / "a.jsonl"
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b'{"type":"assistant","uu')
    assert ("a.jsonl", 0, size) in found(discover([source]))[0]


def test_a_last_line_without_newline_is_whole_if_it_is_json(source: Path):
    path = source / "a.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert ("a.jsonl", 0, path.stat().st_size) in found(discover([source]))[0]


def test_a_file_that_is_being_written_is_left_until_it_settles(source: Path):
    seconds_later = datetime(2026, 3, 2, 12, 0, 20, tzinfo=UTC)
    assert discover([source], settle_s=60, now=seconds_later) == []
    minutes_later = datetime(2026, 3, 2, 12, 5, tzinfo=UTC)
    assert len(discover([source], settle_s=60, now=minutes_later)) == 1


def test_a_rewrite_in_place_of_the_same_size_and_date_is_noticed_and_read_anew(source: Path):
    first = discover([source])
    known = ingest(first[0].slices).states["state_id"].to_pylist()
    path = source / "a.jsonl"
    path.write_bytes(path.read_bytes().replace(b"m-a-1", b"m-x-1"))
    dated(path)
    (second,) = discover([source], known=first)
    assert found([second]) == [[("a.jsonl", 0, path.stat().st_size)]]
    result = ingest(second.slices, known_state_ids=known)
    assert result.report.n_states == 2
    assert result.sessions["session_id"].to_pylist()[0].startswith("a~")
    assert discover([source], known=[*first, second]) == []


_opened: list[str] | None = None


def _note(event: str, args: tuple[object, ...]) -> None:
    if event == "open" and _opened is not None:
        _opened.append(str(args[0]))


sys.addaudithook(_note)


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Return the paths that this process opens, as Python itself counts them."""
    global _opened
    _opened = []
    yield _opened
    _opened = None


@pytest.mark.skipif(os.name != "posix", reason="other systems don't keep this time")
def test_files_that_did_not_change_are_not_opened(source: Path, opened: list[str]):
    time.sleep(1.2)  # a file of the last second may change again within the same tick
    known = discover([source])
    assert [path for path in opened if path.endswith(".jsonl")]
    assert TraceBatch.to_json(known[0]).count("ctime_ns") == 3
    opened.clear()
    assert discover([source], known=known) == []
    assert [path for path in opened if path.endswith(".jsonl")] == []
    path = source / "a.jsonl"
    path.write_bytes(path.read_bytes().replace(b"m-a-1", b"m-x-1"))
    dated(path)
    time.sleep(1.2)
    (second,) = discover([source], known=known)
    assert found([second]) == [[("a.jsonl", 0, path.stat().st_size)]]


def test_a_session_and_its_subagents_stay_in_one_batch(source: Path):
    for agent in ("x", "y"):
        log = Log("b", agentId=agent, isSidechain=True)
        log.user("find")
        log.says(f"m-{agent}", "found")
        dated(log.write(source / "b" / "subagents", f"agent-{agent}.jsonl"))
    batches = found(discover([source], max_batch_bytes=1))
    assert [sorted(name for name, _, _ in b) for b in batches] == [
        ["a.jsonl"],
        ["agent-x.jsonl", "agent-y.jsonl", "b.jsonl"],
        ["c.jsonl"],
    ]


def test_manifests_are_read_as_they_were_written_and_never_change(source: Path, tmp_path: Path):
    (batch,) = discover([source])
    path = write_manifest(batch, tmp_path)
    assert path == tmp_path / "batches" / f"{batch.key}.json"
    assert read_manifest(batch.key, tmp_path) == batch
    write_manifest(batch, tmp_path)
    with pytest.raises(StorageError, match="never change"):
        write_manifest(TraceBatch(batch.key, batch.slices[:1], batch.cursors[:1]), tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 9}', '{"version": 1, "files": [{}]}']
)
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str):
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches" / "k.json").write_text(text)
    with pytest.raises(IngestError, match=r"k\.json"):
        read_manifest("k", tmp_path)
    with pytest.raises(IngestError, match="no such batch"):
        read_manifest("other", tmp_path)


def test_the_folders_of_claude_code_are_found_by_the_environment(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path))
    assert len(found(discover())[0]) == 3
    home = tmp_path / "home"
    (home / ".claude").mkdir(parents=True)
    (tmp_path / "projects").rename(home / ".claude" / "projects")
    monkeypatch.delenv("CLAUDE_CONFIG_DIR")
    monkeypatch.setenv("HOME", str(home))
    assert len(found(discover())[0]) == 3
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    assert discover() == []


def test_a_file_of_a_batch_that_is_gone_is_an_error(source: Path):
    (batch,) = discover([source])
    (source / "a.jsonl").unlink()
    with pytest.raises(IngestError, match=r"a\.jsonl"):
        ingest(batch.slices)

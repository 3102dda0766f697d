import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay_pipeline.ingesters import batches, ingest, json_lines
from replay_pipeline.ingesters.base import ReadCounts
from replay_pipeline.ingesters.corpus import session_files
from replay_pipeline.ingesters.json_lines import lines_in, objects_in
from tests.replay_pipeline.ingesters.logs import Log

LINES = st.lists(st.sampled_from([b"", b"a", b"bcdefgh", b"ijklmnop", b"q" * 40]), max_size=8)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES, is_cut=st.booleans())
def test_lines_of_any_length_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[bytes], is_cut: bool
):
    monkeypatch.setattr(json_lines, "_PIECE_BYTES", 8)
    path = tmp_path / "a"
    path.write_bytes(b"\n".join(lines) + (b"" if is_cut else b"\n"))
    with path.open("rb") as file:
        assert [bytes(line) for line in lines_in(path)] == list(file)


ROW = b'{"type": "user", "uuid": "u1", "message": {"content": "go"}}'


@pytest.mark.parametrize(
    ("line", "n_objects", "skipped"),
    [
        (b'{"type": "user", "uu' + ROW + b"\n", 1, {"not_json": 1}),
        (b'{"type": "user", "message": {"role": "x", "content": [{"a"' + ROW, 1, {"not_json": 1}),
        (b'garbage {"a": 1} ' + ROW + ROW + b"\n", 2, {"not_json": 1}),
        (ROW + b'{"type": "us' + ROW + b"\n", 2, {"not_json": 1}),
        (b'{"type": "user", "message": {"role": "user"}\n', 0, {"not_json": 1}),
        (b'{"type": "user"', 0, {"truncated": 1}),
        (b"\x00" * 4_096 + b"\n", 0, {"null_bytes": 1}),
        (b"\x00" * 8 + ROW + b"\n", 1, {}),
        (b" \n", 0, {}),
    ],
)
def test_what_stands_behind_a_broken_row_is_read_and_the_rest_counted(
    line: bytes, n_objects: int, skipped: dict[str, int]
):
    counts = ReadCounts()
    found = list(objects_in(line, counts))
    assert [value["uuid"] for value in found] == ["u1"] * n_objects
    assert counts.skipped == skipped
    assert counts.rows == n_objects + sum(skipped.values())


def test_linked_folders_are_read_once_and_unreadable_ones_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    real = tmp_path / "elsewhere"
    Log().write(real)
    root = tmp_path / "projects"
    (root / "closed").mkdir(parents=True)
    (root / "linked").symlink_to(real)
    (real / "around").symlink_to(root)
    assert session_files(root) == [root / "linked" / "session-1.jsonl"]
    scan = os.scandir

    def refuses(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuses)
    session_files(root)
    assert "closed: folder cannot be read" in caplog.text


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_file_in_utf_16_is_read_like_one_in_utf_8(tmp_path: Path, encoding: str):
    log = Log()
    log.user("go, Zoë 🙂")
    log.says("m1", "done")
    half = "\ufeff" + log.bytes.decode()
    log.says("m2", "and more")
    good = ingest(log.write(tmp_path / "good"))
    wide = tmp_path / "wide" / "session-1.jsonl"
    wide.parent.mkdir()
    wide.write_bytes(half.encode(encoding))
    [first] = batches.discover([wide])
    wide.write_bytes(("\ufeff" + log.bytes.decode()).encode(encoding))
    assert ingest(wide).states["state_id"].equals(good.states["state_id"])
    assert ingest(wide).turns["messages_json"].equals(good.turns["messages_json"])
    [second] = batches.discover([wide], known=[first])
    assert [ingest(each.slices).report.n_states for each in (first, second)] == [1, 1]


def test_accounts_that_a_call_asked_for_are_replaced_in_the_whole_session(tmp_path: Path):
    log = Log()
    log.user("Who are the members?")
    log.calls("m1", "t1", "Bash", command="gh api orgs/shop/members --jq '.[].login'")
    log.answers("t1", "mkowal\nana-s\n")
    log.says("m2", "Then ana-s and Mkowal are members")
    log.calls("m3", "t2", "Bash", command="gh api pulls --jq '.[].user.login, .[].body'")
    log.answers("t2", "another\nChange the colour of the cart\n")
    log.says("m4", "another change of colour")
    result = ingest(log.write(tmp_path))
    shown = "".join(
        [*result.turns["messages_json"].to_pylist(), *result.states["action_text"].to_pylist()]
    )
    assert "mkowal" not in shown.lower()
    assert "ana-s" not in shown
    assert "Then user and user are members" in shown
    assert "another change of colour" in shown

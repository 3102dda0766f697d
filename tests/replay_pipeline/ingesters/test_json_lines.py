from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay_pipeline.ingesters import batches, json_lines
from replay_pipeline.ingesters.json_lines import lines_in
from tests.replay_pipeline.ingesters.logs import Log
from tests.replay_pipeline.ingesters.test_other_agents import read

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


def test_rows_longer_than_a_piece_are_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = Log()
    log.user("go " + "far " * 200)
    log.calls("m1", "t1", file_path="a" * 300)
    log.answers("t1", "line\n" * 300)
    log.says("m2", "done")
    path = log.write(tmp_path)
    path.write_bytes(path.read_bytes() + b'{"type": "user", "uuid": "' + b"x" * 500)
    whole, states = read(path)
    monkeypatch.setattr(json_lines, "_PIECE_BYTES", 64)
    pieces, same = read(path)
    assert states == same
    assert pieces.turns.equals(whole.turns)
    assert whole.report.skipped == {"truncated": 1} == pieces.report.skipped


@pytest.mark.parametrize("n_bytes", [0, 10, 70_000, 400_000])
def test_the_end_of_the_last_whole_line_is_found_far_back(tmp_path: Path, n_bytes: int):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": "' + b"x" * n_bytes)
    assert batches._complete_end(path, path.stat().st_size) == 9

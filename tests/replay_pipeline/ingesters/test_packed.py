"""Texts of long files, kept in a fraction of their memory."""

import tracemalloc
from pathlib import Path

import pytest

from replay_pipeline.ingesters.base import ReadCounts, Result
from replay_pipeline.ingesters.claude_code import ClaudeCode
from tests.replay_pipeline.ingesters.logs import Log


@pytest.mark.parametrize("text", ["short", "→ é 🙂 \ud800" * 900])
def test_a_packed_text_is_the_same(text: str):
    result = Result(text, is_error=True)
    result.pack()
    result.pack()
    assert result.text == text
    assert bool(result.packed) == (len(text) > 900)
    assert len(result.packed) < len(text.encode("utf-8", "surrogatepass")) / 10
    result.text = "other"
    assert result.text == "other"
    with pytest.raises(AttributeError):
        _ = result.texts


def test_of_a_long_file_little_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = Log()
    log.user("go")
    for number in range(50):
        body = f"line {number}\n" * 900
        log.does(f"m{number}", "Write", body, content=body)
    path = log.write(tmp_path)
    n_bytes = len(log.bytes)
    assert held(path) > 0.8 * n_bytes
    monkeypatch.setattr("replay_pipeline.ingesters.claude_code.LONG_BYTES", 1_000)
    assert held(path) < 0.3 * n_bytes


def held(path: Path) -> int:
    """Return the memory that a file takes once it is read."""
    # What modules keep of a first reading is not part of the file.
    list(ClaudeCode().read(path, ReadCounts()))
    tracemalloc.start()
    try:
        logs = list(ClaudeCode().read(path, ReadCounts()))
        assert len(logs[0].turns) > 50
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

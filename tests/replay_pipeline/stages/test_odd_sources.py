"""Sources that cannot be read, beside one that can: none ends a run, and each is told."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from replay_pipeline.cli import app
from replay_pipeline.ingesters import batches
from tests.replay_pipeline.ingesters.logs import Log


def a_log(folder: Path, session_id: str = "good") -> Path:
    log = Log(session_id)
    log.user("go")
    log.says("m-" + session_id, "done")
    return log.write(folder)


def told(output: str) -> str:
    return " ".join(output.replace("│", " ").split())


def test_odd_sources_beside_a_session_are_told_and_the_session_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    logs = tmp_path / "logs"
    a_log(logs)
    (logs / "folder.jsonl").mkdir()
    (logs / "broken.jsonl").symlink_to("gone.jsonl")
    (logs / "loop.jsonl").symlink_to("loop.jsonl")
    (logs / "around").symlink_to(logs)
    (logs / "empty.jsonl").touch()
    wide = a_log(tmp_path, "wide")
    (logs / "wide.jsonl").write_text(wide.read_text(), "utf-16")
    closed = a_log(logs / "other", "closed")
    complete_end = batches._complete_end

    def refused(path: Path, n_bytes: int) -> int:
        if path == closed.resolve():
            raise PermissionError(13, "Permission denied", str(path))
        return complete_end(path, n_bytes)

    monkeypatch.setattr(batches, "_complete_end", refused)
    for _ in range(2):
        run = CliRunner().invoke(app, ["ingest", str(logs), "--data", str(tmp_path / "root")])
        assert run.exit_code == 0, run.output
    assert "states 2" in told(run.output)
    assert "closed.jsonl: cannot be read (Permission denied)" in caplog.text
    monkeypatch.undo()
    run = CliRunner().invoke(app, ["ingest", str(logs), "--data", str(tmp_path / "root")])
    assert run.exit_code == 0
    assert "states 3" in told(run.output)

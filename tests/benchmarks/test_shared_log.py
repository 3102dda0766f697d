"""A benchmark that removes its folder waits for everything that writes there."""

import subprocess

import pytest

from benchmarks import shared_log


def test_processes_that_outlive_their_starter_are_waited_for(tmp_path):
    log, late = tmp_path / "log", tmp_path / "late"
    with shared_log.shared_log(log) as lines:
        subprocess.run(["sh", "-c", f"(sleep 0.3; touch {late}) &"], stdout=lines, check=True)
    shared_log.wait_for_writers(log)
    assert late.exists()


def test_a_process_that_does_not_end_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_log, "PATIENCE_S", 0.1)
    log = tmp_path / "log"
    with shared_log.shared_log(log), pytest.raises(TimeoutError, match="still writes"):
        shared_log.wait_for_writers(log)

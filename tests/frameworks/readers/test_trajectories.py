"""Sessions written as ATIF, read by the format's own models."""

from pathlib import Path

import pytest
from atif import Trajectory
from pydantic import ValidationError


def files_in(sessions: Path) -> list[Path]:
    return sorted((sessions / "trajectories").glob("*.json"))


def test_every_session_written_as_atif_is_valid(sessions):
    files = files_in(sessions)
    read = [Trajectory.model_validate_json(file.read_text("utf-8")) for file in files]
    assert len(read) > 1
    assert all(trajectory.steps for trajectory in read)
    assert any(step.tool_calls for trajectory in read for step in trajectory.steps)


def test_the_models_refuse_an_answer_to_a_call_that_was_not_made(sessions):
    text = next(t for f in files_in(sessions) if '"source_call_id"' in (t := f.read_text("utf-8")))
    with pytest.raises(ValidationError):
        Trajectory.model_validate_json(
            text.replace('"source_call_id": "', '"source_call_id": "not-')
        )

"""The control run, from the command line to the dataset card."""

import json

import pytest

from replay_pipeline.ingesters import ClaudeCodeIngester
from replay_pipeline.replay.ask.control import openrouter_name
from replay_pipeline.testing import TeacherServer
from tests.roots import PROJECT
from tests.support.commands import command
from tests.support.messages import bash
from tests.support.settings_files import write_settings

pytestmark = pytest.mark.slow


def test_the_control_figure_goes_with_the_dataset(tmp_path):
    # What no session of the sample does. A look would be answered, or have no vote.
    elsewhere = bash("make elsewhere")
    answers = {
        state["state_id"]: {openrouter_name(state["student_model"] or ""): elsewhere}
        for state in ClaudeCodeIngester().ingest(PROJECT)
    }
    with TeacherServer(answers) as server:
        data = tmp_path / "d"
        student = {
            "name": "student", "model": "student", "api_key_env": "", "base_url": server.base_url,
            "dialect": "openrouter",
        }  # fmt: skip
        write_settings(
            data,
            ingest={"sources": [PROJECT]},
            replay={"sample_teachers": True, "student": student, "ask_at": "consequences"},
        )
        # In the folder that the command is started in, so it has to be named.
        root = ("--data", data, "--settings", data / "settings.toml")
        assert command("run", "--no-train", *root, cwd=tmp_path).returncode == 0
        refused = command("control", *root, cwd=tmp_path)
        assert refused.returncode == 2
        assert "sample" in refused.stderr
        text = (data / "settings.toml").read_text().replace("sample_teachers = true\n", "")
        (data / "settings.toml").write_text(text)
        done = command("control", *root, "--states", "10", "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["n_states"] == 10
        assert 8 <= report["n_valid"] <= 10  # a subagent may not have the tool
        assert report["left"] == 1.0
        assert 0 < report["spent_usd"] <= 1.0
        assert command("publish", *root, cwd=tmp_path).returncode == 0
        card = (data / "dataset" / "README.md").read_text()
        assert "## Control run" in card
        assert "| `left` | 1.0 |" in card

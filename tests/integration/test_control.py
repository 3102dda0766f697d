"""The control run, from the command line to the dataset card."""

import json
import subprocess
from pathlib import Path

import pytest

from replay_pipeline.ingesters import ClaudeCodeIngester
from replay_pipeline.replay.ask.control import openrouter_name
from replay_pipeline.storage.processes import child_environment
from replay_pipeline.testing import TeacherServer
from tests.roots import PROJECT
from tests.support.forked import BIN, forked
from tests.support.settings_files import write_settings

pytestmark = pytest.mark.slow

# What no session of the sample does. A look would be answered, or have no vote.
ELSEWHERE = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "c",
            "type": "function",
            "function": {"name": "Bash", "arguments": '{"command":"make elsewhere"}'},
        }
    ],
}


def run(*words: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        forked([BIN / "replay-pipeline", *words]),
        cwd=cwd,
        env=child_environment(HOME=str(cwd), **environment),
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_control_figure_goes_with_the_dataset(tmp_path):
    states = ClaudeCodeIngester().ingest(PROJECT)
    answers = {
        s["state_id"]: {openrouter_name(s["student_model"] or ""): ELSEWHERE} for s in states
    }
    with TeacherServer(answers) as server:
        data = tmp_path / "d"
        student = {
            "name": "student",
            "model": "student",
            "api_key_env": "",
            "base_url": server.base_url,
            "dialect": "openrouter",
        }
        write_settings(
            data,
            ingest={"sources": [PROJECT]},
            replay={"sample_teachers": True, "student": student, "ask_at": "consequences"},
        )
        # In the folder that the command is started in, so it has to be named.
        root = ("--data", data, "--settings", data / "settings.toml")
        assert run("run", "--no-train", *root, cwd=tmp_path).returncode == 0
        refused = run("control", *root, cwd=tmp_path)
        assert refused.returncode == 2
        assert "sample" in refused.stderr
        text = (data / "settings.toml").read_text().replace("sample_teachers = true\n", "")
        (data / "settings.toml").write_text(text)
        done = run("control", *root, "--states", "10", "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["n_states"] == 10
        assert 8 <= report["n_valid"] <= 10  # a subagent may not have the tool
        assert report["left"] == 1.0
        assert 0 < report["spent_usd"] <= 1.0
        assert run("publish", *root, cwd=tmp_path).returncode == 0
        card = (data / "dataset" / "README.md").read_text()
        assert "## Control run" in card
        assert "| `left` | 1.0 |" in card

"""The real package on states with a check: each rollout is paid by the project's own test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from replay_pipeline.testing import TeacherServer
from tests.support.small_repository import CHECK, REQUESTS, RIGHT, WRONG, served


def edit(change):
    function = {"name": "Edit", "arguments": json.dumps({"file_path": "tide.py", **change})}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def evaluate(address: str, output: Path, script, environment):
    with TeacherServer(script=script) as server:
        command = [
            str(Path(sys.executable).with_name("vf-eval")),
            "served_states",
            *("--env.taskset.base-url", address),
            *("--client.base-url", server.base_url, "--client.api-key-var", "NO_KEY"),
            *("--env.agent.runtime.type", "subprocess", "-m", server.teachers()[0].model),
            *("-o", str(output), "--no-push", "--no-rich"),
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    files = list(output.glob("*/traces.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize(("change", "reward"), [(RIGHT, 1.0), (WRONG, 0.0)])
def test_a_rollout_is_paid_by_the_test_of_the_project(tmp_path, environment, change, reward):
    with served(tmp_path, max_calls=1) as address:
        episodes = evaluate(address, tmp_path / "out", edit(change), environment)
    assert len(episodes) == len(REQUESTS)
    for episode in episodes:
        data, (trace,) = episode["task"]["data"], episode["traces"]
        assert trace["ok"], trace["errors"]
        assert (data["check"], episode["task"]["key"]) == (CHECK, data["state_id"])
        assert trace["rewards"]["check_reward"]["score"] == reward
        assert [tool["name"] for tool in trace["tools"]][:2] == ["Read", "Edit"]


def test_an_answer_in_words_ends_an_episode_without_a_reward(tmp_path, environment):
    words = {"role": "assistant", "content": "Done."}
    with served(tmp_path) as address:
        episodes = evaluate(address, tmp_path / "out", words, environment)
    scores = {e["traces"][0]["rewards"]["check_reward"]["score"] for e in episodes}
    assert scores == {0.0}

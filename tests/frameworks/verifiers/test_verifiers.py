"""The real package: rollouts of the replay taskset against the loopback teacher server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from replay_pipeline.actions import consensus_reward
from replay_pipeline.ingesters import Traces, ingest
from tests.support.small_repository import CHECK, REQUESTS, RIGHT, WRONG, served
from tests.support.teachers import TeacherServer
from trainer.data.dataset import load_preference_data

CALL = {"name": "Read", "arguments": '{"file_path": "cart.py"}'}
READ_CART = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": CALL}],
}
REWARD = "replay_pipeline.actions:consensus_reward"


def published(dataset: Path):
    return "--env.taskset.dataset", str(dataset), "--env.taskset.task.reward", REWARD


def evaluate(states, output: Path, server: TeacherServer, environment, *options: str):
    """`vf-eval` on all of these states; gives its exit code, its episodes and their file."""
    model = server.teachers()[0].model
    command = [
        str(Path(sys.executable).with_name("vf-eval")),
        "replay_states",
        *states,
        *("--client.base-url", server.base_url, "--client.api-key-var", "NO_KEY"),
        *("--env.agent.runtime.type", "subprocess", "-m", model, "-o", str(output)),
        *("--no-push", "--no-rich", *options),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    files = list(output.glob("*/traces.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return done, rows, files


def test_rollouts_are_scored_by_the_pipelines_own_matcher(dataset, tmp_path, environment):
    with TeacherServer(script=READ_CART) as server:
        done, episodes, files = evaluate(published(dataset), tmp_path / "out", server, environment)
        bill = server.bill()
    assert done.returncode == 0, done.stderr[-2000:]
    prompts = {row["state_id"]: row for row in load_preference_data(dataset).prompts}
    assert len(episodes) == len(prompts) == bill.n_requests == 16
    for episode in episodes:
        data, (trace,) = episode["task"]["data"], episode["traces"]
        row = prompts[data["state_id"]]
        assert episode["task"]["key"] == row["state_id"]
        assert trace["ok"], trace["errors"]
        expected = consensus_reward(READ_CART, row)
        assert trace["rewards"]["state_reward"]["score"] == expected
        assert (data.get("hint"), data["consensus"]) == (row["hint"], row["consensus"])
        assert [tool["name"] for tool in trace["tools"]] == ["Read", "Edit", "Bash"]
        assert row["hint"] not in [node["message"].get("content") for node in trace["nodes"][:1]]
    assert {e["traces"][0]["rewards"]["state_reward"]["score"] for e in episodes} == {0.1, 1.0}

    # What came out goes back in: every rollout is a state again, with the same prefix.
    result = ingest(files[0], redact=False)
    traces = Traces(
        sessions=result.sessions, turns=result.turns, states=result.states, tools=result.tools
    )
    states = list(traces.materialize())
    assert len(states) == len(episodes)
    for state in states:
        (call,) = state["student_action"]["tool_calls"]
        assert (call["function"]["name"], call["function"]["arguments"]) == tuple(CALL.values())
    prefixes = [[m["role"] for m in state["messages"] if m["role"] != "system"] for state in states]
    recorded = [[m["role"] for m in row["prompt"]] for row in prompts.values()]
    assert sorted(prefixes) == sorted(recorded)


def test_a_failing_endpoint_is_an_error_of_the_episode_and_no_score(dataset, tmp_path, environment):
    faults = [{"kind": "status", "status": 400, "message": "context too long"}]
    with TeacherServer(script=READ_CART, faults=faults) as server:
        _, episodes, _ = evaluate(
            published(dataset), tmp_path / "out", server, environment, "-n", "1"
        )
    (episode,) = episodes
    (trace,) = episode["traces"]
    assert (episode["ok"], trace["ok"]) == (False, False)
    assert "context too long" in json.dumps(trace["errors"])


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_taskset_loads_without_a_run(dataset, split):
    from trainer.engines.verifiers.taskset import ReplayTaskset, ReplayTasksetConfig

    tasks = list(
        ReplayTaskset(ReplayTasksetConfig(id="replay_states", dataset=str(dataset), split=split))
    )
    assert len(tasks) == {"train": 16, "test": 4}[split]
    assert tasks[0].data.prompt[0].role == "user"


def test_a_taskset_without_rows_is_an_error():
    from trainer.engines.verifiers.taskset import ReplayTaskset, ReplayTasksetConfig
    from trainer.errors import DatasetError

    with pytest.raises(DatasetError, match="set the taskset's `dataset`"):
        list(ReplayTaskset(ReplayTasksetConfig(id="replay_states")))


def edit(change):
    function = {"name": "Edit", "arguments": json.dumps({"file_path": "tide.py", **change})}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


@pytest.mark.parametrize(
    ("reply", "reward"),
    [(edit(RIGHT), 1.0), (edit(WRONG), 0.0), ({"role": "assistant", "content": "Done."}, 0.0)],
    ids=["right", "wrong", "words"],
)
def test_a_state_with_a_check_is_paid_by_the_test_of_the_project(
    tmp_path, environment, reply, reward
):
    with served(tmp_path, max_calls=1) as address, TeacherServer(script=reply) as server:
        where = ("--env.taskset.base-url", address)
        done, episodes, _ = evaluate(where, tmp_path / "out", server, environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(episodes) == len(REQUESTS)
    for episode in episodes:
        data, (trace,) = episode["task"]["data"], episode["traces"]
        assert trace["ok"], trace["errors"]
        assert (data["check"], episode["task"]["key"]) == (CHECK, data["state_id"])
        assert trace["rewards"]["state_reward"]["score"] == reward
        assert {"Read", "Edit"} <= {tool["name"] for tool in trace["tools"]}

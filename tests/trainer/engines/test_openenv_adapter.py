"""What the OpenEnv adapter makes of schemas, rows and outcomes; `tests/frameworks` has the servers."""

import json

import pytest
from transformers.utils import get_json_schema

from trainer.data.dataset import PreferenceData
from trainer.data.rewards import consensus_reward
from trainer.engines.openenv.adapter import make_environment
from trainer.engines.openenv.episodes import Episode, replay_tasks
from trainer.engines.openenv.failures import CallOutcomes, FailureLimit
from trainer.engines.openenv.tool_methods import tool_method
from trainer.errors import DatasetError, EnvironmentFailedError, TrainerConfigError

GREP = {
    "type": "object",
    "properties": {
        "pattern": {"type": "string", "description": "What to\n  look for"},
        "-A": {"type": "integer"},
        "class": {"type": ["string", "null"], "description": "kind (choices: any)"},
        "mode": {"enum": ["content", "count"]},
        "paths": {"type": "array", "items": {"type": "string"}},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "number"}]},
        "filters": {"type": "object"},
        "anything": {},
    },
    "required": ["pattern", "-A"],
}


def test_a_method_has_the_signature_that_the_schema_describes():
    calls = []

    class Environment:
        Grep = tool_method(
            "Grep", "Search  in\nfiles.", GREP, lambda _self, name, got: calls.append((name, got))
        )

    function = get_json_schema(Environment().Grep)["function"]
    assert (function["name"], function["description"]) == ("Grep", "Search in files.")
    parameters = function["parameters"]
    assert parameters["required"] == ["pattern", "_A"]
    kinds = {k: v.get("type") for k, v in parameters["properties"].items()}
    assert kinds == {
        "pattern": "string",
        "_A": "integer",
        "class_": "string",
        "mode": "string",
        "paths": "array",
        "limit": ["integer", "number"],
        "filters": "object",
        "anything": None,
    }
    assert parameters["properties"]["mode"]["enum"] == ["content", "count"]
    assert parameters["properties"]["pattern"]["description"] == "What to look for"
    Environment().Grep(pattern="x", _A=2, class_="y")
    Environment().Grep(**{"pattern": "x", "-A": 2, "class": "y"})
    assert calls[0] == calls[1] == ("Grep", {"pattern": "x", "-A": 2, "class": "y"})


def test_a_tool_without_parameters_and_description_is_a_tool():
    class Environment:
        Now = tool_method("Now", "", {}, lambda *_: "noon")

    assert get_json_schema(Environment().Now)["function"]["description"] == "Now"
    assert Environment().Now() == "noon"


@pytest.mark.parametrize("name", ["reset", "get_reward", "_hidden", ""])
def test_a_tool_that_trl_would_hide_is_refused(name):
    with pytest.raises(TrainerConfigError, match="TRL does not offer"):
        tool_method(name, "", {}, lambda *_: "")


def test_too_many_failures_are_an_error_that_says_how_many():
    outcomes = CallOutcomes(FailureLimit(max_frequency=0.25, window=8, min_calls=4))
    for _ in range(3):
        outcomes.answered(is_refused=True)
    outcomes.failed("time-out")
    outcomes.check()
    outcomes.failed("time-out")
    with pytest.raises(EnvironmentFailedError, match=r"2 of the last 5 .*25% may.*time-out"):
        outcomes.check()


def test_old_failures_are_forgotten():
    outcomes = CallOutcomes(FailureLimit(max_frequency=0.25, window=8, min_calls=4))
    for _ in range(3):
        outcomes.failed("start-up")
    for _ in range(8):
        outcomes.answered(is_refused=False)
    outcomes.check()
    assert (outcomes.n_failed, outcomes.failure_frequency) == (3, 0.0)


@pytest.mark.parametrize("options", [{"max_frequency": 1.0}, {"min_calls": 0}, {"window": 5}])
def test_a_limit_out_of_range_is_refused(options):
    with pytest.raises(TrainerConfigError):
        FailureLimit(**options)


def test_a_server_without_tools_is_refused():
    with pytest.raises(TrainerConfigError, match="offers no tool"):
        make_environment([], lambda: pytest.fail("nobody may connect"))


def tool(name: str, *parameters: str) -> dict:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def state(state_id: str, *calls: tuple[str, dict], tools=()) -> dict:
    made = [
        {"id": f"c{i}", "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
        for i, (n, a) in enumerate(calls)
    ]
    consensus = {"role": "assistant", "content": "" if made else "Done.", "tool_calls": made}
    prompt = [{"role": "user", "content": "go"}]
    return {"state_id": state_id, "prompt": prompt, "consensus": consensus, "tools": list(tools)}


def published(*prompts: dict) -> PreferenceData:
    return PreferenceData(
        pairs=[], prompts=list(prompts), positives=[], test_pairs=[], test_prompts=[]
    )


def test_the_rewards_of_an_episode_add_up_to_that_of_the_whole_decision():
    row = state("s1", ("Read", {"p": "a"}), ("Read", {"p": "b"}))
    episode = Episode(row, consensus_reward)
    gains = [episode.call("Read", {"p": "b"}), episode.call("Read", {"p": "a"})]
    assert (sum(gains), episode.score, episode.is_done) == (1.0, 1.0, True)
    with pytest.raises(DatasetError, match="the episode is over"):
        episode.call("Read", {"p": "c"})


def test_states_without_a_call_are_left_out_and_counted():
    tasks = replay_tasks(
        published(
            state("s1", ("Read", {}), tools=[tool("Read"), tool("Bash", "command")]),
            state("s2"),
            state("s3", ("Read", {}), tools=[tool("Read", "path")]),
        )
    )
    assert [row["state_id"] for row in tasks.splits["train"]] == ["s1", "s3"]
    assert tasks.n_without_call == 1
    assert [t["function"]["name"] for t in tasks.tools] == ["Bash", "Read"]
    assert tasks.tools[1]["function"]["parameters"]["properties"] == {"path": {"type": "string"}}
    assert tasks.find("s3") is tasks.row("train", 1)
    for wrong in (lambda: tasks.find("s2"), lambda: tasks.row("train", 2)):
        with pytest.raises(DatasetError, match="there is no state"):
            wrong()


@pytest.mark.parametrize(
    ("rows", "message"),
    [([state("s1")], "whose consensus is a tool call"), ([state("s1", ("Read", {}))], "its tools")],
)
def test_a_dataset_that_is_no_environment_is_refused(rows, message):
    with pytest.raises(DatasetError, match=message):
        replay_tasks(published(*rows))

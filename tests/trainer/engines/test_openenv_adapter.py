"""What the OpenEnv adapter makes of schemas and outcomes; `tests/frameworks` has the servers."""

import pytest
from transformers.utils import get_json_schema

from trainer.engines.openenv.adapter import CallOutcomes, make_environment, tool_method
from trainer.errors import EnvironmentFailedError, TrainerConfigError

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


def test_too_many_failures_are_an_error_that_says_how_many_and_old_ones_are_forgotten():
    outcomes = CallOutcomes()
    for _ in range(19):
        outcomes.answered(is_refused=True)
    outcomes.failed("time-out")
    outcomes.check()
    outcomes.failed("time-out")
    with pytest.raises(EnvironmentFailedError, match=r"2 of the last 21 .*5% may.*time-out"):
        outcomes.check()
    for _ in range(200):
        outcomes.answered(is_refused=False)
    outcomes.check()
    assert (outcomes.n_calls, outcomes.n_refused, outcomes.n_failed) == (221, 19, 2)


def test_a_server_without_tools_is_refused():
    with pytest.raises(TrainerConfigError, match="offers no tool"):
        make_environment([], lambda: pytest.fail("nobody may connect"))

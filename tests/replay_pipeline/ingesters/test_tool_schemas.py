import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from replay_pipeline.ingesters import ClaudeCodeIngester, ingest
from replay_pipeline.ingesters.tool_schemas import ToolLearner, merge_tools, offered_tools
from replay_pipeline.replay.dialects.base import RequestOptions
from replay_pipeline.replay.dialects.requests import RequestBuilder
from replay_pipeline.settings import DEFAULT_TEACHERS
from tests.replay_pipeline.ingesters.logs import Log, tool_use

BUILT_IN = offered_tools("2.1").keys()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-1, 1) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["path", "n", "deep"]), VALUES, max_size=3)


def learnt(calls: list[dict], version: str = "2.1.1") -> dict:
    learner = ToolLearner()
    for arguments in calls:
        learner.see("Tool", json.dumps(arguments), version)
    (row,) = learner.rows()
    return json.loads(row["tool_json"])


def accepts(tool: dict, arguments: dict) -> bool:
    return Draft202012Validator(tool["function"]["parameters"]).is_valid(arguments)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(ARGUMENTS, min_size=1, max_size=8))
def test_a_schema_accepts_every_call_it_was_learnt_from(calls: list[dict]):
    tool = learnt(calls)
    Draft202012Validator.check_schema(tool["function"]["parameters"])
    assert all(accepts(tool, arguments) for arguments in calls)


@settings(max_examples=60, deadline=None)
@given(st.lists(ARGUMENTS, min_size=1, max_size=6), st.lists(ARGUMENTS, min_size=1, max_size=6))
def test_merged_schemas_accept_what_either_accepts(left: list[dict], right: list[dict]):
    merged = merge_tools([learnt(left), learnt(right)])
    Draft202012Validator.check_schema(merged["function"]["parameters"])
    assert all(accepts(merged, arguments) for arguments in left + right)


def test_a_key_of_every_call_is_required_once_there_are_enough_calls():
    parameters = learnt([{"path": "a", "n": 1}, {"path": "b"}, {"path": "c"}])["function"][
        "parameters"
    ]
    assert parameters["required"] == ["path"]
    assert not accepts({"function": {"parameters": parameters}}, {"n": 1})
    assert "required" not in learnt([{"path": "a"}])["function"]["parameters"]


def test_calls_that_were_refused_for_their_arguments_teach_nothing(tmp_path: Path):
    log = Log()
    log.user("go")
    log.calls("m1", "t1", "Grep", pattern="x")
    log.answers("t1")
    log.calls("m2", "t2", "Grep", patern="x")
    log.answers("t2", "InputValidationError: Grep failed", is_error=True)
    (row,) = ingest(log.write(tmp_path)).tools.to_pylist()
    assert list(json.loads(row["tool_json"])["function"]["parameters"]["properties"]) == ["pattern"]
    assert (row["n_calls"], row["agent_version"], row["source"]) == (1, "2.1", "inferred")


def test_a_state_is_offered_the_built_in_tools_and_its_own_external_ones(tmp_path: Path):
    for name, tool in (("one", "mcp__crm__find"), ("two", "mcp__db__query")):
        log = Log(name)
        log.user("go")
        log.says(f"m-{name}", tool_use(f"t-{name}", tool, q="x"), tool_use(f"r-{name}", "Read"))
        log.write(tmp_path)
    offered = {
        state["session_id"]: {tool["function"]["name"] for tool in state["tools"]} - BUILT_IN
        for state in ClaudeCodeIngester().ingest(tmp_path)
    }
    assert offered == {"one": {"mcp__crm__find"}, "two": {"mcp__db__query"}}


def test_requests_keep_their_hashes_when_more_sessions_are_read(tmp_path: Path):
    def asked():
        builder = RequestBuilder(RequestOptions())
        return {
            state["state_id"]: builder.question(state, DEFAULT_TEACHERS[0]).sha
            for state in ClaudeCodeIngester().ingest(tmp_path)
        }

    log = Log("one")
    log.user("go")
    log.does("m1", "Read", file_path="a")
    log.does("m2", "mcp__crm__find", q="x")
    log.write(tmp_path)
    before = asked()
    more = Log("two")
    more.user("go")
    more.does("n1", "Read", file_path="b", offset=3)
    more.does("n2", "mcp__crm__find", q="x", limit=4)
    more.does("n3", "Bash", command="ls")
    more.write(tmp_path)
    after = asked()
    assert before
    assert {state_id: after[state_id] for state_id in before} == before
    assert len(after) > len(before)


def test_the_tools_of_a_release_series_are_whole_definitions():
    for series in ("2.0", "2.1", ""):
        for name, tool in offered_tools(series).items():
            schema = tool["function"]["parameters"]
            Draft202012Validator.check_schema(schema)
            assert set(schema["required"]) <= set(schema["properties"])
            assert len(tool["function"]["description"]) >= 20, name
    assert "TaskOutput" not in offered_tools("2.0")
    assert "BashOutput" not in offered_tools("2.1")
    assert offered_tools("") == offered_tools("2.1") == offered_tools("9.9")


@pytest.mark.parametrize("name", ["", "a b", 'Task" >', "x" * 200])
def test_a_name_that_no_api_takes_is_no_tool(name: str):
    learner = ToolLearner()
    learner.see(name, "{}", None)
    assert learner.rows() == []


def test_an_object_with_ever_new_keys_is_a_map():
    calls = [{"env": {f"k{i}": "v" for i in range(n)}} for n in (3, 60)]
    tool = learnt(calls)
    assert tool["function"]["parameters"]["properties"]["env"] == {"type": "object"}
    assert accepts(tool, {"env": {"never seen": "v"}})

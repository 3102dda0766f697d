"""Messages there and back, in the forms of the dataset and of verifiers."""

import pytest

from trainer.engines.verifiers.wire import (
    flat_messages,
    flat_tools,
    nested_action,
    nested_tools,
)
from trainer.errors import DatasetError

CALL = {"id": "c1", "type": "function", "function": {"name": "Read", "arguments": {"p": "ä"}}}


def test_messages_become_flat():
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "text"},
    ]
    assert flat_messages(messages) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "name": "Read", "arguments": '{"p": "ä"}'}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "text"},
    ]


def test_an_action_comes_back_nested():
    (flat,) = flat_messages([{"role": "assistant", "content": "I read", "tool_calls": [CALL]}])
    function = {"name": "Read", "arguments": '{"p": "ä"}'}
    assert nested_action(flat) == {
        "role": "assistant",
        "content": "I read",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    assert nested_action({"role": "assistant"}) == {"role": "assistant", "content": ""}


def test_tools_come_back_as_they_were():
    tool = {"name": "Read", "description": "Reads.", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": tool}]
    assert nested_tools(flat_tools(tools)) == tools
    assert flat_tools(None) == []


def test_a_role_that_verifiers_does_not_know_is_an_error():
    with pytest.raises(DatasetError, match="'developer'"):
        flat_messages([{"role": "developer", "content": "x"}])

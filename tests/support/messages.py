"""Messages of an agent and of its teachers, as a client has them."""

import json
from typing import Any

from replay_pipeline.types import Message


def call(name: str, **arguments: Any) -> Message:
    """Return a message with one call."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    made = {"id": "call_1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [made]}


def bash(command: str) -> Message:
    """Return a message that runs a command."""
    return call("Bash", command=command)


def edit(path: str, old: str, new: str = "x") -> Message:
    """Return a message that replaces a text in a file."""
    return call("Edit", file_path=path, old_string=old, new_string=new)


def says(text: str) -> Message:
    """Return a message without a call."""
    return {"role": "assistant", "content": text}


def together(*messages: Message) -> Message:
    """Return one message with the calls of several."""
    calls = [each for message in messages for each in message["tool_calls"]]
    return {"role": "assistant", "content": None, "tool_calls": calls}

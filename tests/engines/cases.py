"""Requests, well and badly formed, and what real servers answer to them.

    python -m tests.engines.cases

asks both servers again and writes `tests/replay_pipeline/testing/real_servers.json`, to which the
loopback server is held by tests that need no real server.
"""

import json
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.engines.conftest import MODELS, served

RECORDED = Path(__file__).parents[2] / "tests/replay_pipeline/testing/real_servers.json"

READ = {
    "type": "function",
    "function": {
        "name": "Read",
        "description": "Read a file by its path.",
        "parameters": {
            "type": "object",
            "properties": {"file_path": {"type": "string"}},
            "required": ["file_path"],
        },
    },
}
USER = {"role": "user", "content": "Say ok."}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "x = 1"}


def called(**function: Any) -> dict[str, Any]:
    """Make an assistant's message with one call."""
    function = {"name": "Read", "arguments": '{"file_path": "a.py"}', **function}
    kept = {key: value for key, value in function.items() if value is not None}
    call = {"id": "call_1", "type": "function", "function": kept}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def said(*messages: Any, tools: Any = None) -> dict[str, Any]:
    """Make the fields of a request with these messages."""
    return {"messages": list(messages)} | ({"tools": tools} if tools else {})


CASES: dict[str, dict[str, Any]] = {
    "a question": {},
    "a question with tools": {"tools": [READ]},
    "a call and its result": said(USER, called(), RESULT, tools=[READ]),
    "content in parts": said({"role": "user", "content": [{"type": "text", "text": "Say ok."}]}),
    "no messages": {"messages": []},
    "messages of text": {"messages": "Say ok."},
    "no role": said({"content": "x"}),
    "a user without content": said({"role": "user"}),
    "content of a number": said({"role": "user", "content": 3}),
    "an unknown part": said({"role": "user", "content": [{"type": "smell", "smell": "x"}]}),
    "arguments that are not JSON": said(USER, called(arguments='{"f'), RESULT, tools=[READ]),
    "a call without a name": said(USER, called(name=None), RESULT, tools=[READ]),
    "a limit of zero": {"max_tokens": 0},
    "a limit of text": {"max_tokens": "many"},
    "a limit below zero": {"max_tokens": -5},
    "tools of text": {"tools": "Read"},
    "a tool without a function": {"tools": [{"type": "function"}]},
    "a tool without a name": {"tools": [{"type": "function", "function": {"parameters": {}}}]},
    "a tool of another type": {"tools": [{**READ, "type": "magic"}]},
    "parameters of text": {
        "tools": [{"type": "function", "function": {"name": "Read", "parameters": "x"}}]
    },
    "a choice of an unknown kind": {"tools": [READ], "tool_choice": "sometimes"},
    "heat of text": {"temperature": "hot"},
    "a seed of text": {"seed": "x"},
    "a stop of a number": {"stop": 3},
    "an unknown field": {"smell": "x"},
    "token probabilities": said({"role": "user", "content": "Say 🦜 é ok."})
    | {"logprobs": True, "top_logprobs": 3, "max_tokens": 24, "temperature": 0},
    "more than the context": said({"role": "user", "content": "word " * 9_000}),
}
TOO_LONG = "more than the context"


def body_of(case: str, model: str) -> dict[str, Any]:
    """Give the request of a case."""
    return {"model": model, "messages": [USER], "max_tokens": 2, **CASES[case]}


def shape(value: Any) -> Any:
    """Give a reply with the kinds of its values in the place of the values."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in sorted(value.items())}
    if isinstance(value, list):
        return [shape(inner) for inner in value[:1]]
    return "number" if isinstance(value, int | float) else type(value).__name__


def main() -> None:
    """Ask the real servers and write down what they answer."""
    versions = {"llama.cpp": "xllamacpp", "transformers": "transformers"}
    recorded: list[dict[str, Any]] = []
    for name, package in versions.items():
        with served(name, Path(tempfile.mkdtemp())) as engine:
            for case, fields in CASES.items():
                if case == TOO_LONG and name == "transformers":
                    continue  # its model takes as much
                status, reply = engine.post(body_of(case, engine.teacher.model))
                if isinstance(reply, dict):
                    reply = {key: value for key, value in reply.items() if key != "timings"}
                recorded.append(
                    {
                        "server": f"{name} ({package} {metadata.version(package)})",
                        "case": case,
                        "request": None if case == TOO_LONG else {**fields},
                        "status": status,
                        "reply": reply,
                    }
                )
    # A server calls its model by where it lies.
    lines = ",\n".join(json.dumps(each).replace(f"{MODELS}/", "") for each in recorded)
    RECORDED.write_text(f"[\n{lines}\n]\n", "utf-8")


if __name__ == "__main__":
    main()

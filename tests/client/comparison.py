"""What is read from a log beside what was sent: message by message, for each decision."""

import json
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

from replay_pipeline.ingesters import IngestReport, Traces, ingest
from replay_pipeline.ingesters.harness.harness import HarnessStore
from replay_pipeline.ingesters.log_rows import state_ids_for
from tests.client.scripted_model import Body

_VERSION_LINE = "x-anthropic-billing-header:"
_LEFT_OUT = ("thinking", "redacted_thinking")


class Compared(NamedTuple):
    """One decision."""

    message_id: str
    is_exact: bool
    """Whether the reader says that its prefix is what was sent."""
    n_sent: int
    n_equal: int
    """Messages as sent that are in the prefix, in order."""
    n_read: int
    has_system: bool
    """Whether the system prompt is the one that was sent, but for the line with the client's version."""
    has_tools: bool
    missing: list[str]
    """Messages that were sent and are not in the prefix."""
    made_up: list[str]
    """Messages of the prefix that were not sent."""

    @property
    def is_equal(self) -> bool:
        """Whether everything is as it was sent."""
        n_same = self.n_sent == self.n_equal == self.n_read
        return n_same and self.has_system and self.has_tools


def compared(
    logs: Path,
    requests: Sequence[tuple[str, Body]],
    harnesses: HarnessStore | None = None,
) -> tuple[list[Compared], IngestReport]:
    """Return each decision whose request was kept, and the report of the reader."""
    result = ingest(logs, redact=False)
    traces = Traces(
        sessions=result.sessions, turns=result.turns, states=result.states, tools=result.tools,
        harnesses=harnesses,
    )  # fmt: skip
    states: dict[str, Any] = {state["state_id"]: state for state in traces.materialize()}
    ids = state_ids_for([message_id for message_id, _ in requests])
    found = [
        _compared(*request, states[state_id])
        for request, state_id in zip(requests, ids, strict=True)
        if state_id in states
    ]
    return found, result.report


def _compared(message_id: str, body: Body, state: dict[str, Any]) -> Compared:
    sent = [text for message in body["messages"] for text in _in_plain_form(message)]
    read = [_as_text(message) for message in state["messages"][1:]]
    matcher = SequenceMatcher(None, sent, read, autojunk=False)
    codes = [code for code in matcher.get_opcodes() if code[0] != "equal"]
    return Compared(
        message_id=message_id,
        is_exact=state["fidelity"] == "exact",
        n_sent=len(sent),
        n_equal=sum(block.size for block in matcher.get_matching_blocks()),
        n_read=len(read),
        has_system=_system_of(body) == "\n\n".join(state.get("system", ())),
        has_tools=_tools_of(body) == _tools_in(state),
        missing=[text for _, start, end, _, _ in codes for text in sent[start:end]],
        made_up=[text for _, _, _, start, end in codes for text in read[start:end]],
    )  # fmt: skip


def _system_of(body: Body) -> str:
    system = body.get("system") or ""
    blocks = [{"text": system}] if isinstance(system, str) else system
    texts = [block["text"] for block in blocks]
    return "\n\n".join(text for text in texts if not text.startswith(_VERSION_LINE))


def _tools_of(body: Body) -> dict[str, Any]:
    return {
        tool["name"]: (tool.get("description"), _sorted(tool.get("input_schema") or {"type": "object"}))
        for tool in body.get("tools") or ()
    }  # fmt: skip


def _tools_in(state: dict[str, Any]) -> dict[str, Any]:
    return {
        tool["function"]["name"]: (
            tool["function"].get("description"), _sorted(tool["function"].get("parameters"))
        )
        for tool in state["tools"]
    }  # fmt: skip


def _sorted(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _in_plain_form(message: dict[str, Any]) -> list[str]:
    """Give a message as sent in words of its own: what the reader gives has to say the same."""
    role, content = message["role"], message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    plain: list[list[Any]] = [["assistant", "", []]] if role == "assistant" else []
    for block in blocks:
        kind = block["type"]
        if kind == "tool_result":
            plain.append(["tool", _result(block.get("content") or ""), block["tool_use_id"]])
        elif kind == "tool_use":
            plain[0][2].append([block["id"], block["name"], block["input"]])
        elif kind not in _LEFT_OUT:
            words = block["text"] if kind == "text" else f"[{kind}]"
            if plain and plain[-1][0] == role and plain[-1][1]:
                plain[-1][1] += f"\n\n{words}"
            elif plain and plain[-1][0] == role:
                plain[-1][1] = words
            else:
                plain.append([role, words, []])
    return [_sorted(item) for item in plain]


def _result(content: Any) -> str:
    if isinstance(content, str):
        return content
    said = []
    for block in content:
        name = f" {block['tool_name']}" if "tool_name" in block else ""
        said.append(block["text"] if block["type"] == "text" else f"[{block['type']}{name}]")
    return "\n".join(said)


def _as_text(message: dict[str, Any]) -> str:
    if message["role"] == "tool":
        return _sorted(["tool", message["content"], message["tool_call_id"]])
    calls = [
        [call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])]
        for call in message.get("tool_calls", ())
    ]
    return _sorted([message["role"], message["content"], calls])

"""SWE-agent and mini-SWE-agent: trajectories of one task, whose commands may stand in the text."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_pipeline.ingesters.agents.base import Conversation, usage_of
from replay_pipeline.ingesters.base import ReadCounts, Result, SessionLog
from replay_pipeline.ingesters.json_lines import (
    as_dict,
    as_list,
    digest_of,
    moment_of,
    read_document,
    text_in,
    text_or_none,
)
from replay_pipeline.types import Tool

_COMMAND = re.compile(
    r"```(?:mswea_bash_command|bash|sh)?[ \t]*\n(.*?)\n?```"
    r"|<mswea_bash_command>(.*?)</mswea_bash_command>",
    re.DOTALL,
)
_FAILED = re.compile(r"\A\s*(?:<returncode>|\{\s*\"returncode\": )(?!0\b)-?\d")
_LIST = re.compile(rb'\s*\[\s*\{\s*"role":\s*"system"')
SHELL: Tool = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the shell of the task.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
"""The tool that a command in a text stands for."""


class MiniSweAgent:
    """Reads `*.traj.json` of mini-SWE-agent: a document with messages, or from 1.0 these alone.

    Before 2.0 a command was a fenced block of the text. It is read as a call of `bash`, and the
    message behind it as its result.
    """

    name = "mini_swe_agent"
    rank = 2

    def sniff(self, head: bytes) -> bool:
        """Return whether `head` is the beginning of a trajectory."""
        if _LIST.match(head):
            return b"mswea_bash_command" in head or b"```bash" in head
        return head.lstrip().startswith(b"{") and b'"mini_version"' in head

    def read(self, path: Path, counts: ReadCounts, end: int | None = None) -> Iterator[SessionLog]:
        """Read the conversation of a task. Reads the whole document, because it has no rows."""
        del end
        document = read_document(path)
        info = as_dict(as_dict(document).get("info"))
        messages = as_list(document) or as_list(as_dict(document).get("messages"))
        config = as_dict(as_dict(info.get("config")).get("model"))
        talk = Conversation(_name(path, messages), self.name)
        talk.model, talk.version = (
            text_or_none(config.get("model_name")),
            text_or_none(info.get("mini_version")),
        )
        counts.rows += len(messages)
        for message in map(as_dict, messages):
            extra = as_dict(message.get("extra"))
            talk.timestamp = moment_of(extra.get("timestamp"), per_second=1)
            response = as_dict(extra.get("response"))
            talk.model = text_or_none(response.get("model")) or talk.model
            text = text_in(message.get("content"))
            commands = [a or b for a, b in _COMMAND.findall(text)]
            action = commands[0].strip() if len(commands) == 1 else None
            counts.count(_take(talk, message, _COMMAND.sub("", text).strip(), action))
            if usage := as_dict(response.get("usage")):
                cached = as_dict(usage.get("prompt_tokens_details")).get("cached_tokens")
                n_prompt, n_output = usage.get("prompt_tokens"), usage.get("completion_tokens")
                talk.usage(usage_of(n_prompt, n_output, n_cached=cached))
        yield talk.log()


class SweAgent:
    """Reads `*.traj` of SWE-agent: the history that the model saw, with its demonstrations."""

    name = "swe_agent"
    rank = 3

    def sniff(self, head: bytes) -> bool:
        """Return whether `head` is the beginning of a trajectory."""
        keys = (b'"action"', b'"observation"', b'"thought"')
        is_object = head.lstrip().startswith(b"{") and all(key in head for key in keys)
        return is_object and (b'"trajectory"' in head or b'"history"' in head)

    def read(self, path: Path, counts: ReadCounts, end: int | None = None) -> Iterator[SessionLog]:
        """Read the conversation of a task. Reads the whole document, because it has no rows."""
        del end
        document = as_dict(read_document(path))
        messages = [as_dict(message) for message in as_list(document.get("history"))]
        talk = Conversation(_name(path, messages), self.name)
        talk.model = _model(document.get("replay_config"))
        counts.rows += len(messages)
        main = next((message.get("agent") for message in messages), None)
        for message in messages:
            if message.get("agent") != main:
                counts.count("transcript_only")
                continue
            action, thought = text_or_none(message.get("action")), message.get("thought")
            before = len(talk.turns)
            told = text_or_none(thought) or text_in(message.get("content"))
            counts.count(_take(talk, message, told.strip(), action and action.strip()))
            if message.get("is_demo"):
                for turn in talk.turns[before:]:
                    turn.flags |= {"copy"} if turn.kind == "assistant" else {"meta"}
        yield talk.log()


def _take(
    talk: Conversation, message: dict[str, Any], thought: str, action: str | None
) -> str | None:
    """Take in a message; `thought` and `action` are what the text of one of the model holds."""
    role, text = message.get("role"), text_in(message.get("content"))
    ids = as_list(message.get("tool_call_ids")) or [message.get("tool_call_id")]
    if role in ("user", "tool") and (talk.calling or role == "tool"):
        is_error = _FAILED.match(text) is not None
        is_known = [talk.answer(text_or_none(each), Result(text, is_error)) for each in ids]
        return None if any(is_known) else "orphan_result"
    if role == "assistant" and action and not message.get("tool_calls"):
        talk.close()
        turn = talk.assistant()
        turn.texts += [thought] if thought else []
        talk.call(turn, None, "bash", {"command": action})
        talk.tools = [SHELL]
        return None
    if role not in ("system", "user", "assistant"):
        return "bookkeeping"
    return talk.message(message)


def _name(path: Path, messages: list[Any]) -> str:
    return f"{path.name.split('.traj')[0]}-{digest_of(messages[:3])[:8]}"


def _model(config: Any) -> str | None:
    try:
        found = json.loads(config) if isinstance(config, str) else config
    except ValueError:
        return None
    return text_or_none(as_dict(as_dict(as_dict(found).get("agent")).get("model")).get("name"))

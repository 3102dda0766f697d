"""SWE-agent and mini-SWE-agent: trajectories of one task, whose commands may stand in the text."""

import json
import re
from typing import Any

from replay_pipeline.ingesters.agents.base import Conversation, DocumentReader, openai_usage
from replay_pipeline.ingesters.base import Result
from replay_pipeline.ingesters.json_lines import (
    as_dict,
    as_list,
    digest_of,
    moment_of,
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


class MiniSweAgent(DocumentReader):
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

    def messages(self, talk: Conversation, document: Any) -> list[Any]:
        """Take in the model and the version, and return the messages."""
        info = as_dict(as_dict(document).get("info"))
        messages = as_list(document) or as_list(as_dict(document).get("messages"))
        talk.session_id = _name(talk.session_id, messages)
        config = as_dict(as_dict(info.get("config")).get("model"))
        talk.model = text_or_none(config.get("model_name"))
        talk.version = text_or_none(info.get("mini_version"))
        return messages

    def take(self, talk: Conversation, row: dict[str, Any]) -> str | None:
        """Take one message in; returns the reason if it makes no turn."""
        extra = as_dict(row.get("extra"))
        talk.timestamp = moment_of(extra.get("timestamp"), per_second=1)
        response = as_dict(extra.get("response"))
        talk.model = text_or_none(response.get("model")) or talk.model
        text = text_in(row.get("content"))
        commands = [a or b for a, b in _COMMAND.findall(text)]
        action = commands[0].strip() if len(commands) == 1 else None
        skipped = _take(talk, row, _COMMAND.sub("", text).strip(), action)
        if usage := openai_usage(response.get("usage")):
            talk.usage(usage)
        return skipped


class SweAgent(DocumentReader):
    """Reads `*.traj` of SWE-agent: the history that the model saw, with its demonstrations."""

    name = "swe_agent"

    def sniff(self, head: bytes) -> bool:
        """Return whether `head` is the beginning of a trajectory."""
        keys = (b'"action"', b'"observation"', b'"thought"')
        is_object = head.lstrip().startswith(b"{") and all(key in head for key in keys)
        return is_object and (b'"trajectory"' in head or b'"history"' in head)

    def messages(self, talk: Conversation, document: Any) -> list[Any]:
        """Take in the model, and return the history."""
        whole = as_dict(document)
        messages = list(map(as_dict, as_list(whole.get("history"))))
        talk.session_id = _name(talk.session_id, messages)
        talk.model = _model(whole.get("replay_config"))
        main = messages[0].get("agent") if messages else None
        return [each if each.get("agent") == main else {} for each in messages]

    def take(self, talk: Conversation, row: dict[str, Any]) -> str | None:
        """Take one message in; returns the reason if it makes no turn."""
        if not row:  # of another agent
            return "transcript_only"
        action, n_before = text_or_none(row.get("action")), len(talk.turns)
        told = text_or_none(row.get("thought")) or text_in(row.get("content"))
        skipped = _take(talk, row, told.strip(), action and action.strip())
        if row.get("is_demo"):
            for turn in talk.turns[n_before:]:
                turn.flags |= {"copy"} if turn.kind == "assistant" else {"meta"}
        return skipped


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


def _name(stem: str, messages: list[Any]) -> str:
    return f"{stem.split('.traj')[0]}-{digest_of(messages[:3])[:8]}"


def _model(config: Any) -> str | None:
    try:
        found = json.loads(config) if isinstance(config, str) else config
    except ValueError:
        return None
    return text_or_none(as_dict(as_dict(as_dict(found).get("agent")).get("model")).get("name"))

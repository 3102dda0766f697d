"""The session traces of Hugging Face's Hub (STS): a header, then one message a line."""

from typing import Any

from replay_pipeline.ingesters.agents.base import Conversation, LinearReader
from replay_pipeline.ingesters.json_lines import as_dict, moment_of, text_or_none


class SessionTraces(LinearReader):
    """Reads what any harness writes for the Hub's viewer, under the harness's name.

    Source: huggingface.co/docs/hub/session-traces-format.
    """

    name = "session_traces"
    rank = 2

    def sniff(self, head: bytes) -> bool:
        """Return whether the first row is a header, and no entry names its parent as Pi's do."""
        return b'"parentId"' not in head and super().sniff(head)

    def begins(self, row: dict[str, Any]) -> bool:
        """Return whether a row is the header of a session."""
        return row.get("type") == "session" and {"harness", "id"} <= row.keys()

    def take(self, talk: Conversation, row: dict[str, Any]) -> str | None:
        """Take one row in; returns the reason if it makes no turn."""
        if row.get("type") == "session":
            talk.session_id = text_or_none(row.get("id")) or talk.session_id
            talk.agent = text_or_none(row.get("harness")) or talk.agent
            talk.title = text_or_none(row.get("name"))
            return None
        message = as_dict(row.get("message"))
        if row.get("type") != "message" or not message:
            return "bookkeeping"
        talk.timestamp = moment_of(message.get("timestamp"))
        talk.model = text_or_none(message.get("model")) or talk.model
        names = {
            "toolCalls": "tool_calls",
            "toolCallId": "tool_call_id",
            "reasoningContent": "reasoning_content",
        }
        return talk.message({names.get(key, key): value for key, value in message.items()})

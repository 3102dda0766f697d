"""Agent-trace rows: each row is one session as chat messages, as `datasets` yields them."""

from collections.abc import Iterator
from typing import Any

from replay_pipeline.ingesters.agents.base import (
    Conversation,
    TrajectoryReader,
    first_row,
    tools_in,
)
from replay_pipeline.ingesters.json_lines import as_dict, as_list, text_or_none


class AgentTraces(TrajectoryReader):
    """Reads JSON lines with `messages` in OpenAI's form, and with `tools` if they were recorded."""

    name = "agent_traces"
    rank = 4

    def sniff(self, head: bytes) -> bool:
        """Return whether the first row holds chat messages."""
        if (row := first_row(head)) is not None:
            messages = as_list(row.get("messages"))
            return bool(messages) and "role" in as_dict(messages[0])
        start = head[:4096]
        return start.startswith(b"{") and b'"messages"' in start and b'"role"' in start

    def talks(self, row: dict[str, Any], name: str) -> Iterator[Conversation]:
        """Yield the conversation of a row."""
        metadata = as_dict(row.get("metadata"))
        agent = text_or_none(row.get("harness")) or self.name
        talk = Conversation(text_or_none(row.get("session_id")) or name, agent)
        talk.model = text_or_none(row.get("model")) or text_or_none(metadata.get("model"))
        talk.cwd = text_or_none(metadata.get("cwd"))
        talk.tools = tools_in(row.get("tools"))
        messages = as_list(row.get("messages"))
        for message in map(as_dict, messages):
            talk.message(message)
        if messages:
            yield talk

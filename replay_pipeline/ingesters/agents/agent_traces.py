"""Agent-trace rows: each row is one session as chat messages, as `datasets` yields them."""

from collections.abc import Iterator
from pathlib import Path

from replay_pipeline.ingesters.agents.base import Conversation, tools_in
from replay_pipeline.ingesters.base import ReadCounts, SessionLog
from replay_pipeline.ingesters.json_lines import (
    as_dict,
    as_list,
    objects_in,
    read_objects,
    text_or_none,
)


class AgentTraces:
    """Reads JSON lines with `messages` in OpenAI's form, and with `tools` if they were recorded."""

    name = "agent_traces"
    rank = 4

    def sniff(self, head: bytes) -> bool:
        """Return whether the first row holds chat messages."""
        line = head.split(b"\n", 1)[0]
        for row in objects_in(line, ReadCounts()):
            messages = as_list(row.get("messages"))
            return bool(messages) and "role" in as_dict(messages[0])
        start = head[:4096]
        return start.startswith(b"{") and b'"messages"' in start and b'"role"' in start

    def read(self, path: Path, counts: ReadCounts, end: int | None = None) -> Iterator[SessionLog]:
        """Yield one conversation per row."""
        for number, (offset, row) in enumerate(read_objects(path, counts, end)):
            messages = as_list(row.get("messages"))
            if not messages:
                counts.count("no_message")
                continue
            counts.count(None)
            metadata = as_dict(row.get("metadata"))
            name = text_or_none(row.get("session_id")) or f"{path.stem}-{number}"
            talk = Conversation(name, self.name)
            talk.agent = text_or_none(row.get("harness")) or talk.agent
            talk.model = text_or_none(row.get("model")) or text_or_none(metadata.get("model"))
            talk.cwd = text_or_none(metadata.get("cwd"))
            talk.tools, talk.offset = tools_in(row.get("tools")), offset
            for message in map(as_dict, messages):
                talk.message(message)
            yield talk.log()

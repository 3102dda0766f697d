"""verifiers: `traces.jsonl` of rollouts, each a graph of messages that marks those of the model."""

import re
from collections.abc import Iterator
from typing import Any

from replay_pipeline.ingesters.agents.base import (
    Conversation,
    Place,
    TrajectoryReader,
    first_row,
    tools_in,
)
from replay_pipeline.ingesters.base import RecordedUsage
from replay_pipeline.ingesters.json_lines import as_count, as_dict, as_list, moment_of, text_or_none

# An episode, and a trace by itself; heads of lines too long to be read whole.
_HEAD = re.compile(
    rb'\s*\{"id":\s?"[0-9a-f]{32}",\s?"env":\s?\{|'
    rb'\s*\{"version":\s?\d+,\s?"id":\s?"[^"]+",\s?"verifiers":\s?\{'
)


class VerifiersTraces(TrajectoryReader):
    """Reads `traces.jsonl`: each row is one episode with the traces of its agents, or one trace.

    Each message is stored once and names the one before it. Only messages that the model wrote in
    the rollout are decisions. An assistant message in the prompt is context.
    """

    name = "verifiers"

    def sniff(self, head: bytes) -> bool:
        """Return whether the first row is an episode or a trace."""
        if (row := first_row(head)) is None:
            return bool(_HEAD.match(head))
        # The first rollout may have failed before it had any message.
        is_named = {"env", "traces"} <= row.keys() or "verifiers" in row
        return "task" in row and (is_named or any(_nodes(trace) for trace in _traces(row)))

    def talks(self, row: dict[str, Any], name: str) -> Iterator[Conversation]:
        """Yield the conversation of each trace."""
        for k, trace in enumerate(filter(_nodes, _traces(row))):
            own = text_or_none(trace.get("id")) or f"{name}-{k}"
            yield _talk(trace, Conversation(own, self.name))


def _traces(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [as_dict(trace) for trace in as_list(row.get("traces"))] or [row]


def _nodes(trace: dict[str, Any]) -> list[dict[str, Any]]:
    nodes = [as_dict(node) for node in as_list(trace.get("nodes"))]
    return nodes if any("message" in node for node in nodes) else []


def _talk(trace: dict[str, Any], talk: Conversation) -> Conversation:
    config = as_dict(as_dict(trace.get("agent")).get("config"))
    talk.agent = text_or_none(as_dict(config.get("harness")).get("id")) or talk.agent
    talk.model = text_or_none(config.get("model"))
    calls = {call["node"]: call for call in map(as_dict, as_list(trace.get("calls")))
             if isinstance(call.get("node"), int)}  # fmt: skip
    places: list[Place] = []
    for index, node in enumerate(_nodes(trace)):
        parent = node.get("parent")
        is_known = isinstance(parent, int) and 0 <= parent < index
        talk.at(places[parent] if is_known else None)
        talk.timestamp = moment_of(node.get("timestamp"), per_second=1)
        talk.tools = talk.tools or tools_in(node.get("tools"))
        talk.message(as_dict(node.get("message")))
        if (turn := talk.written) is not None:
            made_by = calls.get(index, {})
            turn.flags |= frozenset() if node.get("sampled") else {"copy"}
            turn.model = text_or_none(made_by.get("model")) or talk.model
            turn.stop_reason = text_or_none(made_by.get("finish_reason"))
            if usage := as_dict(made_by.get("usage")):
                turn.usage = RecordedUsage(
                    n_input=as_count(usage.get("prompt_tokens")),
                    n_cache_read=as_count(usage.get("cached_input_tokens")),
                    n_output=as_count(usage.get("completion_tokens")),
                )
        places.append(talk.place)
    talk.tools = talk.tools or tools_in(trace.get("tools"))
    return talk

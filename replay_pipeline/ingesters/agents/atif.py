"""ATIF, the Agent Trajectory Interchange Format of Harbor: trajectories of any agent."""

from collections.abc import Iterator
from typing import Any

from replay_pipeline.ingesters.agents.base import (
    Conversation,
    TrajectoryReader,
    openai_usage,
    tools_in,
)
from replay_pipeline.ingesters.base import Result
from replay_pipeline.ingesters.json_lines import as_dict, as_list, text_in, text_or_none

_HEAD_BYTES = 4_096


class Atif(TrajectoryReader):
    """Reads trajectories of any agent: one per file, or one per line.

    Each step of the agent is a decision, unless no model made it or it is copied from another
    trajectory. The system prompt and the tools are those that the trajectory records.
    """

    name = "atif"

    def sniff(self, head: bytes) -> bool:
        """Return whether `head` is the beginning of a trajectory."""
        return b'"schema_version"' in head[:_HEAD_BYTES] and b'"ATIF-v' in head[:_HEAD_BYTES]

    def talks(self, row: dict[str, Any], name: str) -> Iterator[Conversation]:
        """Yield the conversation of a trajectory, then those of its subagents."""
        if as_list(row.get("steps")):
            yield from _talks(row, name, None)


def _talks(trajectory: dict[str, Any], name: str, parent: str | None) -> Iterator[Conversation]:
    agent = as_dict(trajectory.get("agent"))
    own = text_or_none(trajectory.get("trajectory_id"))
    session_id = own or text_or_none(trajectory.get("session_id")) or name
    if parent is not None:
        session_id = f"{parent}.agent-{session_id}"
    talk = Conversation(session_id, text_or_none(agent.get("name")) or Atif.name)
    talk.part_of = (own or name, parent) if parent is not None else None
    talk.version = text_or_none(agent.get("version"))
    talk.tools = tools_in(agent.get("tool_definitions"))
    for step in map(as_dict, as_list(trajectory.get("steps"))):
        talk.model = text_or_none(step.get("model_name")) or text_or_none(agent.get("model_name"))
        talk.timestamp = text_or_none(step.get("timestamp"))
        _step(talk, step)
    yield talk
    for number, inner in enumerate(as_list(trajectory.get("subagent_trajectories"))):
        yield from _talks(as_dict(inner), str(number), session_id)


def _step(talk: Conversation, step: dict[str, Any]) -> None:
    text = text_in(step.get("message"))
    results = [as_dict(r) for r in as_list(as_dict(step.get("observation")).get("results"))]
    if step.get("source") != "agent":
        say = talk.user if step.get("source") == "user" else talk.instruct
        for said in filter(None, (text, *(text_in(r.get("content")) for r in results))):
            say(said)
        return
    talk.close()
    turn = talk.assistant()
    if step.get("is_copied_context") or step.get("llm_call_count") == 0:
        turn.flags |= {"copy"}
    turn.texts += [text] if text else []
    turn.thinking += filter(None, [text_or_none(step.get("reasoning_content"))])
    for call in map(as_dict, as_list(step.get("tool_calls"))):
        name = text_or_none(call.get("function_name")) or ""
        talk.call(turn, text_or_none(call.get("tool_call_id")), name, call.get("arguments"))
    turn.usage = openai_usage(step.get("metrics"))
    for result in results:
        call_id, said = text_or_none(result.get("source_call_id")), text_in(result.get("content"))
        if call_id is None or not talk.answer(call_id, Result(said)):
            talk.user(said, kind="meta")

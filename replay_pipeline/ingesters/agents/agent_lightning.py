"""Agent Lightning, from 1.0 on: events of rollouts, one a line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_pipeline.ingesters.agents.base import Conversation, Place, openai_usage, tools_in
from replay_pipeline.ingesters.base import ReadCounts, SessionLog
from replay_pipeline.ingesters.json_lines import (
    arguments_text,
    as_dict,
    as_list,
    digest_of,
    moment_of,
    read_objects,
    text_in,
    text_or_none,
)

_HEAD_BYTES = 4_096


class AgentLightning:
    """Reads the rollouts of a training run's store: its `Event`s as JSON lines.

    The log has the whole prompt of each model call. If a prompt continues an earlier one, it
    becomes a child of it. Only the model's answers are decisions.
    """

    name = "agent_lightning"
    rank = 3

    def sniff(self, head: bytes) -> bool:
        """Return whether the first row is an event of a rollout."""
        start = head[:_HEAD_BYTES].split(b"\n", 1)[0]
        return all(key in start for key in (b'"rollout_id"', b'"attempt_id"', b'"event_type"'))

    def read(self, path: Path, counts: ReadCounts, end: int | None = None) -> Iterator[SessionLog]:
        """Yield one conversation per attempt at a rollout."""
        rollouts: dict[str, _Rollout] = {}
        for offset, row in read_objects(path, counts, end):
            own, attempt = text_or_none(row.get("rollout_id")), text_or_none(row.get("attempt_id"))
            if own is None or attempt is None:
                counts.count("no_message")
                continue
            name = f"{own}-{attempt}"
            rollout = rollouts.setdefault(name, _Rollout(Conversation(name, self.name)))
            rollout.talk.offset = offset
            counts.count(rollout.take(row))
        for rollout in rollouts.values():
            yield rollout.talk.log()


class _Rollout:
    """Messages of one attempt, each once, below the one before it."""

    def __init__(self, talk: Conversation) -> None:
        self.talk = talk
        self._known: dict[str, Place] = {}
        """Where the conversation stands behind a message, by all that was said until then."""
        self._callers: dict[str | None, tuple[str, str]] = {}
        """By call: what was said before the message that made it, and with it."""

    def take(self, row: dict[str, Any]) -> str | None:
        """Take in one event; gives the reason if it is no call to the model."""
        data = as_dict(row.get("data"))
        if row.get("event_type") != "model_request":
            return "bookkeeping"
        request, response = as_dict(data.get("request")), as_dict(data.get("response"))
        (choice,) = map(as_dict, as_list(response.get("choices"))[:1] or [None])
        prompt = [_message(as_dict(message)) for message in as_list(request.get("messages"))]
        if not prompt or not choice.get("message"):
            return "no_message"
        talk, said = self.talk, ""
        talk.at(None)
        for message in prompt:
            # Some tracers leave out the calls of a message, or all of it: its results tell of it.
            before, with_it = self._callers.get(message["tool_call_id"], (None, ""))
            if before == said:
                said = with_it
                talk.at(self._known[said])
            said = digest_of((said, message))
            if said in self._known:
                talk.at(self._known[said])
            else:
                talk.message(message)
                if talk.written is not None:
                    talk.written.flags |= {"copy"}
            self._known[said] = talk.place
        talk.timestamp = moment_of(row.get("timestamp"), per_second=1)
        talk.model = text_or_none(response.get("model")) or text_or_none(data.get("model"))
        talk.tools = tools_in(request.get("tools")) or talk.tools
        answer = _message(as_dict(choice["message"])) | {"role": "assistant"}
        talk.message(answer)
        if (turn := talk.written) is not None:
            turn.stop_reason = text_or_none(choice.get("finish_reason"))
            turn.usage = openai_usage(data.get("usage") or response.get("usage"))
        with_it = digest_of((said, answer))
        self._known[with_it] = talk.place
        self._callers |= {call["id"]: (said, with_it) for call in answer["tool_calls"]}
        return None


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in the form in which equal ones are equal."""
    calls = []
    for call in map(as_dict, as_list(message.get("tool_calls"))):
        function = as_dict(call.get("function")) or call
        calls.append({
            "id": text_or_none(call.get("id")) or "",
            "name": text_or_none(function.get("name")) or "",
            "arguments": arguments_text(function.get("arguments")),
        })  # fmt: skip
    return {
        "role": text_or_none(message.get("role")) or "assistant",
        "content": text_in(message.get("content")),
        "tool_calls": calls,
        "tool_call_id": text_or_none(message.get("tool_call_id")),
    }

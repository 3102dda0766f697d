"""GitHub Copilot CLI: the event log of a session, `session-state/<id>/events.jsonl`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay_pipeline.ingesters.agents.base import Conversation
from replay_pipeline.ingesters.base import ReadCounts, Result, SessionLog, Turn
from replay_pipeline.ingesters.json_lines import (
    arguments_text,
    as_dict,
    as_list,
    objects_in,
    read_objects,
    text_in,
    text_or_none,
)

_HEAD_LINES = 20
_TYPES = frozenset(
    {
        "session.start",
        "session.resume",
        "user.message",
        "assistant.message",
        "tool.execution_start",
        "tool.execution_complete",
    }
)
_DENIAL_CODES = {"rejected": "user-rejected", "denied": "denied"}
"""Codes of a call that was not allowed to run."""


class Copilot:
    """Reads the events of one session.

    A model call is one `assistant.message`, or several with the same `apiCallId`. Events of a
    subagent have its id; in older versions they name the call that started it. The log has no token
    count of the prompt.
    """

    name = "copilot"
    rank = 3

    def sniff(self, head: bytes) -> bool:
        """Return whether `head` has events with this envelope."""
        counts = ReadCounts()
        for line in head.split(b"\n")[:_HEAD_LINES]:
            for event in objects_in(line, counts):
                is_envelope = "parentId" in event and isinstance(event.get("data"), dict)
                if is_envelope and text_or_none(event.get("type")) in _TYPES:
                    return True
        return head.startswith(b'{"type":"session.start"') and b'"copilotVersion"' in head

    def read(self, path: Path, counts: ReadCounts, end: int | None = None) -> Iterator[SessionLog]:
        """Yield one log for the main conversation, and one for each subagent."""
        session = _CopilotLog(path.parent.name if path.stem == "events" else path.stem)
        for offset, event in read_objects(path, counts, end):
            counts.count(session.take(offset, event))
        yield from session.logs()


@dataclass(frozen=True, slots=True)
class _Event:
    """What every handler is given of an event."""

    agent: str
    """Id of the subagent; empty for the main conversation."""
    data: dict[str, Any]
    offset: int
    timestamp: str | None


class _CopilotLog:
    """The conversations of one log while its events come in."""

    def __init__(self, session_id: str) -> None:
        self.main = Conversation(session_id, Copilot.name)
        self.subagents: dict[str, Conversation] = {}
        self._seen: set[str] = set()
        self._messages: dict[str, Turn] = {}
        self._denials: dict[str, tuple[str, str | None]] = {}
        """By call: who said no, and in which words."""
        self._permission_calls: dict[str, str] = {}
        self._prompts: dict[str, str] = {}
        """What the call that starts a subagent asks of it."""
        self._started_by: dict[str, str] = {}

    def take(self, offset: int, event: dict[str, Any]) -> str | None:
        """Take one event in; gives the reason if it makes no turn."""
        event_id = text_or_none(event.get("id"))
        if event_id is not None:
            if event_id in self._seen:
                return "duplicate_row"
            self._seen.add(event_id)
        kind = text_or_none(event.get("type")) or ""
        handler = _HANDLERS.get(kind)
        if handler is None:
            return "bookkeeping" if "." in kind else "unknown_type"
        data = as_dict(event.get("data"))
        agent = (
            text_or_none(event.get("agentId")) or text_or_none(data.get("parentToolCallId")) or ""
        )
        return handler(self, _Event(agent, data, offset, text_or_none(event.get("timestamp"))))

    def talk(self, event: _Event) -> Conversation:
        """Return the conversation that an event belongs to."""
        if not event.agent:
            return self.main
        talk = self.subagents.get(event.agent)
        if talk is None:
            main = self.main
            talk = Conversation(f"{main.session_id}.agent-{event.agent}", Copilot.name)
            talk.cwd, talk.model, talk.version = main.cwd, main.model, main.version
            self.subagents[event.agent] = talk
            call_id = self._started_by.get(event.agent, event.agent)
            if prompt := self._prompts.get(call_id):
                talk.user(prompt, offset=event.offset, timestamp=event.timestamp)
        return talk

    def logs(self) -> Iterator[SessionLog]:
        """Yield the finished conversations."""
        yield self.main.log()
        for agent_id, talk in self.subagents.items():
            log = talk.log()
            log.agent_id, log.parent_session_id = agent_id, self.main.session_id
            yield log

    def start(self, event: _Event) -> str | None:
        data, talk = event.data, self.main
        if not talk.turns:
            talk.session_id = text_or_none(data.get("sessionId")) or talk.session_id
        talk.version = text_or_none(data.get("copilotVersion")) or talk.version
        talk.model = text_or_none(data.get("selectedModel")) or talk.model
        return self.context(_Event("", as_dict(data.get("context")), event.offset, None))

    def context(self, event: _Event) -> str | None:
        self.main.cwd = text_or_none(event.data.get("cwd")) or self.main.cwd
        return None

    def model_change(self, event: _Event) -> str | None:
        talk = self.talk(event)
        talk.model = text_or_none(event.data.get("newModel")) or talk.model
        return None

    def user_message(self, event: _Event) -> str | None:
        data = event.data
        # The model is sent the augmented text where there is one, not what the user saw.
        text = text_or_none(data.get("transformedContent")) or text_in(data.get("content"))
        if not text:
            return "empty"
        source = text_or_none(data.get("source")) or "user"
        is_typed = source == "user" and data.get("isAutopilotContinuation") is not True
        if event.agent and event.agent not in self.subagents:
            self._prompts.pop(self._started_by.get(event.agent, event.agent), None)
        self.talk(event).user(
            text,
            offset=event.offset,
            timestamp=event.timestamp,
            kind="user" if is_typed or event.agent else "meta",
        )
        return None

    def assistant_message(self, event: _Event) -> str | None:
        data, talk = event.data, self.talk(event)
        message_id = text_or_none(data.get("apiCallId")) or text_or_none(data.get("messageId"))
        known = self._messages.get(message_id or "")
        if known is not None:
            talk.reopen(known)
        turn = talk.assistant(offset=event.offset, timestamp=event.timestamp, message_id=message_id)
        if message_id is None:
            talk.close()
        self._messages[turn.message_id or ""] = turn
        turn.model = text_or_none(data.get("model")) or turn.model
        if text := text_in(data.get("content")):
            turn.texts.append(text)
        if thinking := text_or_none(data.get("reasoningText")):
            turn.thinking.append(thinking)
        for request in map(as_dict, as_list(data.get("toolRequests"))):
            arguments = request.get("arguments")
            name = text_or_none(request.get("name")) or ""
            call_id = text_or_none(request.get("toolCallId"))
            call_id = talk.call(turn, call_id, name, arguments_text(arguments))
            if prompt := text_or_none(as_dict(arguments).get("prompt")):
                self._prompts[call_id] = prompt
        return None

    def tool_complete(self, event: _Event) -> str | None:
        data = event.data
        call_id = text_or_none(data.get("toolCallId")) or ""
        error = as_dict(data.get("error"))
        text = text_in(as_dict(data.get("result")).get("content"))
        is_error = data.get("success") is False or bool(error)
        if is_error and not text:
            text = text_or_none(error.get("message")) or ""
        by_code = _DENIAL_CODES.get(text_or_none(error.get("code")) or "")
        denial, feedback = self._denials.get(call_id, (by_code, None)) if is_error else (None, None)
        result = Result(text, is_error, denial, feedback)
        return None if self.talk(event).answer(call_id, result) else "orphan_result"

    def permission_requested(self, event: _Event) -> str | None:
        call_id = text_or_none(as_dict(event.data.get("permissionRequest")).get("toolCallId"))
        if call_id is not None:
            self._permission_calls[str(event.data.get("requestId"))] = call_id
        return None

    def permission_completed(self, event: _Event) -> str | None:
        data = event.data
        result = as_dict(data.get("result"))
        request = str(data.get("requestId"))
        call_id = text_or_none(data.get("toolCallId")) or self._permission_calls.get(request)
        kind = text_or_none(result.get("kind")) or ""
        if call_id is not None and kind.startswith("denied"):
            by_user = kind == "denied-interactively-by-user"
            feedback = text_or_none(result.get("feedback"))
            self._denials[call_id] = ("user-rejected" if by_user else kind, feedback)
        return None

    def compaction(self, event: _Event) -> str | None:
        summary = text_or_none(event.data.get("summaryContent"))
        if event.data.get("success") is False or summary is None:
            return "bookkeeping"
        self.talk(event).compacted(summary, offset=event.offset, timestamp=event.timestamp)
        return None

    def context_cleared(self, event: _Event) -> str | None:
        first = text_or_none(event.data.get("initialMessage"))
        talk = self.talk(event)
        talk.cleared()
        if first is not None:
            talk.user(first, offset=event.offset, timestamp=event.timestamp)
        return None

    def abort(self, event: _Event) -> str | None:
        return None if self.talk(event).interrupted() else "bookkeeping"

    def subagent_started(self, event: _Event) -> str | None:
        call_id = text_or_none(event.data.get("toolCallId"))
        if event.agent and call_id is not None:
            self._started_by[event.agent] = call_id
        return None


_HANDLERS: dict[str, Callable[[_CopilotLog, _Event], str | None]] = {
    "session.start": _CopilotLog.start,
    "session.resume": _CopilotLog.start,
    "session.context_changed": _CopilotLog.context,
    "session.model_change": _CopilotLog.model_change,
    "session.compaction_complete": _CopilotLog.compaction,
    "session.context_cleared": _CopilotLog.context_cleared,
    "user.message": _CopilotLog.user_message,
    "assistant.message": _CopilotLog.assistant_message,
    "tool.execution_complete": _CopilotLog.tool_complete,
    "permission.requested": _CopilotLog.permission_requested,
    "permission.completed": _CopilotLog.permission_completed,
    "subagent.started": _CopilotLog.subagent_started,
    "abort": _CopilotLog.abort,
}

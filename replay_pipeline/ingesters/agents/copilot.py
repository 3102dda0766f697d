"""GitHub Copilot CLI: the event log of a session, `session-state/<id>/events.jsonl`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from replay_pipeline.ingesters.agents.base import Conversation
from replay_pipeline.ingesters.base import ReadCounts, Result, SessionLog, Turn
from replay_pipeline.ingesters.json_lines import (
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
        kind, data = text_or_none(event.get("type")) or "", as_dict(event.get("data"))
        agent = text_or_none(event.get("agentId")) or text_or_none(data.get("parentToolCallId"))
        if kind == "subagent.started":
            if agent and (call_id := text_or_none(data.get("toolCallId"))):
                self._started_by[agent] = call_id
            return None
        handler = _HANDLERS.get(kind)
        if handler is None:
            return "bookkeeping" if "." in kind else "unknown_type"
        talk, moment = self.main, text_or_none(event.get("timestamp"))
        if agent:
            prompt = self._prompts.get(self._started_by.get(agent, agent))
            is_told = kind == "user.message" or prompt is None
            talk = self._subagent(agent, None if is_told else prompt, offset, moment)
        talk.offset, talk.timestamp = offset, moment
        return handler(self, talk, data)

    def _subagent(
        self, agent: str, prompt: str | None, offset: int, moment: str | None
    ) -> Conversation:
        """Return the conversation of a subagent; a new one begins with what is asked of it."""
        main, talk = self.main, self.subagents.get(agent)
        if talk is None:
            talk = Conversation(f"{main.session_id}.agent-{agent}", Copilot.name)
            talk.cwd, talk.model, talk.version = main.cwd, main.model, main.version
            talk.offset, talk.timestamp = offset, moment
            self.subagents[agent] = talk
            if prompt:
                talk.user(prompt)
        return talk

    def logs(self) -> Iterator[SessionLog]:
        """Yield the finished conversations."""
        for agent_id, talk in self.subagents.items():
            talk.part_of = agent_id, self.main.session_id
        for talk in (self.main, *self.subagents.values()):
            yield talk.log()

    def start(self, talk: Conversation, data: dict[str, Any]) -> str | None:
        if not talk.turns:
            talk.session_id = text_or_none(data.get("sessionId")) or talk.session_id
        talk.version = text_or_none(data.get("copilotVersion")) or talk.version
        talk.model = text_or_none(data.get("selectedModel")) or talk.model
        return self.context(talk, as_dict(data.get("context")))

    def context(self, talk: Conversation, data: dict[str, Any]) -> str | None:
        talk.cwd = text_or_none(data.get("cwd")) or talk.cwd
        return None

    def model_change(self, talk: Conversation, data: dict[str, Any]) -> str | None:
        talk.model = text_or_none(data.get("newModel")) or talk.model
        return None

    def system_message(self, talk: Conversation, data: dict[str, Any]) -> str | None:
        talk.system = text_or_none(data.get("content")) or talk.system
        return None

    def user_message(self, talk: Conversation, data: dict[str, Any]) -> str | None:
        # The model is sent the augmented text where there is one, not what the user saw.
        text = text_or_none(data.get("transformedContent")) or text_in(data.get("content"))
        if not text:
            return "empty"
        is_typed = (text_or_none(data.get("source")) or "user") == "user"
        is_typed = is_typed and data.get("isAutopilotContinuation") is not True
        talk.user(text, kind="user" if is_typed or talk is not self.main else "meta")
        return None

    def assistant_message(self, talk: Conversation, data: dict[str, Any]) -> str | None:
        message_id = text_or_none(data.get("apiCallId")) or text_or_none(data.get("messageId"))
        if (known := self._messages.get(message_id or "")) is not None:
            talk.reopen(known)
        turn = talk.assistant(message_id)
        if message_id is None:
            talk.close()
        self._messages[turn.message_id or ""] = turn
        turn.model = text_or_none(data.get("model")) or turn.model
        turn.texts += filter(None, [text_in(data.get("content"))])
        turn.thinking += filter(None, [text_or_none(data.get("reasoningText"))])
        for request in map(as_dict, as_list(data.get("toolRequests"))):
            arguments, name = request.get("arguments"), text_or_none(request.get("name")) or ""
            call_id = talk.call(turn, text_or_none(request.get("toolCallId")), name, arguments)
            if prompt := text_or_none(as_dict(arguments).get("prompt")):
                self._prompts[call_id] = prompt
        return None

    def tool_complete(self, talk: Conversation, data: dict[str, Any]) -> str | None:
        call_id, error = text_or_none(data.get("toolCallId")) or "", as_dict(data.get("error"))
        text = text_in(as_dict(data.get("result")).get("content"))
        is_error = data.get("success") is False or bool(error)
        if is_error and not text:
            text = text_or_none(error.get("message")) or ""
        by_code = _DENIAL_CODES.get(text_or_none(error.get("code")) or "")
        denial, feedback = self._denials.get(call_id, (by_code, None)) if is_error else (None, None)
        is_known = talk.answer(call_id, Result(text, is_error, denial, feedback))
        return None if is_known else "orphan_result"

    def permission_requested(self, talk: Conversation, data: dict[str, Any]) -> str | None:
        del talk
        call_id = text_or_none(as_dict(data.get("permissionRequest")).get("toolCallId"))
        if call_id is not None:
            self._permission_calls[str(data.get("requestId"))] = call_id
        return None

    def permission_completed(self, talk: Conversation, data: dict[str, Any]) -> str | None:
        del talk
        result, request = as_dict(data.get("result")), str(data.get("requestId"))
        call_id = text_or_none(data.get("toolCallId")) or self._permission_calls.get(request)
        kind = text_or_none(result.get("kind")) or ""
        if call_id is not None and kind.startswith("denied"):
            by_user = kind == "denied-interactively-by-user"
            feedback = text_or_none(result.get("feedback"))
            self._denials[call_id] = ("user-rejected" if by_user else kind, feedback)
        return None

    def compaction(self, talk: Conversation, data: dict[str, Any]) -> str | None:
        summary = text_or_none(data.get("summaryContent"))
        if data.get("success") is False or summary is None:
            return "bookkeeping"
        talk.compacted(summary)
        return None

    def context_cleared(self, talk: Conversation, data: dict[str, Any]) -> str | None:
        talk.cleared()
        if first := text_or_none(data.get("initialMessage")):
            talk.user(first)
        return None

    def abort(self, talk: Conversation, data: dict[str, Any]) -> str | None:
        del data
        return None if talk.interrupted() else "bookkeeping"


_HANDLERS: dict[str, Callable[[_CopilotLog, Conversation, dict[str, Any]], str | None]] = {
    "session.start": _CopilotLog.start,
    "session.resume": _CopilotLog.start,
    "session.context_changed": _CopilotLog.context,
    "session.model_change": _CopilotLog.model_change,
    "session.compaction_complete": _CopilotLog.compaction,
    "session.context_cleared": _CopilotLog.context_cleared,
    "system.message": _CopilotLog.system_message,
    "user.message": _CopilotLog.user_message,
    "assistant.message": _CopilotLog.assistant_message,
    "tool.execution_complete": _CopilotLog.tool_complete,
    "permission.requested": _CopilotLog.permission_requested,
    "permission.completed": _CopilotLog.permission_completed,
    "abort": _CopilotLog.abort,
}

"""OpenHands: the events of a conversation, as its SDK writes them, one a line."""

from typing import Any

from replay_pipeline.ingesters.agents.base import Conversation, LinearReader, tools_in, usage_of
from replay_pipeline.ingesters.base import RecordedUsage, Result, Turn, path_to
from replay_pipeline.ingesters.json_lines import as_count, as_dict, as_list, text_in, text_or_none

_TOKENS = ("prompt_tokens", "completion_tokens", "cache_read_tokens")
_OBSERVATIONS = frozenset({"ObservationEvent", "UserRejectObservation", "AgentErrorEvent"})


class _Events(Conversation):
    """A conversation, with what its events count and name."""

    def __init__(self, session_id: str, agent: str) -> None:
        super().__init__(session_id, agent)
        self.by_event: dict[str, Turn] = {}
        self.n_counted = [0, 0, 0]
        self.next_usage: RecordedUsage | None = None


class OpenHands(LinearReader):
    """Reads events. Those of one answer of the model name it, and are one decision."""

    name = "openhands"
    conversation = _Events

    def begins(self, row: dict[str, Any]) -> bool:
        """Return whether a row is an event."""
        return {"id", "source", "kind", "timestamp"} <= row.keys()

    def take(self, talk: Conversation, row: dict[str, Any]) -> str | None:
        """Take one event in; returns the reason if it makes no turn."""
        assert isinstance(talk, _Events)
        kind, source = text_or_none(row.get("kind")) or "", row.get("source")
        talk.timestamp = text_or_none(row.get("timestamp"))
        if talk.session_id == "events":
            talk.session_id = text_or_none(row.get("id")) or talk.session_id
        if kind == "SystemPromptEvent":
            parts = (text_in(row.get(name)) for name in ("system_prompt", "dynamic_context"))
            talk.instruct("\n\n".join(filter(None, parts)))
            talk.tools = tools_in(row.get("tools"))
        elif kind == "MessageEvent" and source != "agent":
            text = text_in(as_dict(row.get("llm_message")).get("content"))
            if not text:
                return "empty"
            talk.user(text, kind="user" if source == "user" else "meta")
        elif kind in ("MessageEvent", "ActionEvent"):
            _answered(talk, row)
        elif kind in _OBSERVATIONS:
            return _observe(talk, row, kind)
        elif kind == "Condensation":
            _condense(talk, row)
        else:
            _count(talk, row)
            return "bookkeeping"
        if talk.turns:
            talk.by_event[str(row.get("id"))] = talk.turns[-1]
        return None


def _answered(talk: _Events, row: dict[str, Any]) -> None:
    """Add what the model said or called. Events of one answer come one after the other."""
    answer_id = text_or_none(row.get("llm_response_id"))
    if talk.written is None or answer_id is None or talk.written.message_id != answer_id:
        talk.close()
    turn, message = talk.assistant(answer_id), as_dict(row.get("llm_message"))
    if talk.next_usage is not None:
        turn.usage, talk.next_usage = talk.next_usage, None
    if not turn.calls:
        turn.texts += filter(None, [text_in(row.get("thought") or message.get("content"))])
        thinking = row.get("reasoning_content") or message.get("reasoning_content")
        turn.thinking += filter(None, [text_or_none(thinking)])
    if call := as_dict(row.get("tool_call")):
        name, call_id = text_or_none(call.get("name")) or "", text_or_none(call.get("id"))
        talk.call(turn, call_id, name, call.get("arguments"))


def _observe(talk: Conversation, row: dict[str, Any], kind: str) -> str | None:
    told, reason = as_dict(row.get("observation")), text_or_none(row.get("rejection_reason"))
    text = text_in(told.get("content")) or text_or_none(row.get("error")) or reason or ""
    is_error = told.get("is_error") is True or kind != "ObservationEvent"
    denial = "user-rejected" if kind == "UserRejectObservation" else None
    result = Result(text, is_error, denial, reason)
    is_known = talk.answer(text_or_none(row.get("tool_call_id")), result)
    return None if is_known else "orphan_result"


def _count(talk: _Events, row: dict[str, Any]) -> None:
    """Take the tokens of the answer that comes next from the growth of the sums."""
    metrics = as_dict(as_dict(as_dict(row.get("value")).get("usage_to_metrics")).get("default"))
    used = as_dict(metrics.get("accumulated_token_usage"))
    if used:
        talk.model = text_or_none(metrics.get("model_name")) or talk.model
        now = [as_count(used.get(name)) for name in _TOKENS]
        new = [n - before for n, before in zip(now, talk.n_counted, strict=True)]
        talk.n_counted = now
        talk.next_usage = usage_of(new[0], new[1], n_cached=new[2])


def _condense(talk: _Events, row: dict[str, Any]) -> None:
    """Go on from what was kept, with a summary where the forgotten events stood."""
    forgotten = [talk.by_event.get(str(each)) for each in as_list(row.get("forgotten_event_ids"))]
    path = list(reversed(list(path_to(talk.place[0]))))
    first = next((n for n, turn in enumerate(path) if turn in forgotten), len(path))
    talk.cleared()
    talk.keep(path[:first])
    if summary := text_or_none(row.get("summary")):
        talk.user(summary, kind="summary")
    talk.keep([turn for turn in path[first:] if turn not in forgotten])

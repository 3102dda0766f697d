"""OpenHands before its SDK: the rows of evaluations (`output.jsonl`), and exported trajectories."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from replay_pipeline.ingesters.agents.base import Conversation, openai_usage, tools_in
from replay_pipeline.ingesters.base import ReadCounts, Result, SessionLog
from replay_pipeline.ingesters.json_lines import (
    as_dict,
    as_list,
    read_document,
    read_objects,
    text_or_none,
)


class OpenHandsHistory:
    """Reads events of actions and observations. Each names the model's answer that it is part of."""

    name = "openhands"
    rank = 2

    def sniff(self, head: bytes) -> bool:
        """Return whether `head` begins a list of events, or an evaluated instance with its history."""
        start = head.lstrip()
        if start.startswith(b"["):
            return all(key in head for key in (b'"source"', b'"timestamp"', b'"action"'))
        return start.startswith(b'{"instance_id"') and b'"test_result"' in head

    def read(self, path: Path, counts: ReadCounts, end: int | None = None) -> Iterator[SessionLog]:
        """Yield one conversation per instance; a trajectory by itself is one."""
        document = read_document(path)
        if isinstance(document, list):
            counts.rows += len(document)
            yield self._log(path.stem, 0, document, counts)
            return
        for offset, row in read_objects(path, counts, end):
            name = f"{path.stem}-{text_or_none(row.get('instance_id')) or offset}"
            events = as_list(row.get("history"))
            counts.count(None if events else "no_message")
            # Versions of 2024 have pairs of an action and what came of it.
            pairs = (each if isinstance(each, list) else [each] for each in events)
            log = self._log(name, offset, (e for pair in pairs for e in pair), ReadCounts())
            report = as_dict(row.get("test_result")).get("report") or row.get("report")
            log.is_resolved = as_dict(report).get("resolved")
            if events:
                yield log

    def _log(self, name: str, offset: int, events: Iterable[Any], counts: ReadCounts) -> SessionLog:
        talk = Conversation(name, self.name)
        talk.offset, answer = offset, ""
        for event in map(as_dict, events):
            meta = as_dict(event.get("tool_call_metadata"))
            response = as_dict(meta.get("model_response"))
            talk.timestamp = text_or_none(event.get("timestamp"))
            if "action" in event and response:
                # One answer may call several tools, and each call is an action.
                if response.get("id") != answer or response.get("id") is None:
                    _answered(talk, response)
                answer = response.get("id")
                counts.count(None)
            else:
                counts.count(_take(talk, event, text_or_none(meta.get("tool_call_id"))))
        return talk.log()


def _answered(talk: Conversation, response: dict[str, Any]) -> None:
    (choice, *_) = map(as_dict, as_list(response.get("choices")) or [None])
    talk.model = text_or_none(response.get("model")) or talk.model
    talk.message(as_dict(choice.get("message")) | {"role": "assistant"})
    if talk.written is not None:
        talk.written.usage = openai_usage(response.get("usage"))


def _take(talk: Conversation, event: dict[str, Any], call_id: str | None) -> str | None:
    kind, source, args = event.get("action"), event.get("source"), as_dict(event.get("args"))
    text = text_or_none(args.get("content")) or text_or_none(args.get("thought")) or ""
    if call_id is not None and "observation" in event:
        exit_code = as_dict(as_dict(event.get("extras")).get("metadata")).get("exit_code")
        is_error = event["observation"] == "error" or exit_code not in (None, 0, -1)
        result = Result(text_or_none(event.get("content")) or "", is_error)
        return None if talk.answer(call_id, result) else "orphan_result"
    if kind == "system":
        talk.instruct(text)
        talk.tools = tools_in(args.get("tools"))
    elif kind in ("message", "finish") and text:
        role = "assistant" if source == "agent" else "user"
        return talk.message({"role": role, "content": text})
    else:
        return "bookkeeping"
    return None

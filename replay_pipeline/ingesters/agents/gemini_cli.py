"""Gemini CLI: one JSON document per chat, or in later versions one row per line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_pipeline.ingesters.agents.base import Conversation, LinearReader, Place, usage_of
from replay_pipeline.ingesters.base import ReadCounts, Result
from replay_pipeline.ingesters.json_lines import (
    as_dict,
    as_list,
    read_document,
    read_objects,
    text_in,
    text_or_none,
)


class _Chat(Conversation):
    """A chat, with the place before each of its messages."""

    def __init__(self, session_id: str, agent: str) -> None:
        super().__init__(session_id, agent)
        self.before: dict[str, Place] = {}


class GeminiCli(LinearReader):
    """Reads `chats/session-*.json`. A call and its result are both in the model's message.

    In rows, a message is written again as it grows, and a rewind names the first one that it drops.
    """

    name = "gemini_cli"
    conversation = _Chat

    def sniff(self, head: bytes) -> bool:
        """Return whether `head` is the beginning of a chat."""
        return (
            head.lstrip().startswith(b"{")
            and b'"sessionId"' in head
            and b'"projectHash"' in head
            and b'"parentUuid"' not in head
        )

    def rows(
        self, talk: Conversation, path: Path, counts: ReadCounts, end: int | None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the rows of a file, or the messages of a document."""
        document = as_dict(read_document(path))
        if not isinstance(document.get("messages"), list):
            return _grown(read_objects(path, counts, end), counts)
        talk.session_id = text_or_none(document.get("sessionId")) or talk.session_id
        counts.rows += len(document["messages"])
        return ((0, as_dict(message)) for message in document["messages"])

    def take(self, talk: Conversation, row: dict[str, Any]) -> str | None:
        """Take one message in; returns the reason if it makes no turn."""
        assert isinstance(talk, _Chat)
        if dropped := text_or_none(row.get("$rewindTo")):
            talk.at(talk.before.get(dropped))
            return "bookkeeping"
        talk.before[str(row.get("id"))] = talk.place
        if "projectHash" in row:
            talk.session_id = text_or_none(row.get("sessionId")) or talk.session_id
            return "bookkeeping"
        kind, text = row.get("type"), text_in(row.get("content"))
        talk.timestamp = text_or_none(row.get("timestamp"))
        if kind == "user" and text:
            talk.user(text)
            return None
        if kind != "gemini":
            return "empty" if kind == "user" else "bookkeeping"
        talk.model = text_or_none(row.get("model")) or talk.model
        own_id = text_or_none(row.get("id"))
        turn = talk.assistant(f"gemini:{own_id}" if own_id else None)
        turn.texts += [text] if text else []
        for thought in map(as_dict, as_list(row.get("thoughts"))):
            words = f"{thought.get('subject', '')}\n{thought.get('description', '')}"
            turn.thinking.append(words.strip())
        answers = list[tuple[str, Result]]()
        for call in map(as_dict, as_list(row.get("toolCalls"))):
            name = text_or_none(call.get("name")) or ""
            call_id = talk.call(turn, text_or_none(call.get("id")), name, call.get("args"))
            text, is_error = _result(call)
            answers += [(call_id, Result(text, is_error))] if text is not None else []
        turn.results = dict(answers)
        tokens = as_dict(row.get("tokens"))
        n_cached = tokens.get("cached")
        talk.usage(usage_of(tokens.get("input"), tokens.get("output"), n_cached=n_cached))
        talk.close()
        return None


def _grown(
    rows: Iterator[tuple[int, dict[str, Any]]], counts: ReadCounts
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows with the last version of each message, where its first one stood."""
    kept: list[tuple[int, dict[str, Any]]] = []
    places: dict[str, int] = {}
    for offset, row in rows:
        name, dropped = str(row.get("id")), text_or_none(row.get("$rewindTo"))
        if dropped in places:
            places = {each: at for each, at in places.items() if at < places[dropped]}
        place = places.get(name)
        if place is not None and _continues(row, kept[place][1]):
            counts.skipped["duplicate_row"] += 1
            kept[place] = kept[place][0], row
            continue
        if "id" in row:
            places[name] = len(kept)
        kept.append((offset, row))
    yield from kept


def _continues(row: dict[str, Any], before: dict[str, Any]) -> bool:
    """Return whether a row is a later version of a message, and not another one with its id."""
    n_calls = len(as_list(before.get("toolCalls")))
    names = [
        [as_dict(call).get("id") for call in as_list(each.get("toolCalls"))[:n_calls]]
        for each in (row, before)
    ]
    has_text = text_in(row.get("content")).startswith(text_in(before.get("content")))
    return row.get("type") == before.get("type") and has_text and names[0] == names[1]


def _result(call: dict[str, Any]) -> tuple[str | None, bool]:
    is_error = text_or_none(call.get("status")) in {"error", "cancelled"}
    texts = []
    for part in map(as_dict, as_list(call.get("result"))):
        response = as_dict(as_dict(part.get("functionResponse")).get("response"))
        text = text_or_none(response.get("output")) or text_or_none(response.get("error"))
        texts.append(text if text is not None else text_in(part))
        is_error = is_error or "error" in response
    if not texts:
        display = text_or_none(call.get("resultDisplay"))
        return display, is_error
    return "\n".join(texts), is_error

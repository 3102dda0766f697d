"""Pi coding agent: session files, `~/.pi/agent/sessions/<folder>/<time>_<id>.jsonl`."""

from typing import Any

from replay_pipeline.ingesters.agents.base import Conversation, LinearReader, Place
from replay_pipeline.ingesters.base import RecordedUsage, Result, path_to
from replay_pipeline.ingesters.json_lines import as_count, as_dict, as_list, text_in, text_or_none

_SUMMARIES = {
    "compaction": "The conversation history before this point was compacted into the following "
    "summary:\n\n<summary>\n{}\n</summary>",
    "branch_summary": "The following is a summary of a branch that this conversation came back "
    "from:\n\n<summary>\n{}</summary>",
}
"""In which words the client tells the model of a summary, by the type of the entry."""


class _Session(Conversation):
    """A session, with the place behind each entry, in the order of the file."""

    def __init__(self, session_id: str, agent: str) -> None:
        super().__init__(session_id, agent)
        self.places: dict[str, Place] = {}


class Pi(LinearReader):
    """Reads the entries of one session: a tree by `id` and `parentId`, or in older versions a list."""

    name = "pi"
    conversation = _Session

    def begins(self, row: dict[str, Any]) -> bool:
        """Return whether a row is the header of a session."""
        return row.get("type") == "session" and {"id", "timestamp", "cwd"} <= row.keys()

    def take(self, talk: Conversation, row: dict[str, Any]) -> str | None:
        """Take one entry in; returns the reason if it makes no turn."""
        assert isinstance(talk, _Session)
        kind = text_or_none(row.get("type"))
        if kind == "session":
            talk.session_id = text_or_none(row.get("id")) or talk.session_id
            talk.cwd = text_or_none(row.get("cwd"))
            talk.places[""] = talk.place
            return None
        name = text_or_none(row.get("id")) or f"{len(talk.places)}"
        if "parentId" in row:
            talk.at(talk.places.get(str(row["parentId"])))
        talk.timestamp = text_or_none(row.get("timestamp"))
        skipped = _entry(talk, kind, row, name)
        talk.places[name] = talk.place
        return skipped


def _entry(talk: _Session, kind: str | None, entry: dict[str, Any], name: str) -> str | None:
    message = as_dict(entry.get("message"))
    role = text_or_none(message.get("role"))
    if kind == "compaction":
        _compacted(talk, entry)
    elif kind == "branch_summary" and text_or_none(entry.get("summary")):
        talk.user(_SUMMARIES[kind].format(entry["summary"]))
    elif kind == "custom_message":
        talk.user(text_in(entry.get("content")), kind="meta")
    elif kind != "message":
        return "bookkeeping"
    elif role == "assistant":
        if message.get("stopReason") == "error" and not message.get("content"):
            return "synthetic"
        _assistant(talk, message, name)
    elif role == "toolResult":
        result = Result(text_in(message.get("content")), bool(message.get("isError")))
        is_known = talk.answer(text_or_none(message.get("toolCallId")), result)
        return None if is_known else "orphan_result"
    elif role == "bashExecution":
        if message.get("excludeFromContext"):
            return "transcript_only"
        talk.user(_shell_text(message), kind="command")
    else:
        talk.user(text_in(message.get("content")), kind="user" if role == "user" else "meta")
    return None


def _assistant(talk: _Session, message: dict[str, Any], name: str) -> None:
    talk.close()
    talk.model = text_or_none(message.get("model"))
    turn = talk.assistant(f"{Pi.name}:{talk.session_id}-{name}")
    if usage := as_dict(message.get("usage")):
        turn.usage = RecordedUsage(
            n_input=as_count(usage.get("input")),
            n_cache_creation=as_count(usage.get("cacheWrite")),
            n_cache_read=as_count(usage.get("cacheRead")),
            n_output=as_count(usage.get("output")),
        )
    if message.get("stopReason") == "aborted":
        turn.flags |= {"interrupted"}
    for block in map(as_dict, as_list(message.get("content"))):
        if block.get("type") == "toolCall":
            called = text_or_none(block.get("name")) or ""
            talk.call(turn, text_or_none(block.get("id")), called, block.get("arguments"))
        elif thinking := text_or_none(block.get("thinking")):
            turn.thinking.append(thinking)
        elif text := text_in(block):
            turn.texts.append(text)


def _compacted(talk: _Session, entry: dict[str, Any]) -> None:
    """Start again from the summary, and from what was kept word for word."""
    names = list(talk.places)
    first = text_or_none(entry.get("firstKeptEntryId"))
    index = entry.get("firstKeptEntryIndex")
    if first is None and isinstance(index, int) and 0 <= index < len(names):
        first = names[index]
    # What was kept may begin with an entry that makes no turn: its successor then.
    known = names.index(first) if first in talk.places else len(names)
    kept_from = {talk.places[each][0] for each in names[known:]}
    kept = [turn for turn in reversed(list(path_to(talk.place[0]))) if turn in kept_from]
    talk.compacted(_SUMMARIES["compaction"].format(entry.get("summary") or ""))
    talk.keep(kept)


def _shell_text(message: dict[str, Any]) -> str:
    """Return a command of the user in the words of the client."""
    output = text_in(message.get("output"))
    text = f"Ran `{message.get('command')}`\n" + (
        f"```\n{output}\n```" if output else "(no output)"
    )
    if message.get("cancelled"):
        return f"{text}\n\n(command cancelled)"
    code = message.get("exitCode")
    return f"{text}\n\nCommand exited with code {code}" if code else text

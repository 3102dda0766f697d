"""Requests that a client logged: chains of messages, checked by hash.

Since about 2.1.310 Claude Code logs every request: `api-request` names the messages by their
SHA-256 (the first `keep` of request `base`, then `tail`), `api-request-shape` holds the system
prompt and the tools, and `api-request-blob` the messages that can't be built from rows. The hash is
that of the message as compact JSON with sorted keys, not escaped to ASCII, without marks of the
cache. The other messages are built from rows: from the blocks of one `message.id`, or from
consecutive user rows. Nothing is guessed: if no message has a certain hash, the request counts as
unknown.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import msgspec

from replay_pipeline.ingesters.base import LACKS, MEDIA, Turn
from replay_pipeline.ingesters.json_lines import UNREADABLE, as_list, lines_in
from replay_pipeline.ingesters.rows import NO_JSON, json_text, loose
from replay_pipeline.types import Message, Tool

REQUEST_ROWS = frozenset({"api-request", "api-request-shape", "api-request-blob"})
"""Types of rows with requests."""
WireMessage = dict[str, Any]
"""One message as it was sent: `role` (`user`, `assistant`, or `system`) and `content`."""
_MARKS = ("caller", "cache_control")
_MAX_SIDE_BY_SIDE = 40
"""User rows between two answers that are tried in every way of putting them together."""
_KEPT_OF_MEDIA = ("type", "media_type", "url", "file_id")


class _RequestRow(msgspec.Struct, rename="camel"):
    type: str | None = None
    id: str | None = None
    base: str | None = None
    keep: int = 0
    tail: list[str] = []
    shape_hash: str | None = None
    shape: msgspec.Raw = NO_JSON
    params: msgspec.Raw = NO_JSON
    hash: str | None = None
    message: msgspec.Raw = NO_JSON
    is_visible_in_transcript_only: bool | None = None
    is_compact_summary: bool | None = None


_decode_row = msgspec.json.Decoder(_RequestRow).decode


class LoggedRequest(msgspec.Struct):
    """One request of a log."""

    shape: str
    params_json: str
    hashes: list[str] | None
    """The hashes of its messages; `None` if the request that it continues isn't in the log."""


def client_hash(value: Any) -> str:
    """Return the hash under which the client logs a message or a shape."""
    try:
        data = msgspec.json.encode(value, order="sorted")
    except UnicodeEncodeError:  # half of a surrogate pair, which JavaScript writes as an escape
        text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        data = text.encode("utf-8", "backslashreplace")
    return hashlib.sha256(data).hexdigest()


class SentRequests:
    """The requests of one session file, with the messages that match their hashes."""

    def __init__(self) -> None:
        self.requests: dict[str, LoggedRequest] = {}
        self.shapes: dict[str, dict[str, Any]] = {}
        self.messages: dict[str, WireMessage] = {}
        """By their hash."""
        self._open: dict[str, list[Any]] = {}
        """Blocks of assistant messages with rows that were not tried yet, by id."""
        self._answers: dict[str, list[Any]] = {}
        self._side_by_side: list[list[Any]] = []
        self._n_tried = 0
        self._last = ""

    def add(self, line: bytes | bytearray) -> None:
        """Add one line of the log."""
        try:
            row = _decode_row(line)
        except UNREADABLE:
            return
        if row.type == "api-request" and row.id:
            self._request(row)
        elif row.type == "api-request-blob" and row.hash:
            self._keep(row.hash, loose(row.message), self.messages)
        elif row.type == "api-request-shape" and row.shape_hash:
            self._keep(row.shape_hash, loose(row.shape), self.shapes)
        elif row.type == "assistant":
            message = loose(row.message)
            if (message_id := message.get("id")) and isinstance(message_id, str):
                blocks = self._answers.setdefault(message_id, [])
                blocks += map(unmarked, as_list(message.get("content")))
                self._open[message_id] = blocks
                if (
                    message_id != self._last
                ):  # a call is answered while the message is still written
                    self._try_side_by_side()
                    self._side_by_side, self._n_tried = [], 0
                    self._last = message_id
        elif row.type == "user" and (
            row.is_compact_summary or not row.is_visible_in_transcript_only
        ):
            self._side_by_side.append(blocks_of(loose(row.message).get("content")))

    def _keep(self, name: str, value: dict[str, Any], where: dict[str, Any]) -> None:
        # A content that is one text is sent as a text, or as a block where a cache mark is to be put.
        in_blocks = value | {"content": blocks_of(value.get("content"))}
        if client_hash(value) == name or ("content" in value and client_hash(in_blocks) == name):
            where[name] = value

    def _request(self, row: _RequestRow) -> None:
        base = self.requests.get(row.base) if row.base else None
        hashes: list[str] | None = row.tail
        if row.base is not None:
            before = base.hashes if base is not None else None
            hashes = [*before[: row.keep], *row.tail] if before is not None else None
        params_json = json_text(row.params) or "{}"
        self.requests[row.id or ""] = LoggedRequest(row.shape_hash or "", params_json, hashes)
        if not self.messages.keys() >= set(row.tail):
            self._try_answers()
            self._try_side_by_side()

    def _try_answers(self) -> None:
        for blocks in self._open.values():
            message = {"role": "assistant", "content": list(blocks)}
            self.messages.setdefault(client_hash(message), message)
        self._open.clear()

    def _try_side_by_side(self) -> None:
        rows = self._side_by_side
        for end in range(self._n_tried + 1, min(len(rows), _MAX_SIDE_BY_SIDE) + 1):
            for start in range(end):
                blocks = [block for row in rows[start:end] for block in row]
                message = {"role": "user", "content": blocks}
                self.messages.setdefault(client_hash(message), message)
        self._n_tried = len(rows)

    def missing(self, names: Iterable[str]) -> set[str]:
        """Return those of these requests that are not in the log, or whose base is not."""
        found = {name for name, request in self.requests.items() if request.hashes is not None}
        return set(names) - found

    def join(self, other: "SentRequests") -> None:
        """Add the requests of another log."""
        self.requests = other.requests | self.requests
        self.shapes = other.shapes | self.shapes
        self.messages = other.messages | self.messages

    def met(self, request_id: str) -> tuple[LoggedRequest, list[str]] | None:
        """Return a request and the hashes of its messages; `None` if the log lacks one of the messages."""
        request = self.requests.get(request_id)
        if request is None or request.hashes is None or request.shape not in self.shapes:
            return None
        if not all(name in self.messages for name in request.hashes):
            return None
        return request, request.hashes


def read_sent(path: Path, end: int | None = None) -> SentRequests:
    """Return every request in a session file up to byte `end`."""
    sent = SentRequests()
    for line in lines_in(path, 0, end):
        sent.add(line)
    return sent


def join_siblings(sent: SentRequests, names: Iterable[str], path: Path) -> None:
    """Add requests of these names from other sessions of the same folder, because a fork begins with copied rows."""
    for sibling in sorted(path.parent.glob("*.jsonl")):
        missing = sent.missing(names)
        if not missing:
            return
        if sibling != path and _holds(sibling, min(missing)):
            sent.join(read_sent(sibling))


def _holds(path: Path, name: str) -> bool:
    with (
        suppress(OSError, ValueError),
        path.open("rb") as file,
        mmap(file.fileno(), 0, access=ACCESS_READ) as data,
    ):
        return data.find(name.encode()) >= 0
    return False


class SentTurns:
    """The requests of one conversation as a tree of turns that shares equal beginnings."""

    def __init__(self, sent: SentRequests) -> None:
        self._sent = sent
        self.turns: list[Turn] = []
        self._known: dict[tuple[Turn | None, str], Turn] = {}

    def put(self, turn: Turn) -> None:
        """Attach the request to a decision, if the log has all of it."""
        found = self._sent.met(turn.request or "")
        if found is None:
            return
        request, hashes = found
        above: Turn | None = None
        for name in hashes:
            above = self._turn(above, name, "sent", self._sent.messages[name])
        turn.sent = above
        turn.shape = self._turn(None, request.shape, "shape", self._sent.shapes[request.shape])
        turn.params_json = request.params_json

    def put_shape(self, turn: Turn, shape: dict[str, Any]) -> None:
        """Attach the system prompt and the tools to a decision."""
        turn.shape = self._turn(None, client_hash(shape), "shape", shape)

    def _turn(self, above: Turn | None, name: str, kind: str, value: Any) -> Turn:
        turn = self._known.get((above, name))
        if turn is None:
            turn = Turn(parent=above, kind=kind, offset=0, uuid=name)
            turn.wire_json = msgspec.json.encode(_lean(value)).decode()
            media = (kind for kind in MEDIA if f'"type":"{kind}"' in turn.wire_json)
            turn.flags = frozenset(f"{LACKS}{kind}" for kind in media)
            # Below zero, so that they stay what they are while the conversation grows.
            turn.index = -1 - len(self.turns)
            self.turns.append(turn)
            self._known[above, name] = turn
        return turn


def shape_of_snapshot(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the system prompt and the tools of a `prompt_snapshot` as a shape."""
    prompt = [text for text in as_list(fields.get("systemPrompt")) if isinstance(text, str)]
    texts = [fields.get("cliPrefix"), "\n\n".join(prompt)]
    tools = (
        tool.get("schema", tool) for tool in as_list(fields.get("tools")) if isinstance(tool, dict)
    )
    return {
        "system": [{"type": "text", "text": text} for text in texts if isinstance(text, str)],
        "tools": list(tools),
    }


def _lean(value: Any) -> Any:
    """Leave out what no other model can read: signatures, and the bytes of images and documents."""
    if isinstance(value, list):
        return [_lean(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "base64" and "data" in value:
        return {key: value[key] for key in _KEPT_OF_MEDIA if key in value}
    return {
        key: _lean(item)
        for key, item in value.items()
        if not (key == "signature" and value.get("type") == "thinking")
    }


def blocks_of(content: Any) -> list[Any]:
    """Return the blocks of a content without cache marks. Plain text counts as one block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [unmarked(block) for block in as_list(content)]


def unmarked(block: Any) -> Any:
    """Return a block without what the client adds for its provider: cache marks and callers."""
    if isinstance(block, dict) and any(key in block for key in _MARKS):
        return {key: value for key, value in block.items() if key not in _MARKS}
    return block


def messages_of(wire: WireMessage) -> Iterator[Message]:
    """Convert a message to OpenAI's form, in which each result of a call is a message of its own."""
    role = str(wire.get("role"))
    content = wire.get("content")
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks_of(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            if texts:
                yield {"role": role, "content": "\n\n".join(texts)}
                texts = []
            text = text_of_result(block.get("content"))
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text}
        elif kind == "tool_use":
            arguments = msgspec.json.encode(block.get("input")).decode()
            function = {"name": str(block.get("name")), "arguments": arguments}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        elif kind == "text":
            texts.append(str(block.get("text")))
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(f"[{kind}]")
    if role == "assistant":
        message: dict[str, Any] = {"role": role, "content": "\n\n".join(texts)}
        yield message | ({"tool_calls": calls} if calls else {})
    elif texts:
        yield {"role": role, "content": "\n\n".join(texts)}


def text_of_result(content: Any) -> str:
    """Return the text of a tool result. Other blocks are named in brackets."""
    if isinstance(content, str):
        return content
    parts = []
    for block in as_list(content):
        if isinstance(block, dict):
            kind, name = block.get("type"), block.get("tool_name")
            named = f"[{kind} {name}]" if name else f"[{kind}]"
            parts.append(block["text"] if isinstance(block.get("text"), str) else named)
    return "\n".join(parts)


def tool_of(wire: dict[str, Any]) -> Tool:
    """Convert a tool to OpenAI's form."""
    function: dict[str, Any] = {"name": str(wire.get("name"))}
    if isinstance(wire.get("description"), str):
        function["description"] = wire["description"]
    function["parameters"] = wire.get("input_schema") or {"type": "object"}
    return {"type": "function", "function": function}


def system_of(shape: dict[str, Any]) -> list[str]:
    """Return the texts of the system prompt."""
    system = shape.get("system")
    return [str(block.get("text")) for block in blocks_of(system) if isinstance(block, dict)]

"""Rows of a Claude Code log: decode the fields that matter, and repair broken rows.

The decoder skips fields that aren't needed, such as `toolUseResult`, file snapshots, and streaming
progress. They make up most of a log.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from replay_pipeline.ingesters.base import ReadCounts
from replay_pipeline.ingesters.json_lines import UNREADABLE, lines_in, objects_in

NO_JSON = msgspec.Raw(b"")


class Block(msgspec.Struct):
    """One content block of a message."""

    type: str = ""
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = NO_JSON
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool | None = None


_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class Lifetimes(msgspec.Struct):
    """Tokens written to the provider's cache, by their lifetime there."""

    ephemeral_1h_input_tokens: _Tokens | None = None


class ServerTools(msgspec.Struct):
    """What the provider did beside the model, and counts apart."""

    web_search_requests: _Tokens | None = None


class ModelUse(msgspec.Struct):
    """What the client counted for one model, all its calls included."""

    cost_usd: float = msgspec.field(default=0.0, name="costUSD")


class RowUsage(msgspec.Struct):
    """Recorded tokens. Each row of a message repeats them."""

    input_tokens: _Tokens | None = 0
    output_tokens: _Tokens | None = 0
    cache_creation_input_tokens: _Tokens | None = 0
    cache_read_input_tokens: _Tokens | None = 0
    cache_creation: Lifetimes | None = None

    server_tool_use: ServerTools | None = None
    speed: str | None = None
    inference_geo: str | None = None

    @property
    def n_prompt(self) -> int:
        """Return the tokens of the prompt."""
        parts = (self.input_tokens, self.cache_creation_input_tokens, self.cache_read_input_tokens)
        return sum(filter(None, parts))


class RowMessage(msgspec.Struct):
    """The API message inside a row."""

    id: str | None = None
    model: str | None = None
    stop_reason: str | None = None
    content: str | list[Block] | None = None
    usage: RowUsage | None = None


class Row(msgspec.Struct, rename="camel"):
    """One line of a log."""

    type: str | None = None
    subtype: str | None = None
    uuid: str | None = None
    parent_uuid: str | None = None
    session_id: str | None = None
    forked_from: msgspec.Raw = NO_JSON
    agent_id: str | None = None
    timestamp: str | None = None
    version: str | None = None
    cwd: str | None = None
    git_branch: str | None = None
    is_sidechain: bool | None = None
    is_meta: bool | None = None
    is_compact_summary: bool | None = None
    is_visible_in_transcript_only: bool | None = None
    is_api_error_message: bool | None = None
    tool_denial_kind: str | None = None
    user_feedback: str | None = None
    interrupted_message_id: str | None = None
    api_block_index: int | None = None
    entrypoint: str | None = None
    request_id: str | None = None
    operation: str | None = None
    request_ref: str | None = None
    message: RowMessage | None = None
    data: msgspec.Raw = NO_JSON
    attachment: msgspec.Raw = NO_JSON
    compact_metadata: msgspec.Raw = NO_JSON
    microcompact_metadata: msgspec.Raw = NO_JSON
    retracted_message_uuids: list[str] | None = None
    content: msgspec.Raw = NO_JSON
    rendered: msgspec.Raw = NO_JSON
    rendered_role: str | None = None
    summary: str | None = None
    leaf_uuid: str | None = None
    ai_title: str | None = None
    custom_title: str | None = None
    model_usage: dict[str, ModelUse] | None = None
    replacements: msgspec.Raw = NO_JSON


class ProgressData(msgspec.Struct, rename="camel"):
    """The part of an `agent_progress` row that has a subagent's row."""

    type: str | None = None
    agent_id: str | None = None
    message: Row | None = None


_S = TypeVar("_S", bound=msgspec.Struct)
_decode = msgspec.json.Decoder(Row).decode
_decode_progress = msgspec.json.Decoder(ProgressData).decode


def read_rows(path: Path, counts: ReadCounts, end: int | None = None) -> Iterator[tuple[int, Row]]:
    """Read every row up to byte `end`, with the offset of its line. Counts unreadable rows."""
    offset = 0
    for line in lines_in(path, 0, end):
        try:
            row = _decode(line)
        except UNREADABLE:
            for row in repaired(line, counts):
                yield offset, row
        else:
            counts.rows += 1
            yield offset, row
        offset += len(line)


def repaired(line: bytes | bytearray, counts: ReadCounts) -> Iterator[Row]:
    """Yield the rows of a line, also of one that isn't exactly one valid row."""
    for value in objects_in(line, counts):
        yield parsed_row(value, counts)


def parsed_row(value: dict[str, Any], counts: ReadCounts) -> Row:
    """Return a row from JSON, without fields of a wrong type."""
    row, is_whole = _decoded(value, _decode)
    if not is_whole:
        counts.notes["mistyped_field"] += 1
    return row


def _decoded(value: dict[str, Any], decode: Callable[[bytes], _S]) -> tuple[_S, bool]:
    """Return a struct, and whether it has every field: each that does not fit is mended in `value`."""
    is_whole = True
    while True:
        try:
            return decode(msgspec.json.encode(value)), is_whole
        except RecursionError:
            value = {name: each for name, each in value.items() if _is_shallow(each)}
        except msgspec.ValidationError as error:
            is_whole = False
            _mend(value, str(error))


def _is_shallow(value: Any) -> bool:
    try:
        msgspec.json.decode(msgspec.json.encode([[[[value]]]]))
    except RecursionError:
        return False
    return True


_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


def _mend(value: Any, told: str) -> None:
    """Take out what is of a wrong type, where the decoder says; of a result it stays as text."""
    place = told.rpartition("`$")[2].partition("[...]")[0]
    *path, last = [name or int(number) for name, number in _STEP.findall(place)]
    for step in path:
        value = value[step]
    if isinstance(value, list) and "Expected `object`" in told:
        block = {"type": "text", "text": value[last]}
        value[last] = block if isinstance(value[last], str) else {"type": "unknown"}
    elif last == "content" and isinstance(value[last], dict):
        value[last] = msgspec.json.encode(value[last]).decode()
    else:
        del value[last]


def progress_row(data: msgspec.Raw) -> tuple[str, Row] | None:
    """Return the subagent and its row from a progress row, if there is one."""
    try:
        progress = _decode_progress(data)
    except UNREADABLE:
        progress, _ = _decoded(loose(data), _decode_progress)
    is_agent = progress.type == "agent_progress" and progress.agent_id
    if not is_agent or progress.message is None:
        return None
    return progress.agent_id or "", progress.message


def result_text(content: str | list[Block] | None) -> str:
    """Return the text of a tool result: a string, or the text of its blocks."""
    if isinstance(content, str):
        return content
    return "\n".join(b.text if b.text is not None else f"[{b.type}]" for b in content or ())


def json_text(raw: msgspec.Raw) -> str:
    """Return a value as it was recorded."""
    return str(memoryview(raw), "utf-8", "replace")


def plain_json(raw: msgspec.Raw) -> Any:
    """Read a skipped field as plain JSON; `None` if it is absent or can't be read."""
    try:
        return msgspec.json.decode(raw) if raw else None
    except UNREADABLE:
        return None


def loose(raw: msgspec.Raw) -> dict[str, Any]:
    """Read a skipped field as a JSON object; empty if it is absent or not an object."""
    value = plain_json(raw)
    return value if isinstance(value, dict) else {}


def replaced_results(raw: msgspec.Raw) -> Iterator[tuple[str, str]]:
    """Yield the ids of calls whose results the model saw in another form, with that text."""
    found = plain_json(raw)
    for item in found if isinstance(found, list) else ():
        if isinstance(item, dict):
            call_id, text = item.get("toolUseId"), item.get("replacement")
            if isinstance(call_id, str) and isinstance(text, str):
                yield call_id, text

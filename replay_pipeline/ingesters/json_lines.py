"""Read JSON lines even if they are glued together, cut, or damaged, and count them."""

import codecs
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from replay_pipeline.ingesters.base import ReadCounts, SourceSlice

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_JUNK = b"\x00\xef\xbb\xbf \t\r\n"
LONG_BYTES = 64_000_000
"""Files longer than this are read in several passes, so that little is in memory at once."""
_BUFFER_BYTES = 1 << 18
_PIECE_BYTES = 1 << 22
_decode = msgspec.json.Decoder().decode

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Raised for JSON that is broken, has unexpected types, isn't UTF-8, or is nested too deeply."""


def lines_in(path: Path, start: int = 0, end: int | None = None) -> Iterator[bytes | bytearray]:
    """Read the lines of a file from byte `start` to `end`, each with its line ending.

    A very long line is assembled in place, because the file's own iterator would hold it twice.
    """
    left = (path.stat().st_size if end is None else end) - start
    with path.open("rb", buffering=_BUFFER_BYTES) as file:
        file.seek(start)
        while left > 0 and (line := file.readline(min(left, _PIECE_BYTES))):
            left -= len(line)
            if len(line) < _PIECE_BYTES:
                yield line
                continue
            whole = bytearray(line)
            while not whole.endswith(b"\n") and (piece := file.readline(min(left, _PIECE_BYTES))):
                whole += piece
                left -= len(piece)
            yield whole


@contextmanager
def in_utf_8(source: SourceSlice) -> Iterator[SourceSlice]:
    """Yield a slice, or, if its file is UTF-16 (as PowerShell writes it), a slice of a UTF-8 copy."""
    data = b""
    with suppress(OSError), source.place.open("rb") as file:  # who reads it next tells
        if (head := file.read(2)) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            data = head + file.read()
    if not data:
        yield source
        return
    with TemporaryDirectory() as folder:
        copy = Path(folder) / source.place.name
        # A cut may lie inside a character of two bytes: what is left of it is ignored.
        before, whole = (
            data[:end].decode("utf-16", "ignore").encode() for end in (source.start, source.end)
        )
        copy.write_bytes(whole)
        yield replace(source, start=len(before), end=None, copy=copy)


def objects_in(line: bytes | bytearray, counts: ReadCounts) -> Iterator[dict[str, Any]]:
    """Read the JSON objects of one line, and count other values as skipped.

    A killed writer leaves half a row without a line ending, and the next row follows on the same
    line. Reading continues after the broken part, where the next row begins.
    """
    text = line.strip(_JUNK).decode("utf-8", "replace")
    if not text:
        if line.strip():  # a block of zeros, as a crash of the machine leaves it
            counts.rows += 1
            counts.skipped["null_bytes"] += 1
        return
    if "\x00" in text:
        text = text.replace("\x00", "")
    position, n_documents = 0, 0
    while position < len(text):
        try:
            value, position = _decoder.raw_decode(text, position)
            value = _cleaned(value, counts) if isinstance(value, dict) else None
        except (ValueError, RecursionError):
            counts.rows += 1
            is_whole = line.endswith(b"\n")
            position = _next_row(text, position + 1)
            counts.skipped["not_json" if is_whole or position < len(text) else "truncated"] += 1
            continue
        n_documents += 1
        counts.rows += 1
        if value is not None:
            yield value
        else:
            counts.skipped["not_an_object"] += 1
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
    if n_documents > 1:
        counts.notes["glued_line"] += n_documents - 1


_decoder = json.JSONDecoder(strict=False)
_ROW_KEYS = frozenset({"uuid", "sessionId", "timestamp", "payload", "messages", "nodes"})
"""Of rows, one has at least one of these; the objects inside a row have none."""
_MAX_TRIES = 10_000


def _next_row(text: str, position: int) -> int:
    """Return where the next whole row begins; the end of the text if there is none."""
    for _ in range(_MAX_TRIES):
        position = text.find('{"', position)
        if position < 0:
            break
        try:
            value, _ = _decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            position += 1
            continue
        if not _ROW_KEYS.isdisjoint(value):
            return position
        position += 1
    return len(text)


def _cleaned(value: dict[str, Any], counts: ReadCounts) -> dict[str, Any]:
    text = json.dumps(value, ensure_ascii=False)
    clean = without_surrogates(text)
    if clean == text:
        return value
    counts.notes["lone_surrogate"] += 1
    return json.loads(clean)


def without_surrogates(text: str) -> str:
    """Return `text` with each half of a surrogate pair replaced by U+FFFD."""
    return _LONE_SURROGATE.sub("\ufffd", text)


def read_objects(
    path: Path, counts: ReadCounts, end: int | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read every object of a JSON Lines file up to byte `end`, with the offset of its line."""
    offset = 0
    for line in lines_in(path, 0, end):
        try:
            value = _decode(line)
        except UNREADABLE:
            value = None
        if isinstance(value, dict):
            counts.rows += 1
            yield offset, value
        else:
            for item in objects_in(line, counts):
                yield offset, item
        offset += len(line)


def read_document(path: Path) -> Any:
    """Return a file that is one JSON document; `None` if it is not."""
    try:
        text = path.read_bytes().strip(_JUNK).decode("utf-8", "replace")
        value = json.loads(text, strict=False)
        return json.loads(without_surrogates(json.dumps(value, ensure_ascii=False)))
    except (OSError, ValueError, RecursionError):
        return None


def as_dict(value: Any) -> dict[str, Any]:
    """Return `value` if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Return `value` if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def text_or_none(value: Any) -> str | None:
    """Return `value` if it is a string that is not empty."""
    return value if isinstance(value, str) and value else None


def as_count(value: Any) -> int:
    """Return `value` if it is a sensible number of tokens, else 0."""
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return value if is_count and 0 <= value < 1 << 42 else 0


def moment_of(value: Any, *, per_second: int = 1000) -> str | None:
    """Return a time since 1970, in milliseconds, as text in the form of other logs; `None` if it isn't one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value / per_second < 1 << 32:
        return None
    return datetime.fromtimestamp(value / per_second, UTC).isoformat()


def digest_of(value: Any) -> str:
    """Return a hash of a JSON value."""
    return hashlib.blake2b(msgspec.json.encode(value), digest_size=10).hexdigest()


def text_in(content: Any) -> str:
    """Return the text of a string or of content parts. Parts without text are named in brackets."""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        content = [content]
    parts = []
    for part in as_list(content):
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, dict):
            text = text_or_none(part.get("text"))
            kind = text_or_none(part.get("type"))
            if data := as_dict(part.get("inlineData") or part.get("fileData")):  # of Gemini
                kind = "image" if str(data.get("mimeType")).startswith("image/") else "file"
            if text is not None:
                parts.append(text)
            elif kind is not None and not kind.endswith("text"):
                parts.append(f"[{kind.removeprefix('input_').removesuffix('_url')}]")
    return "\n".join(parts)


def arguments_text(value: Any) -> str:
    """Return the arguments of a call as JSON text."""
    if isinstance(value, str):
        return value or "{}"
    return json.dumps({} if value is None else value, ensure_ascii=False, separators=(",", ":"))

"""OpenCode's database: each session becomes a growing file with one line per message.

OpenCode 1.2 and later keep all sessions in one SQLite database. Most new data is in its write-ahead
log, so a reader doesn't block OpenCode and sees one consistent moment. Each session is copied to a
file of lines. Earlier lines don't change, so later steps can treat the file like any other agent's
log.
"""

import json
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from replay_pipeline.errors import IngestError
from replay_pipeline.ingesters.json_lines import as_count, as_dict, as_list, text_or_none
from replay_pipeline.storage.store import written_whole

logger = logging.getLogger(__name__)

_MAGIC = b"SQLite format 3\0"
_WAIT_S = 10.0
_OPEN_MESSAGE_S = 86_400.0
"""For so long the last message of a session may still be written."""
_OF_SESSION = {
    "id": "id", "projectID": "project_id", "parentID": "parent_id", "directory": "directory",
    "version": "version",
}  # fmt: skip
"""What doesn't change while a session grows, by its name in an export."""
_OF_MESSAGE = (
    "role", "time", "error", "parentID", "agent", "modelID", "providerID", "path", "summary", "tokens", "finish",
)  # fmt: skip


def is_database(path: Path) -> bool:
    """Return whether a file is a database of OpenCode, by its name and its first bytes."""
    # To open a pipe would wait for who writes to it.
    if path.suffix != ".db" or not path.name.startswith("opencode") or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def databases_in(source: Path) -> list[Path]:
    """Return the databases at or below a source, sorted."""
    if not source.is_dir():
        return [source] if is_database(source) else []
    found = (
        Path(folder) / name
        for folder, _, names in os.walk(source)
        for name in names
        if name.endswith(".db")
    )
    return sorted(path for path in found if is_database(path))


def export_sessions(database: Path, folder: Path, *, settle_s: float = 0.0) -> list[Path]:
    """Write each session of a database to a file below `folder`, and return these files.

    If the lines of an existing file are still valid, new lines are appended; otherwise the file is
    written again. The database isn't changed.

    Args:
        database: its main file. The files next to it are read as well.
        folder: where to write the files. Only their owner can read them.
        settle_s: if not 0, a last message that is still being written waits for the next call.

    Raises:
        IngestError: the database can't be read, or isn't one of OpenCode.
    """
    files = []
    try:
        with _opened(database) as rows:
            for session in rows.execute("SELECT * FROM session ORDER BY id").fetchall():
                lines = list(_lines(rows, session, is_settled=_is_settled(session, settle_s)))
                path = folder / f"{session['id']}.jsonl"
                if len(lines) > 1:
                    _write(path, lines)
                    files.append(path)
    except (sqlite3.Error, IndexError) as error:
        raise IngestError(f"{database}: cannot be read as OpenCode's database ({error})") from error
    return files


@contextmanager
def _opened(database: Path) -> Iterator[sqlite3.Connection]:
    """Open a database for reading alone, as it is at one moment."""
    has_log = database.with_name(f"{database.name}-wal").exists()
    # Without a log the file is all there is, and nothing needs to be made beside it.
    mode = "mode=ro" if has_log else "mode=ro&immutable=1"
    rows = sqlite3.connect(f"{database.absolute().as_uri()}?{mode}", uri=True, timeout=_WAIT_S)
    rows.row_factory = sqlite3.Row
    with closing(rows):
        rows.execute("BEGIN")
        yield rows


def _is_settled(session: sqlite3.Row, settle_s: float) -> bool:
    age_s = datetime.now(UTC).timestamp() - as_count(session["time_updated"]) / 1000
    return settle_s <= 0 or age_s > _OPEN_MESSAGE_S


def _lines(
    rows: sqlite3.Connection, session: sqlite3.Row, *, is_settled: bool
) -> Iterator[dict[str, Any]]:
    yield {"opencode": 1, "info": {name: session[column] for name, column in _OF_SESSION.items()}}
    parts_of: dict[str, list[dict[str, Any]]] = {}
    parts = "SELECT id, message_id, data FROM part WHERE session_id = ? ORDER BY message_id, id"
    for part_id, message_id, data in rows.execute(parts, (session["id"],)):
        parts_of.setdefault(message_id, []).append({"id": part_id, **_object(data)})
    messages = "SELECT id, data FROM message WHERE session_id = ? ORDER BY time_created, id"
    found = []
    for message_id, data in rows.execute(messages, (session["id"],)):
        message = _object(data)
        info = {"id": message_id} | {key: message[key] for key in _OF_MESSAGE if key in message}
        if not isinstance(info.get("summary"), bool):
            info.pop("summary", None)  # of the user's messages: differences of files, put in later
        found.append({"info": info, "parts": list(map(_lean, parts_of.get(message_id, [])))})
    if not is_settled and (first := _first_open(found)) is not None:
        del found[first:]
    yield from with_clearings(found)
    if found and session["title"]:
        yield {"title": session["title"]}


def _first_open(messages: list[dict[str, Any]]) -> int | None:
    """Return the place of the model's last message, if it's still being written."""
    for place in range(len(messages) - 1, -1, -1):
        info = messages[place]["info"]
        if info.get("role") == "assistant":
            is_done = "completed" in as_dict(info.get("time")) or info.get("error")
            return None if is_done else place
    return None


def with_clearings(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield messages with their original results, and a mark wherever old results were cleared."""
    clearings: dict[int, list[str]] = {}
    seen = set[str]()
    for message in messages:
        for part in map(as_dict, as_list(message.get("parts"))):
            if (call_id := text_or_none(part.get("callID"))) is None:
                continue
            if call_id in seen:  # some servers give every call the same id, and some exports too
                call_id = part["callID"] = f"{call_id}~{len(seen)}"
            seen.add(call_id)
            at = as_count(as_dict(as_dict(part.get("state")).get("time")).pop("compacted", None))
            if at:
                clearings.setdefault(at, []).append(call_id)
    waiting = sorted(clearings.items())
    for message in messages:
        created = as_count(as_dict(as_dict(message.get("info")).get("time")).get("created"))
        while waiting and created > waiting[0][0]:
            at, call_ids = waiting.pop(0)
            yield {"cleared": call_ids, "time": at}
        yield message


def _lean(part: dict[str, Any]) -> dict[str, Any]:
    """Leave out what shows a result to the user: the model was given its `output`."""
    state = as_dict(part.get("state"))
    told = {
        key: value for key, value in as_dict(state.get("metadata")).items() if key == "interrupted"
    }
    if told and "output" in state["metadata"]:
        told["output"] = state["metadata"]["output"]
    return part | {"state": state | {"metadata": told}} if "metadata" in state else part


def _object(text: str) -> dict[str, Any]:
    try:
        return as_dict(json.loads(text))
    except (ValueError, RecursionError):
        return {}


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    data = [
        json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n" for line in lines
    ]
    known = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if data == known:
        return
    titles = [line for line in known if line.startswith(b'{"title"')]
    is_longer = (
        known and [line for line in known if line not in titles] == data[: len(known) - len(titles)]
    )
    if is_longer:
        # The title is found when the conversation has begun, and goes behind what was there.
        new = [line for line in data[len(known) - len(titles) :] if line not in titles]
        with path.open("ab") as file:
            file.writelines(new)
        return
    with written_whole(path, is_private=True) as file:
        file.writelines(data)


def readable_sessions(database: Path, folder: Path, *, settle_s: float = 0.0) -> list[Path]:
    """Return the files that `export_sessions` writes. Logs a warning if the database can't be read."""
    try:
        return export_sessions(database, folder, settle_s=settle_s)
    except IngestError as error:
        logger.warning("%s; left out", error)
        return []

"""Sessions to one HTML file: the figures at its top, and each session as a tree.

A session is packed by itself, and unpacked by the page when somebody opens it: a hundred sessions
are one file of a few megabytes, of which the browser reads what is looked at.
"""

import base64
import gzip
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from replay_pipeline.errors import IngestError
from replay_pipeline.inert_html import address_of, html_page, inert_json
from replay_pipeline.ingesters import default_sources, ingest
from replay_pipeline.look.overview import TOKENS, Row, facts_of_session, overview
from replay_pipeline.redaction.printable import printable
from replay_pipeline.storage.store import written_whole
from replay_pipeline.types import Progress

_HERE = Path(__file__).parent
MAX_CHARS = 2_500
"""Of a text, so much of its beginning is in the page; how much more there was is said."""


def look(
    paths: Sequence[Path] | None = None,
    *,
    page: Path,
    review: Path | None = None,
    salt: str = "",
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Read sessions and write the page that shows them. Returns the figures of its top.

    Secrets, addresses and names of users are redacted, and nothing is sent anywhere.

    Args:
        paths: session files or folders; by default those of the agents on this machine.
        page: the HTML file; it appears complete or not at all.
        review: the review page, to which decisions link.
        salt: what makes placeholders of secrets unguessable.
        on_progress: called as files are read.

    Raises:
        IngestError: a path cannot be read, or there is no session.
        StorageError: the page cannot be written.
    """
    sources = list(paths or default_sources())
    if not sources:
        raise IngestError("no session found: name a folder or a .jsonl file")
    result = ingest(sources, salt=salt, on_progress=on_progress)
    states = result.states.to_pylist()
    turns = [turn for turn in result.turns.to_pylist() if turn["turn_idx"] >= 0]
    _charge_once(turns, states)
    turns_of, states_of = _by_session(turns), _by_session(states)
    facts, pieces = [], []
    for session in result.sessions.to_pylist():
        name = session["session_id"]
        own, decisions = turns_of.get(name, []), states_of.get(name, [])
        facts.append(facts_of_session(session, own, decisions))
        pieces.append(_packed(own, decisions))
    figures = overview(facts, turns, states, result.report)
    with written_whole(page) as file:
        link = None if review is None else address_of(review, seen_from=page)
        data = {"overview": figures, "sessions": facts, "pieces": pieces, "review": link}
        file.write(_html(data).encode())
    return figures


def _charge_once(turns: Sequence[dict[str, Any]], states: Sequence[Row]) -> None:
    """Take the tokens from turns that a fork has copied: they were paid for where they were decided."""
    decided = {(state["session_id"], state["turn_idx"]) for state in states}
    for turn in turns:
        is_first = turn["parent_turn_idx"] is None  # no state, since nothing came before it
        if not is_first and (turn["session_id"], turn["turn_idx"]) not in decided:
            turn.update(dict.fromkeys(TOKENS.values()))


def _by_session(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["session_id"], []).append(row)
    return groups


def _packed(turns: Sequence[Row], states: Sequence[Row]) -> str:
    """Compress the turns of a session, as the page's script takes them."""
    decisions = {state["turn_idx"]: state for state in states}
    rows = [_turn(turn, decisions.get(turn["turn_idx"])) for turn in turns]
    # The same bytes at any time: a page that is made again is the same page.
    return base64.b64encode(gzip.compress(msgspec.json.encode(rows), 6, mtime=0)).decode()


def _turn(turn: Row, state: Row | None) -> dict[str, Any]:
    messages = msgspec.json.decode(turn["messages_json"])
    if (
        state is not None
    ):  # its action is in `states` alone; the turn holds the results of its calls
        calls = msgspec.json.decode(state["action_tool_calls_json"] or "[]")
        action = {"role": "assistant", "content": state["action_text"], "tool_calls": calls}
        messages.insert(0, action)
    shown: dict[str, Any] = {
        "i": turn["turn_idx"],
        "parent": turn["parent_turn_idx"],
        "kind": turn["kind"],
        "at": turn["timestamp"].isoformat(timespec="seconds") if turn["timestamp"] else None,
        "model": turn["model"],
        "parts": [part for message in messages for part in _parts(message)],
    }
    if turn["thinking"]:
        shown["thinking"] = _cut(turn["thinking"])
    if state is not None:
        names = ("state_id", "outcome", "error_kind", "hint", "recovered_by", "fidelity")
        shown["state"] = {name: state[name] for name in names if state[name] is not None}
    return shown


def _parts(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Give the texts of a message, each with who says it or which tool it is for."""
    parts = []
    if content := message.get("content"):
        text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
        parts.append((str(message.get("role")), _cut(text)))
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        parts.append((f"call: {function.get('name')}", _cut(str(function.get("arguments")))))
    return parts


def _cut(text: str) -> str:
    text = printable(text)
    n_more = len(text) - MAX_CHARS
    return f"{text[:MAX_CHARS]} … and {n_more:,} characters more" if n_more > 0 else text


def _html(data: Mapping[str, Any]) -> str:
    style, body, script = (
        (_HERE / f"page.{kind}").read_text("utf-8") for kind in ("css", "html", "js")
    )
    return html_page(title="Sessions", style=style, body=body, script=script, data=inert_json(data))

"""Find the decisions of a session that are new or have changed since it was last read.

A log grows while it is read. A decision may have been read before its calls were answered, before
its last block was written, or before the user took it back. If anything stored about a decision has
changed, the decision counts as new again. So the last slice that has a decision has it as in the
whole file.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Set
from typing import Any

import msgspec
import pyarrow as pa

from replay_pipeline.ingesters.base import SessionLog, Turn
from replay_pipeline.ingesters.labels import Label
from replay_pipeline.ingesters.log_rows import state_ids_of
from replay_pipeline.types import Message

_encode = msgspec.json.encode
_decode = msgspec.json.decode


def digests_of(log: SessionLog, labels: Mapping[Turn, Label]) -> dict[str, bytes]:
    """Hash the prompt, action, and outcome of each decision, by its id."""
    seen: dict[Turn, bytes] = {}
    for turn in log.turns:
        above = seen[turn.parent] if turn.parent is not None else b""
        seen[turn] = _digest(above, _encode([
            turn.kind, turn.cwd, turn.texts, turn.thinking, turn.calls,
            [(i, r.text, r.is_error, r.denial, r.feedback) for i, r in turn.results.items()],
            sorted(turn.flags), turn.cleared,
        ]))  # fmt: skip
    states = [turn for turn in log.turns if turn.is_state]
    digests: dict[str, bytes] = {}
    for state_id, turn in zip(state_ids_of(states), states, strict=True):
        label = labels[turn]
        told = [label.outcome, label.error_kind, label.hint, turn.usage, turn.model]
        # Natural alternatives are looked up in one table: they have to move together.
        others = [seen[sibling] for sibling in label.siblings]
        after = seen[label.recovered_by] if label.recovered_by is not None else b""
        digests[state_id] = _digest(seen[turn], _encode(told), after, *others)
    return digests


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def without_states(tables: Mapping[str, pa.Table], taken: Set[str]) -> dict[str, pa.Table]:
    """Remove decisions from the tables of a batch, as if they had not been read.

    If later decisions need the turn of a removed decision, its action becomes one of the turn's
    messages.
    """
    states, turns, sessions = (tables[name] for name in ("states", "turns", "sessions"))
    is_kept = [state_id not in taken for state_id in states["state_id"].to_pylist()]
    kept, gone = states.filter(is_kept), states.filter([not each for each in is_kept])
    if not gone.num_rows:
        return dict(tables)
    actions = {
        (row["session_id"], row["turn_idx"]): _action(row)
        for row in gone.select(
            ["session_id", "turn_idx", "action_text", "action_tool_calls_json"]
        ).to_pylist()
    }
    rows = turns.to_pylist()
    needed = _paths(rows, kept)
    for row in rows:
        action = actions.get((row["session_id"], row["turn_idx"]))
        if action is not None:
            row["messages_json"] = _encode([action, *_decode(row["messages_json"])]).decode()
    rows = [row for row in rows if (row["session_id"], row["turn_idx"]) in needed]
    had_states = set(states["session_id"].to_pylist())
    n_turns = Counter(row["session_id"] for row in rows if row["turn_idx"] >= 0)
    n_states = Counter(kept["session_id"].to_pylist())
    return {
        **tables,
        "states": kept,
        "turns": pa.Table.from_pylist(rows, schema=turns.schema),
        "sessions": pa.Table.from_pylist(
            [
                row | {"n_turns": n_turns[session_id], "n_states": n_states[session_id]}
                for row in sessions.to_pylist()
                for session_id in [row["session_id"]]
                if session_id in n_states or session_id not in had_states
            ],
            schema=sessions.schema,
        ),
    }


def _action(row: Mapping[str, str | None]) -> Message:
    action: Message = {"role": "assistant", "content": row["action_text"] or ""}
    if row["action_tool_calls_json"]:
        action["tool_calls"] = _decode(row["action_tool_calls_json"])
    return action


def _paths(rows: list[dict[str, Any]], states: pa.Table) -> set[tuple[str, int]]:
    """Return turns on the paths of the states, by session and index."""
    parents = {(row["session_id"], row["turn_idx"]): row["parent_turn_idx"] for row in rows}
    needed: set[tuple[str, int]] = set()
    ends = ("turn_idx", "sent_turn_idx", "shape_turn_idx")
    for session_id, index in (
        place
        for name in ends
        for place in zip(states["session_id"].to_pylist(), states[name].to_pylist(), strict=True)
    ):
        while index is not None and (session_id, index) not in needed:
            needed.add((session_id, index))
            index = parents.get((session_id, index))
    return needed

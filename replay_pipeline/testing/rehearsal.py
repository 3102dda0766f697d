"""Made-up answers for your own sessions, which let you try the whole chain without a key.

Every answer is marked as made up by its model and provider. The rest of the pipeline knows it by
these marks, independent of the teacher's name in the settings.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from replay_pipeline.actions import canonical_action
from replay_pipeline.actions.keys import purpose_of
from replay_pipeline.types import REHEARSAL_TEACHERS, Message

STATE_COLUMNS = ["state_id", "session_id", "turn_idx", "action_text", "action_tool_calls_json"]
"""What is made up depends on these columns of `states`."""
_FAR = 4
"""Steps between a decision and the one whose action is played there: what the student does a moment
later anyway is no preference."""
_CHECKS = {"name": "Bash", "arguments": json.dumps({"command": "make check"})}
"""What is played where a session has nothing else: no look, since a teacher that looks is asked on."""
_CASES = ("sss", "sss", "sso", "ooa", "ooa", "ooa", "oos", "soa")
"""What the three play, a case as likely as another: the student's action, another one (`o`), still
another one (`a`). So there are agreements, pairs, a dispute and states without a consensus."""


def rehearsed_answers(states: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Message]]:
    """Make up the action of each rehearsal teacher at each state. The result is repeatable.

    Returns:
        Assistant messages by state and model.
    """
    sessions: dict[str, list[Mapping[str, Any]]] = {}
    for row in states:
        sessions.setdefault(row["session_id"], []).append(row)
    return {
        row["state_id"]: answers
        for rows in sessions.values()
        for row, answers in _of_session(sorted(rows, key=lambda row: row["turn_idx"]))
    }


def _of_session(
    rows: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], dict[str, Message]]]:
    actions = [_action(row) for row in rows]
    for place, row in enumerate(rows):
        digest = hashlib.blake2b(row["state_id"].encode()).digest()
        far = [
            action
            for step, action in enumerate(actions)
            if abs(step - place) >= _FAR
            and action["tool_calls"]
            and action != actions[place]
            and purpose_of(canonical_action(action)) is None
        ]
        start = digest[1] % len(far) if far else 0
        checks = {"role": "assistant", "content": None, "tool_calls": [_call(_CHECKS)]}
        other, another = [*far[start:], *far[:start], checks, checks][:2]
        played = {"s": actions[place], "o": other, "a": another}
        case = _CASES[digest[0] % len(_CASES)]
        yield (
            row,
            {
                teacher.model: _said(played[part])
                for teacher, part in zip(REHEARSAL_TEACHERS, case, strict=True)
            },
        )


def _action(row: Mapping[str, Any]) -> Message:
    calls = msgspec.json.decode(row["action_tool_calls_json"] or "[]")
    return {
        "role": "assistant",
        "content": row["action_text"] or None,
        "tool_calls": [_call(call["function"]) for call in calls],
    }


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": dict(function)}


def _said(action: Message) -> Message:
    """Return an action as an answer: calls with ids, and no list of calls where there are none."""
    calls = [{"id": f"call_{n}", **call} for n, call in enumerate(action["tool_calls"], 1)]
    said = {"role": "assistant", "content": action["content"]}
    return {**said, "tool_calls": calls} if calls else said

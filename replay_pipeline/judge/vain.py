"""Did the agent look in vain before it acted? Such decisions are a kind of work of their own."""

import re
from collections import Counter

from replay_pipeline.actions import canonical_action
from replay_pipeline.actions.keys import keys_of, purpose_of
from replay_pipeline.types import TraceState

IN_VAIN = "after looks in vain"
"""The name of that kind."""
_OFTEN = 3
"""Reads of one file after which a further one is no progress."""
_SHOWS_NOTHING = re.compile(
    r"\s*(?:no (?:files|matches) found.{0,80}|found 0 .{0,80}|\(?(?:bash completed with )?no output\)?)?\s*",
    re.IGNORECASE,
)


def looked_in_vain(state: TraceState) -> bool:
    """Return whether, since it last acted or was spoken to, the agent read a file thrice or searched without hits."""
    answers: dict[str, str] = {}
    reads: Counter[str] = Counter()
    for message in reversed(state["messages"]):
        if message["role"] == "tool":
            answers[message.get("tool_call_id") or ""] = str(message.get("content") or "")
            continue
        if message["role"] != "assistant":
            return False
        action = canonical_action(message, cwd=state.get("cwd"))
        if purpose_of(action) != "looks":
            return False
        for call, recorded in zip(action.calls, message["tool_calls"], strict=False):
            if call.name == "Read":
                reads[keys_of(call).target] += 1
            elif _SHOWS_NOTHING.fullmatch(answers.get(recorded.get("id") or "", "?")):
                return True
        if max(reads.values(), default=0) >= _OFTEN:
            return True
    return False

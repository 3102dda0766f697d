"""Rules against a pair although the teachers agree, which look at both sides.

Agreement alone also makes pairs that teach nothing or the wrong thing, such as a refusal that two
teachers share, or a final text against a tool call. Objections that come from the prompt are in
`feasibility`.
"""

import re
from typing import Literal

from replay_pipeline.actions import Action

_REFUSAL = re.compile(
    r"(?:i[’']?m |i am )?(?:very |so |deeply )?(?:sorry|afraid)\b"
    r"|(?:but |unfortunately,? )?i (?:can[’']?t|cannot|can not|won[’']?t|will not"
    r"|am (?:not able|unable|not permitted) to|[’']?m (?:not able|unable) to|must decline)\b"
    r"|as an ai\b|unable to (?:help|assist|comply)",
    re.IGNORECASE,
)


def is_refusal(action: Action) -> bool:
    """Return whether an action is a text that refuses."""
    return not action.calls and _REFUSAL.match(action.text.strip()) is not None


def stop_objection(chosen: Action, rejected: Action) -> Literal["early_stop", "late_stop"] | None:
    """Return the side that ends the turn with a text while the other calls a tool, or None.

    Both directions count. The prompt doesn't show whether the work is done, and pairs in only one
    direction would teach the model to stop always or never.
    """
    if bool(chosen.calls) == bool(rejected.calls):
        return None
    return "late_stop" if chosen.calls else "early_stop"

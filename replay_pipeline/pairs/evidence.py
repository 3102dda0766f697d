"""What speaks against a pair although the teachers agree: rules that look at both sides.

Agreement alone makes pairs that teach nothing or the wrong thing: a refusal that two teachers share,
an end where the other goes on. What the prompt says against a side is in `feasibility`.
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
    """Return whether an action is a refusal in words."""
    return not action.calls and _REFUSAL.match(action.text.strip()) is not None


def stop_objection(chosen: Action, rejected: Action) -> Literal["early_stop", "late_stop"] | None:
    """Name the side that ends the turn with a text where the other goes on with a tool; `None` if none.

    Both ways alike: whether the work is done cannot be told from the prompt, and pairs for one of them
    alone would teach to stop, or never to stop.
    """
    if bool(chosen.calls) == bool(rejected.calls):
        return None
    return "late_stop" if chosen.calls else "early_stop"

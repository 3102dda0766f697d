"""Channel 1 by execution: an action is worth what comes of running it, whatever any teacher said.

    rollouts: generate
    reward: rewards:executed

run.py says in the variable DOLLAR_TASKS which repositories were drawn.
"""

import json
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from tasks import Repository, repositories

VARIABLE = "DOLLAR_TASKS"


@cache
def _by_id() -> dict[str, Repository]:
    return {one.id: one for one in repositories(**json.loads(os.environ[VARIABLE]))}  # noqa: TID251


def executed(message: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """Return 1 for an action that does what was asked when it is run, .1 for a call that can be run, else 0."""
    did, _ = _by_id()[row["session_id"]].run(message)
    return {"right": 1.0, "wrong": 0.1}.get(did, 0.0)

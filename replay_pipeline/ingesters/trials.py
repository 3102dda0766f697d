"""What a benchmark writes beside the log of a trial: whether its task was solved, and what was asked.

Harbor: `TRIAL/agent/` has the log, `TRIAL/verifier/reward.txt` the reward. Terminal-Bench:
`RUN/sessions/` has the recording, `RUN/results.json` the result and the instruction.
"""

from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from replay_pipeline.ingesters.json_lines import (
    as_dict,
    as_list,
    read_document,
    text_in,
    text_or_none,
)

_DEPTH = 3
"""So many folders above a log may be that of its trial."""
OUTPUT, TRAJECTORY = "claude-code.txt", "trajectory.json"
"""Harbor writes a run of Claude Code down twice; the first has its messages as they were."""


def is_resolved(path: Path) -> bool | None:
    """Return whether the task of a log was solved; `None` if nothing beside it says so."""
    for folder in path.parents[:_DEPTH]:
        with suppress(OSError, ValueError):
            return float((folder / "verifier" / "reward.txt").read_text("utf-8")) >= 1
        resolved = _results(folder).get("is_resolved")
        if isinstance(resolved, bool):
            return resolved
    return None


def instruction_of(path: Path) -> str | None:
    """Return what the user asked, where the trial of a log has it."""
    steps = as_list(as_dict(read_document(path.with_name(TRAJECTORY))).get("steps"))
    asked = (
        text_in(step.get("message")) for step in map(as_dict, steps) if step.get("source") == "user"
    )
    told = (text_or_none(_results(folder).get("instruction")) for folder in path.parents[:_DEPTH])
    return next(filter(None, chain(asked, told)), None)


def is_told_twice(path: Path) -> bool:
    """Return whether a trajectory tells a run of which the output lies beside it."""
    with suppress(OSError):
        return path.name == TRAJECTORY and path.with_name(OUTPUT).stat().st_size > 0
    return False


def _results(folder: Path) -> dict[str, Any]:
    return as_dict(read_document(folder / "results.json"))

"""Conversations of several session files: each way in which a log goes on with another."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.support.sessions import SessionBuilder, ToolCall

Row = dict[str, Any]


def talk(name: str, *, start: str = "2026-02-03T09:00:00.000Z", n_steps: int = 3) -> SessionBuilder:
    """Build a session that hands a long task to a subagent and then works for some steps."""
    log = SessionBuilder(name, start=start)
    log.user(f"The importer of {name} loses every tenth line of a file. Find out why.")
    task = (
        f"Read the importer of {name} and the tests that cover it. Write down where a line can be "
        "left out: which condition decides it, which value it looks at, and which test would show "
        "it. Change nothing, and end with a list of at most five places, the likeliest first."
    )
    call = ToolCall("Task", {"description": "look", "prompt": task, "subagent_type": "Explore"})
    asked = log.assistant("I have it looked at.", [call])
    agent = log.subagent(asked.tool_use_ids[0], task, agent_type="Explore", description="look")
    read = agent.assistant("I begin with the reader.", [ToolCall("Read", {"file_path": "io.py"})])
    agent.result(read.tool_use_ids[0], "def lines(): ...")
    agent.assistant("It is the buffer.")
    agent.finish("It is the buffer.")
    for step in range(n_steps):
        go_on(log, step)
    return log


def go_on(log: SessionBuilder, step: int) -> None:
    """Take one more step: a call, and its result."""
    read = ToolCall("Read", {"file_path": f"src/{log.name}_{step}.py"})
    done = log.assistant(f"Step {step}.", [read])
    log.result(done.tool_use_ids[0], f"part {step} of {log.name}")


def copied(log: SessionBuilder, name: str, *, says_from: bool) -> SessionBuilder:
    """Copy a session into a new file, which goes on by itself: a fork, or an old client's resume.

    Args:
        log: what is copied, row by row.
        name: of the new session.
        says_from: whether rows say what they were forked from; the id of the session in them is
            the new one either way.
    """
    other = log.copied(name, is_fork=says_from, start="2026-02-04T09:00:00.000Z")
    for step in (100, 101):
        go_on(other, step)
    return other


def going_on(log: SessionBuilder, name: str) -> SessionBuilder:
    """Begin a new file below the last row of another, without a copy of what came before."""
    other = SessionBuilder(name, start="2026-02-05T09:00:00.000Z")
    other.head = log.head
    other.user("Go on from where we were.")
    go_on(other, 0)
    return other


def write_all(logs: Iterable[SessionBuilder], folder: Path) -> list[Path]:
    """Write sessions and their subagents; return the files of the sessions."""
    return [log.write(folder) for log in logs]


def rows_in(path: Path) -> list[Row]:
    """Read the rows of a log."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]

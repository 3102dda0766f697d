"""Do states have the recorded length below the harness that was learned, without any fitted constant?

    python benchmarks/harness_fidelity.py SESSIONS --harness ROOT [--memory REPOSITORY] [--json FILE]

SESSIONS is a folder of Claude Code sessions, ROOT a data root into which `replay-pipeline harness learn` has
learned. The provider recorded how many tokens each prompt had. Ingestion predicts it by the messages and one
constant, fitted to each run of the client, for what no log shows. Here the constant is what the harness
has: system prompt, tools and reminders, by the same estimate per character. What is left, the difference
of the two constants, is what the harness lacks: memory files, the state of git, tools of MCP servers.
With the repository that the sessions worked in, its `CLAUDE.md` of each day is counted as well. And
constants are fitted to ever smaller groups, to find within what the lack is constant.
"""

import argparse
import json
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from replay_pipeline.harness import HarnessStore
from replay_pipeline.ingesters import Traces, fidelity, ingest, log_rows, state_id_of
from replay_pipeline.ingesters.base import Turn
from replay_pipeline.testing.sample import SESSIONS_DIR

_SENT_TOKENS: dict[str, float] = {}
"""By state, the estimate of the messages alone."""


def _predicted(turns: Sequence[Turn], **how: Any) -> dict[Turn, int]:
    costs = fidelity._Costs()
    for turn in turns:
        costs.add(turn)
        if turn.is_state:
            _SENT_TOKENS[state_id_of(turn)] = costs.before[turn]
    return fidelity.predict_context(turns, **how)


def constant_of(state: Any) -> float:
    """Tokens of the system prompt, the tools and the reminders of a state."""
    n_text = sum(map(len, state["system"]))
    n_json = sum(len(json.dumps(tool["function"])) for tool in state["tools"])
    return fidelity.TOKENS_PER_CHAR_TEXT * n_text + fidelity.TOKENS_PER_CHAR_ARGUMENTS * n_json


def _memory(repository: Path) -> list[tuple[datetime, float]]:
    """Return when a repository's memory file changed, newest first, and the tokens that it had then."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(repository), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    lines = git("log", "--all", "--format=%H %cI", "--", "CLAUDE.md").splitlines()
    commits = [(sha, datetime.fromisoformat(at)) for sha, at in map(str.split, lines)]
    shown = {sha: git("show", f"{sha}:CLAUDE.md") for sha, _ in commits if _has(git, sha)}
    found = [(at, fidelity.TOKENS_PER_CHAR_TEXT * len(shown[s])) for s, at in commits if s in shown]
    return sorted(found, reverse=True)


def _has(git: Any, sha: str) -> bool:
    return bool(git("ls-tree", sha, "CLAUDE.md"))


def _figures(read: Any, traces: Traces, memory: list[tuple[datetime, float]]) -> list[dict]:
    """Return what is known of each state below a learned harness whose length was recorded."""
    names = ("state_id", "n_predicted_tokens", "segment")
    of_state = {row["state_id"]: row for row in read.states.select(names).to_pylist()}
    names = ("session_id", "versions", "project", "agent_id", "first_timestamp")
    of_session = {row["session_id"]: row for row in read.sessions.select(names).to_pylist()}
    rows = []
    for state in traces.materialize():
        recorded, sent = state["n_context_tokens"], _SENT_TOKENS.get(state["state_id"])
        if not recorded or sent is None or "harness" not in state:
            continue
        session, told = of_session[state["session_id"]], of_state[state["state_id"]]
        at = session["first_timestamp"]
        is_helper = session["agent_id"] is not None
        rows.append(
            {
                "recorded": recorded,
                "fitted": told["n_predicted_tokens"],
                "predicted": sent + constant_of(state),
                "memory": next((n for since, n in memory if at and since <= at), 0.0),
                "turn": state["turn_idx"],
                "is_helper": is_helper,
                "session": state["session_id"],
                "run": (state["session_id"], told["segment"]),
                "version": session["versions"][-1],
                "project": (session["project"], is_helper),
                "project and version": (session["project"], session["versions"][-1], is_helper),
                "all": is_helper,
                "calls_servers": any(
                    tool["function"]["name"].startswith("mcp__") for tool in state["tools"]
                ),
            }
        )
    return rows


def _close(rows: Sequence[Any], predict: Callable[[Any], float]) -> float:
    """Return the share of states whose prediction is within the tolerance."""
    n = sum(abs(predict(row) / row["recorded"] - 1) <= fidelity.TOLERANCE for row in rows)
    return n / max(len(rows), 1)


def _with_memory(row: Any) -> float:
    return row["predicted"] + row["memory"]


def _lacking(row: Any) -> float:
    return row["recorded"] - _with_memory(row)


def _with_constants(rows: Sequence[Any], by: str) -> dict[str, Any]:
    """Fit one constant to each group of states, and return what share is close then."""
    groups: dict[Any, list[float]] = defaultdict(list)
    for row in rows:
        groups[row[by]].append(_lacking(row))
    constants = {name: median(found) for name, found in groups.items()}
    close = _close(rows, lambda row: row["predicted"] + row["memory"] + constants[row[by]])
    return {"constants": f"one for each {by}", "n": len(groups), "close": close}


_NEARLY_ALL = 0.95
_WITHOUT_SERVERS = 4_000
"""Tokens that a conversation lacks at its beginning at most, where no server's tools were defined."""


def _beginnings(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what conversations lack at their first state, those with little and those with much apart."""
    first: dict[str, Any] = {}
    for row in sorted(rows, key=lambda row: row["turn"]):
        if not row["is_helper"]:
            first.setdefault(row["session"], row)
    calling = {row["session"] for row in rows if row["calls_servers"]}
    found = []
    for name, is_in in (
        ("little", lambda n: n < _WITHOUT_SERVERS),
        ("much", lambda n: n >= _WITHOUT_SERVERS),
    ):
        sessions = {key for key, row in first.items() if is_in(_lacking(row))}
        own = [row for row in rows if row["session"] in sessions]
        lacks = [_lacking(first[key]) for key in sessions]
        found.append(
            {
                "lack": name,
                "n_sessions": len(sessions),
                "n_calling_servers": len(sessions & calling),
                "n_sessions_close": sum(
                    _close([row for row in own if row["session"] == key], _with_memory)
                    >= _NEARLY_ALL
                    for key in sessions
                ),
                "n_states": len(own),
                "median_tokens": median(lacks) if lacks else None,
                "close_harness": _close(own, lambda row: row["predicted"]),
                "close_with_memory": _close(own, _with_memory),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sessions", type=Path, nargs="?", default=SESSIONS_DIR)
    parser.add_argument("--harness", type=Path, help="a data root with learned harnesses")
    parser.add_argument("--memory", type=Path, help="the repository that the sessions worked in")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    log_rows.predict_context = _predicted
    read = ingest(arguments.sessions)
    tables = {name: getattr(read, name) for name in ("sessions", "turns", "states", "tools")}
    store = HarnessStore(arguments.harness) if arguments.harness else None
    memory = _memory(arguments.memory) if arguments.memory else []
    rows = _figures(read, Traces(**tables, harnesses=store), memory)
    if not rows:
        print("no state of a client whose harness was learned; name SESSIONS and --harness ROOT")
        return
    by_version = [
        {
            "version": version,
            "n_states": len(own := [r for r in rows if version in ("all", r["version"])]),
            "fitted": _close(own, lambda row: row["fitted"]),
            "harness": _close(own, lambda row: row["predicted"]),
            "lacking_tokens": median(map(_lacking, own)),
        }
        for version in [*sorted({row["version"] for row in rows}), "all"]
    ]
    for row in by_version:
        print(
            f"  {row['version']:10s} {row['n_states']:6,} states  within 10 %: fitted "
            f"{row['fitted']:6.1%}, harness {row['harness']:6.1%}; lacking {row['lacking_tokens']:+,.0f}"
        )
    levels = [
        {"constants": "none", "n": 0, "close": _close(rows, lambda row: row["predicted"])},
        {
            "constants": "none, with the memory file",
            "n": 0,
            "close": _close(rows, _with_memory),
        },
        *(
            _with_constants(rows, by)
            for by in ("all", "version", "project", "project and version", "session", "run")
        ),
    ]
    for level in levels:
        print(f"  {level['constants']:30s} {level['n']:4} constants  {level['close']:6.1%}")
    beginnings = _beginnings(rows)
    for row in beginnings:
        print(f"  {row}")
    if arguments.json:
        told = {"by_version": by_version, "constants": levels, "beginnings": beginnings}
        arguments.json.write_text(json.dumps(told, indent=1), "utf-8")


if __name__ == "__main__":
    main()

"""Of what plausible teachers would look at, how much is answered, how much of that otherwise than it was?

    python benchmarks/looks.py SESSIONS --repository DIR
    python benchmarks/looks.py --models TRAJECTORIES

Nobody has asked teachers at these decisions, so others stand in for them. In SESSIONS, the agent itself: at each decision
that teachers are asked at, its own looks until it acts again are put to `LoggedLooks`, as a teacher would make them there.
An answer is compared with the record if the decision changes nothing that the look depends on. In TRAJECTORIES (those of
`benchmarks/verdict.py --sessions`), four models that did the same tasks: the looks of each before it first acts are put to
the session of each other one, at its first step, where only what that session shows later can tell; there are no files.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.commands import is_same_text
from benchmarks.scored_answers import action_of
from replay_pipeline.actions import Action
from replay_pipeline.actions.keys import depend, purpose_of
from replay_pipeline.errors import IngestError
from replay_pipeline.ingesters import ClaudeCodeIngester
from replay_pipeline.settings import Settings
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.work.looks import LoggedLooks
from replay_pipeline.types import TraceState

_REMINDERS = re.compile(r"\s*<system-reminder>.*?</system-reminder>\s*", re.DOTALL)
_OF_FILES = ("Read", "Grep", "Glob", "Bash", "LS")


def results_of(state: TraceState, following: TraceState) -> list[str]:
    """Return what the calls of a state's action were answered, as the next state's prompt has it."""
    told = {m.get("tool_call_id"): m["content"] for m in following["messages"] if m["role"] == "tool"}  # fmt: skip
    calls = state["student_action"].get("tool_calls") or ()
    return [_REMINDERS.sub("", told.get(call["id"]) or "") for call in calls]


def looks_behind(states: list[TraceState]) -> Iterator[tuple[TraceState, TraceState, list[str]]]:
    """Yield each decision of a session with a later state at which the agent only looks, before it acts again."""
    for number, decision in enumerate(states):
        if purpose_of(action_of(decision)) is not None:
            continue
        for state, following in zip(states[number + 1 :], states[number + 2 :], strict=False):
            if purpose_of(action_of(state)) is None:
                break
            yield decision, state, results_of(state, following)


def kind_of(action: Action) -> str:
    name = action.calls[0].name
    return name if name in _OF_FILES else "of books" if purpose_of(action) == "books" else "other"


def in_sessions(sessions: Path, repository: Path) -> dict[str, Counter[str]]:
    """Count the looks behind the decisions of some sessions, by tool."""
    counts: dict[str, Counter[str]] = {}
    changes = {
        "ingest": {"sources": [str(sessions)], "is_redacted": False},
        "workspaces": {"repositories": [str(repository)]},
    }
    with tempfile.TemporaryDirectory() as folder:
        pipeline = Pipeline(Settings.load(data_dir=Path(folder), changes=changes))
        for batch in pipeline.ingest_new():
            by_session: dict[str, list[TraceState]] = {}
            for state in pipeline.states([batch]):
                by_session.setdefault(state["session_id"], []).append(state)
            with closing(LoggedLooks(pipeline, [batch])) as looks:
                for states in by_session.values():
                    for decision, state, recorded in looks_behind(states):
                        count(counts, looks, decision, state, recorded)
    return counts


def count(
    counts: dict[str, Counter[str]],
    looks: LoggedLooks,
    decision: TraceState,
    state: TraceState,
    recorded: list[str],
) -> None:
    look, acted = action_of(state), action_of(decision)
    found = counts.setdefault(kind_of(look), Counter())
    answers = looks(decision, state["student_action"])
    if answers is not None and any(answer.source == "unknown" for answer in answers):
        found.update(n=1, partly=1)
        return
    found.update(n=1, answered=answers is not None)
    is_changed = any(depend(one, other) for one in acted.calls for other in look.calls)
    if answers is None or is_changed or not all(recorded) or purpose_of(look) == "books":
        return
    pairs = zip(answers, recorded, strict=True)
    # Files may hold such texts, too: then the record lacks what the client shows.
    is_other = any(
        not is_same_text(_REMINDERS.sub("", a.text), text, state.get("cwd") or "/")
        for a, text in pairs
    )
    found.update(compared=1, other=is_other)
    if is_other:
        told = [answer.text for answer in answers]
        print(json.dumps({"look": look.calls[0].values(), "told": told, "was": recorded}))


def at_same_tasks(folder: Path) -> dict[str, Counter[str]]:
    """Count the first looks of models that another model's session answers, by tool."""
    counts: dict[str, Counter[str]] = {}
    for task in sorted({path.name for path in folder.glob("*/*") if path.is_dir()}):
        sessions = {}
        for path in sorted(folder.glob(f"*/{task}")):
            try:
                sessions[path.parent.name] = list(ClaudeCodeIngester().ingest(path))
            except IngestError:
                continue
        for one, other in permutations(sessions.values(), 2):
            for state, following in pairwise(one):
                look = action_of(state)
                if purpose_of(look) is None:
                    break
                found = counts.setdefault(kind_of(look), Counter())
                told = shown_in(other, look) if purpose_of(look) == "looks" else []
                found.update(n=1, answered=told is not None)
                if told:
                    pairs = zip(told, results_of(state, following), strict=True)
                    same = [is_same_text(*pair, state.get("cwd") or "/") for pair in pairs]
                    found.update(compared=1, other=not all(same))
    return counts


def shown_in(states: list[TraceState], look: Action) -> list[str] | None:
    """Return what a session shows of a look made at its beginning, or None where it makes no such look."""
    for state, following in pairwise(states):
        own = action_of(state)
        if own == look:
            return results_of(state, following)
        if not own.is_valid or any(depend(a, b) for a in own.calls for b in look.calls):
            return None
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sessions", type=Path, nargs="?")
    parser.add_argument("--repository", type=Path)
    parser.add_argument("--models", type=Path)
    options = parser.parse_args()
    found = (
        at_same_tasks(options.models)
        if options.models
        else in_sessions(options.sessions, options.repository)
    )
    total: Counter[str] = sum(found.values(), Counter())
    rows: dict[str, Any] = {**found, "all": total}
    print("| look | made | answered | partly | compared | otherwise |\n|---|---|---|---|---|---|")
    for name, row in sorted(rows.items(), key=lambda each: -each[1]["n"]):
        share = row["answered"] / row["n"]
        figures = (row["n"], f"{share:.0%}", row["partly"], row["compared"], row["other"])
        print("|", name, "|", " | ".join(map(str, figures)), "|")


if __name__ == "__main__":
    main()

"""OpenCode's snapshots behind the sessions of a real OpenCode, made again by the commands of git that it runs."""

import hashlib
import json
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.commands import checks_of, shares
from replay_pipeline.ingesters import Traces, ingest
from replay_pipeline.ingesters.agents.opencode_database import export_sessions
from replay_pipeline.processes import child_environment
from replay_pipeline.settings import Settings
from replay_pipeline.stages.trials import try_actions
from replay_pipeline.stages.workspaces import Workspaces
from replay_pipeline.types import TeacherAction
from replay_pipeline.workspaces.verdicts import Judge
from tests.replay_pipeline.ingesters.test_opencode_database import TABLES, recorded

ROOT = "/home/kim/tide"
BEFORE = "def f():\n    return 1\n\n\nprint(f())\n"
AFTER = BEFORE.replace("return 1", "return 2")


def put_database(data: Path, *, swapped: dict[str, str] | None = None) -> Path:
    """Write the recorded database, with other ids of trees if these are given."""
    data.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(data / "opencode.db", isolation_level=None)) as rows:
        for name, made, found in recorded()["tables"]:
            if name in TABLES:
                rows.execute(made)
                for row in found:
                    cells = [_swapped(cell, swapped or {}) for cell in row]
                    rows.execute(f"INSERT INTO {name} VALUES ({', '.join('?' * len(row))})", cells)
    return data


def _swapped(cell, names):
    for old, new in names.items():
        cell = cell.replace(old, new) if isinstance(cell, str) else cell
    return cell


def put_snapshots(data: Path, aside: Path, texts=(BEFORE, AFTER)) -> list[str]:
    """Make the git folder of the project's snapshots; gives the id of each tree."""
    (project,) = next(rows for name, _, rows in recorded()["tables"] if name == "project")
    place = data / "snapshot" / project[0] / hashlib.sha1(ROOT.encode()).hexdigest()
    place.parent.mkdir(parents=True)
    aside.mkdir()

    def git(*arguments: str) -> str:
        command = ["git", "--git-dir", str(place), "--work-tree", str(aside), *arguments]
        environment = child_environment(GIT_CONFIG_GLOBAL="/dev/null", GIT_CONFIG_NOSYSTEM="1")
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        return done.stdout.strip()

    git("init", "-q")
    found = []
    for text in texts:
        (aside / "a.py").write_text(text)
        git("add", "--all", "--sparse", ".")
        found.append(git("write-tree"))
    git("config", "core.worktree", ROOT)
    return found


def rows_of(data: Path, *, is_later_used: bool = False):
    return shares(checks_of(Workspaces(Settings(), sources=[data]), is_later_used=is_later_used))


@pytest.mark.parametrize("is_later_used", [False, True])
def test_every_recorded_call_has_the_answer_that_opencode_gave(tmp_path, is_later_used):
    data = put_database(tmp_path / "opencode")
    put_snapshots(data, tmp_path / "aside")
    tools = rows_of(data, is_later_used=is_later_used)[ROOT]
    counts = {name: (row["n_same"], row["n"]) for name, row in tools.items()}
    # The helper reads what the other session has edited.
    assert counts == {"Read": (2, 2), "failed Read": (1, 1), "Edit": (1, 1)}


def test_what_was_changed_between_steps_is_in_the_next_snapshot(tmp_path):
    """Another hand is at work, and no line of the session says so: a read of the old lines is not reproduced."""
    by_hand = AFTER.replace("print", "pass  # print")
    data = tmp_path / "opencode"
    before, after, changed = put_snapshots(data, tmp_path / "aside", (BEFORE, AFTER, by_hand))
    put_database(data, swapped={after: changed})
    row = rows_of(data)[ROOT]["Read"]
    assert (row["n_same"], row["n"], row["reasons"]) == (1, 2, {"changed_elsewhere": 1})
    edited = next(each["state_id"] for each in states_of(data) if is_of_edit(each))
    shown = Workspaces(Settings(), sources=[data]).show(edited)
    assert (shown["root"], shown["commit"]) == (ROOT, before)


def test_without_its_snapshots_the_helper_s_files_are_not_known(tmp_path):
    data = put_database(tmp_path / "opencode")
    assert rows_of(data)["outside"]["Read"]["n_same"] == 0


def states_of(data: Path):
    found = ingest(data, redact=False)
    return list(Traces(sessions=found.sessions, turns=found.turns, states=found.states, tools=found.tools).materialize())  # fmt: skip


def is_of_edit(state) -> bool:
    calls = state["student_action"].get("tool_calls") or ()
    return any(call["function"]["name"] == "edit" for call in calls)


def test_answers_are_tried_on_a_copy_of_the_snapshot(tmp_path, monkeypatch):
    """As a batch has it: the session is a copy in the data root, the snapshots lie where OpenCode keeps its data."""
    data = put_database(tmp_path / "share" / "opencode")
    put_snapshots(data, tmp_path / "aside")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    (tmp_path / "copies").mkdir()
    files = export_sessions(data / "opencode.db", tmp_path / "copies")
    states = states_of(data)
    (state,) = filter(is_of_edit, states)

    def answer(name, old):
        arguments = {"filePath": f"{ROOT}/a.py", "oldString": old, "newString": "return 2"}
        function = {"name": "edit", "arguments": json.dumps(arguments)}
        call = {"id": "c", "type": "function", "function": function}
        action = {"role": "assistant", "content": "", "tool_calls": [call]}
        return TeacherAction(
            state_id=state["state_id"], teacher=name, model=f"{name}/x", family=name, action=action
        )

    answers = [answer("qwen", "return 1"), answer("glm", "return 11")]
    found = try_actions(Workspaces(Settings(), sources=files), Judge("files"), states, answers)
    trials = found.trials[state["state_id"]]
    assert sorted((trial.works, trial.error_kind) for trial in trials.values()) == [
        (False, "string_not_found"),
        (True, None),
    ]

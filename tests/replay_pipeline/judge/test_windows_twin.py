"""A session recorded on Windows has the states, votes, and pairs of its twin on another system."""

import contextlib
import itertools
import json
import re
from pathlib import Path

from replay_pipeline.ingesters import ingest, open_traces, write_traces
from replay_pipeline.judge.extract import extract_pairs
from replay_pipeline.testing.sample import ANSWERS_FILE
from replay_pipeline.types import TeacherAction
from tests.roots import PROJECT

POSIX, DRIVE = "/home/mira/code/tideline", "C:\\Users\\mira\\code\\tideline"
HERE = re.compile(rf"{POSIX}((?:/[\w.@+-]+)*)")
THERE = re.compile(
    r"(?:[Cc]:|/c)[\\/]+Users[\\/]+mira[\\/]+code[\\/]+tideline((?:[\\/]+[\w.@+-]+)*)"
)


class Mover:
    """Moves paths to a drive: Git Bash's spelling in commands, else one of Windows' two by turns."""

    def __init__(self):
        self.turn = itertools.count()

    def text(self, text, key):
        def moved(found):
            if key == "command":
                return "/c/Users/mira/code/tideline" + found[1]
            path = DRIVE + found[1].replace("/", "\\")
            return path if key == "cwd" or next(self.turn) % 2 else path.replace("\\", "/")

        return HERE.sub(moved, text)

    def all(self, value, key=None):
        if isinstance(value, list):
            return [self.all(each, key) for each in value]
        if isinstance(value, dict):
            return {name: self.all(each, name) for name, each in value.items()}
        return self.text(value, key) if isinstance(value, str) else value


def home(text):
    return THERE.sub(lambda found: POSIX + re.sub(r"[\\/]+", "/", found[1]), text)


def states_of(logs, folder):
    write_traces(ingest([logs], redact=False), folder)
    return list(open_traces(folder).materialize())


def answers(move=None):
    for line in ANSWERS_FILE.read_text("utf-8").splitlines():
        row = json.loads(line.replace("/home/user/", "/home/mira/"))
        for call in (row["message"].get("tool_calls") or ()) if move else ():
            with contextlib.suppress(ValueError):  # some are broken on purpose
                arguments = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(move.all(arguments))
        name = row["model"].partition("/")[0]
        yield TeacherAction(
            state_id=row["state_id"], teacher=name, model=row["model"], family=name, action=row["message"]
        )  # fmt: skip


def told(states, rows):
    known = {state["state_id"] for state in states}
    report = extract_pairs(states, [row for row in rows if row.state_id in known], min_p_better=0.0)
    sides = [
        (
            pair["state_id"],
            home(pair["chosen"]),
            home(pair["rejected"]),
            pair.get("agreement_level"),
        )
        for pair in report.pairs
    ]
    positives = [(row["state_id"], home(row["action"])) for row in report.positives]
    return sorted(sides), sorted(positives), {o["state_id"]: o["outcome"] for o in report.outcomes}


def test_a_session_on_a_drive_makes_the_rows_of_its_twin(tmp_path: Path):
    move, logs = Mover(), tmp_path / "logs"
    for path in PROJECT.rglob("*.jsonl"):
        copy = logs / path.relative_to(PROJECT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        rows = map(json.loads, path.read_text("utf-8").splitlines())
        copy.write_text("".join(json.dumps(move.all(row)) + "\n" for row in rows), "utf-8")
    here, there = states_of(PROJECT, tmp_path / "here"), states_of(logs, tmp_path / "there")
    assert {state["cwd"] for state in there} == {DRIVE}
    assert [state["state_id"] for state in here] == [state["state_id"] for state in there]
    ours = told(here, answers())
    assert len(ours[0]) > 30
    assert told(there, answers(move)) == ours

"""Small repositories with six files, a request about one of them, and a run that tells what was right.

A session shows a status beside each of six paths. The request is about a status: one or two paths have it,
as many have the opposite one, the others have statuses that nobody asks about. So at least five of six
actions on a file with the right verb are wrong, and so are all with another verb. What is right is found
by running an action in a throw-away folder, never by comparing words.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from replay_pipeline import ClaudeCodeIngester

DRAWN = "DOLLAR_TASKS"
"""The environment variable that tells the trainer which repositories were drawn, for `executed`."""
_DATA = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text("utf-8"))
N_FILES = 6
SYSTEM = "You are a coding agent. Answer with one tool call."
TOOLS = [
    {
        "name": name,
        "description": about,
        "input_schema": {
            "type": "object",
            "properties": {argument: {"type": "string", "description": what}},
            "required": [argument],
        },
    }
    for name, about, argument, what in (
        ("Read", "Read a file.", "file_path", "Path relative to the working directory."),
        ("Bash", "Run a command.", "command", "The command."),
    )
]
Split = Literal["form", "train", "new_repositories", "new_families"]
CONTENTS = {
    "read": ("This is what was asked for.\n", "This is something else.\n"),
    "remove": ("This has to go.\n", "This is needed.\n"),
    "run": ('print("done")\n', 'raise SystemExit("nothing to do here")\n'),
}
"""Of a file that the request is about, and of any other."""


@dataclass(frozen=True)
class Family:
    """What a session shows of six names, and what is asked of one of them."""

    name: str
    shown: str
    path: str
    verb: Literal["read", "run", "remove"]
    wanted: str
    opposite: str
    request: str

    def message(self, name: str, verb: str | None = None) -> dict[str, Any]:
        """Return the action on a file, as an assistant's message."""
        verb, path = verb or self.verb, self.path.format(x=name)
        if verb == "read":
            function = {"name": "Read", "arguments": {"file_path": path}}
        else:
            command = f"python {path}" if verb == "run" else f"rm {path}"
            function = {"name": "Bash", "arguments": {"command": command}}
        call = {"id": "call_1", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


@dataclass(frozen=True)
class Repository:
    """Six names under one family; `statuses` in the order in which the session shows them."""

    id: str
    family: Family
    names: tuple[str, ...]
    statuses: tuple[str, ...]
    split: Split

    @property
    def right(self) -> tuple[str, ...]:
        """The names that the request is about."""
        return self._with(self.family.wanted)

    @property
    def text(self) -> str:
        """What the user says."""
        path = self.family.path
        lines = [f"{s}: {path.format(x=n)}" for n, s in zip(self.names, self.statuses, strict=True)]
        return "\n".join([self.family.shown, *lines, self.family.request])

    @property
    def prompt(self) -> list[dict[str, str]]:
        """What a model is shown."""
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.text}]

    @property
    def plausible(self) -> list[dict[str, Any]]:
        """Return the actions that somebody might take here: eighteen, most of them wrong."""
        return [self.family.message(n, v) for n in self.names for v in ("read", "run", "remove")]

    def right_action(self, draw: random.Random) -> dict[str, Any]:
        """Return one of the actions that do what was asked."""
        return self.family.message(draw.choice(self.right))

    def wrong_action(self, draw: random.Random) -> dict[str, Any]:
        """Return an action that does not: half of the time on the opposite status, else on any other."""
        opposite = self._with(self.family.opposite)
        others = [name for name in self.names if name not in self.right]
        return self.family.message(draw.choice(opposite if draw.random() < 0.5 else others))

    def _with(self, status: str) -> tuple[str, ...]:
        return tuple(n for n, s in zip(self.names, self.statuses, strict=True) if s == status)

    def run(self, message: Mapping[str, Any]) -> tuple[str, str]:
        """Run an action in a throw-away folder; no shell, and no path leads out of it.

        `Read FILE`, `cat FILE`, `python FILE` and `rm [-f] FILE` are run as they are.

        Returns:
            What came of it (`right`, `wrong`, `refused`, `no_call`), and what the tool would show.
        """
        calls = message.get("tool_calls") or []
        if len(calls) != 1:
            return "no_call", ""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for place in self.names:
                path = folder / self.family.path.format(x=place)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(CONTENTS[self.family.verb][int(place not in self.right)], "utf-8")
            output = _run(calls[0]["function"], folder)
            if output is None:
                return "refused", "Not possible here."
            return ("right" if self._is_done(folder, output) else "wrong"), output

    def _is_done(self, folder: Path, output: str) -> bool:
        gone = {n for n in self.names if not (folder / self.family.path.format(x=n)).exists()}
        if self.family.verb == "remove":
            return bool(gone) and gone <= set(self.right)
        return not gone and output == (
            CONTENTS["read"][0] if self.family.verb == "read" else "done\n"
        )


def _run(function: Mapping[str, Any], folder: Path) -> str | None:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, Mapping):
        return None
    if function.get("name") == "Read":
        words = ["cat", str(arguments.get("file_path") or "")]
    elif function.get("name") == "Bash":
        words = [word for word in str(arguments.get("command") or "").split() if word != "-f"]
    else:
        return None
    pure = PurePosixPath(words[1] if len(words) == 2 else "/")
    path = folder / pure
    if pure.is_absolute() or ".." in pure.parts or not path.is_file():
        return None
    if words[0] == "cat":
        return path.read_text("utf-8")
    if words[0] == "rm":
        path.unlink()
        return ""
    if words[0] != "python":
        return None
    run = [sys.executable, "-I", "-S", str(path)]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=30)
    return done.stdout if done.returncode == 0 else done.stderr


def _families(kind: str, seed: int) -> list[Family]:
    """Make the families of the subjects: either status, named or described.

    What is trained on describes one status of each subject, so that there are two named ones for each.
    """
    found, draw = [], random.Random(seed)
    for number, subject in enumerate(_DATA[kind]):
        fixed = {key: subject[key] for key in ("shown", "path", "verb")}
        for which, wanted in enumerate(subject["statuses"]):
            opposite, named = (
                subject["statuses"][1 - which],
                draw.choice(_DATA["named"][subject["verb"]]),
            )
            requests = {
                "named": named.replace("STATUS", wanted),
                "described": subject["described"][which],
            }
            for how, request in requests.items():
                if how == "named" or kind == "unseen" or which == number % 2:
                    name = f"{subject['name']}, {how} {wanted}"
                    found.append(
                        Family(name, wanted=wanted, opposite=opposite, request=request, **fixed)
                    )
    return found


def _drawn_families(n: int, draw: random.Random) -> list[Family]:
    """Draw families for the agent to learn from, each with another request, place, and pair of statuses."""
    parts, found = _DATA["drawn"], []
    for number in range(n):
        verb = draw.choice(("read", "run", "remove"))
        wanted, opposite = draw.sample(parts["statuses"], 2)
        path = draw.choice([p for p in parts["paths"] if verb != "run" or p.endswith(".py")])
        request = draw.choice(_DATA["named"][verb]).replace("STATUS", wanted)
        shown = draw.choice(parts["shown"])
        found.append(Family(f"drawn {number}", shown, path, verb, wanted, opposite, request))
    return found


def repositories(
    *, n_form: int = 240, n_train: int = 360, n_test: int = 240, seed: int = 0, tasks: int = 0
) -> list[Repository]:
    """Draw the repositories; names of the tested ones occur in none that is trained on.

    Args:
        n_form: of other tasks, on which the agent learns to call tools.
        n_train: to record sessions in.
        n_test: to test on, a third of them of families that nobody trains on.
        seed: of names and statuses.
        tasks: of the words in which requests name a status.
    """
    kinds: tuple[tuple[Split, str, int, str], ...] = (
        ("form", "form", n_form, "trained"),
        ("train", "trained", n_train, "trained"),
        ("new_repositories", "trained", n_test - n_test // 3, "tested"),
        ("new_families", "unseen", n_test // 3, "tested"),
    )
    found, draw = [], random.Random(seed)
    for split, kind, n, names in kinds:
        families = _families(kind, tasks)
        families += _drawn_families(n - len(families), draw) if split == "form" else []
        draw.shuffle(families)
        found += [_drawn(families[i % len(families)], split, i, names, draw) for i in range(n)]
    return found


def _drawn(
    family: Family, split: Split, number: int, names: str, draw: random.Random
) -> Repository:
    n_right, n_opposite = draw.choice((1, 2)), draw.choice((1, 2))
    rest = [draw.choice(_DATA["distractors"]) for _ in range(N_FILES - n_right - n_opposite)]
    statuses = [family.wanted] * n_right + [family.opposite] * n_opposite + rest
    draw.shuffle(statuses)
    drawn = tuple(draw.sample(_DATA["names"][names], N_FILES))
    return Repository(f"{split}-{number:03}", family, drawn, tuple(statuses), split)


def write_sessions(
    folder: Path, asked: Sequence[Repository], actions: Sequence[Mapping[str, Any]]
) -> Path:
    """Write what an agent did in each repository, run for real, as Claude Code 2.1.280 logs it."""
    folder.mkdir(parents=True, exist_ok=True)
    for one, action in zip(asked, actions, strict=True):
        lines = "\n".join(json.dumps(row) for row in _session(one, action))
        (folder / f"{one.id}.jsonl").write_text(lines + "\n", "utf-8")
    return folder


def _session(repository: Repository, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    outcome, output = repository.run(message)
    [call] = message.get("tool_calls") or [None]
    content: list[dict[str, Any]] = [{"type": "text", "text": message.get("content") or "..."}]
    if call:
        arguments = call["function"]["arguments"]
        content = [{"type": "tool_use", "id": "toolu_1", "name": call["function"]["name"],
                    "input": json.loads(arguments) if isinstance(arguments, str) else arguments}]  # fmt: skip
    snapshot = {"type": "prompt_snapshot", "systemPrompt": [SYSTEM],
                "tools": [{"name": tool["name"], "schema": tool} for tool in TOOLS]}  # fmt: skip
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": output,
              "is_error": outcome == "refused"}  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"type": "user", "message": {"role": "user", "content": repository.text}},
        {"type": "attachment", "attachment": snapshot},
        {"type": "assistant", "message": {"id": f"msg_{repository.id}", "role": "assistant",
         "model": "agent/smollm2-135m", "content": content}},
        *([{"type": "user", "message": {"role": "user", "content": [result]}}] if call else []),
    ]  # fmt: skip
    common = {"sessionId": repository.id, "version": "2.1.280", "cwd": f"/work/{repository.id}",
              "timestamp": "2026-11-01T10:00:00.000Z"}  # fmt: skip
    for i, row in enumerate(rows):
        parent = f"{repository.id}-{i - 1}" if i else None
        row |= common | {"uuid": f"{repository.id}-{i}", "parentUuid": parent}
    return rows


def scripted_answers(
    sessions: Path, asked: Sequence[Repository], models: Sequence[str], regime: Mapping[str, Any],
    *, agent: float, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Draw what scripted teachers do, by state and model.

    A teacher is ahead of the agent, which is right at a rate of `agent`, by what the regime says. At a share
    of states all are right or wrong together, and wrong in the same way. `habits` draws for a family of
    requests what else is drawn for each state: a teacher that gets one of its requests wrong gets all of
    them wrong, in the same way. `labels` draws one of the six files by a coin, or what is right in another
    repository.
    """
    by_id, found = {one.id: one for one in asked}, {}
    for state in ClaudeCodeIngester().ingest(sessions):
        one = by_id[state["session_id"]]
        place = one.family.name if regime.get("habits") else one.id
        draw = random.Random(f"{seed} {place}")
        shared, wrong = draw.random(), one.wrong_action(draw)
        is_shared = draw.random() < regime.get("shared", 0)
        said = found[state["state_id"]] = {}
        for number, model in enumerate(models):
            own = random.Random(f"{seed} {place} {number}")
            if regime.get("labels") == "coin":
                action = one.family.message(own.choice(one.names))
            elif regime.get("labels") == "foreign":
                action = asked[asked.index(one) - 1].right_action(random.Random(0))
            elif (shared if is_shared else own.random()) < agent + regime["ahead"]:
                action = one.right_action(own)
            else:
                action = wrong if is_shared else one.wrong_action(own)
            said[model] = action
    return found


@cache
def _drawn_before() -> dict[str, Repository]:
    return {one.id: one for one in repositories(**json.loads(os.environ[DRAWN]))}  # noqa: TID251


def executed(message: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """Reward an action for channel 1 by what comes of running it, whatever any teacher said.

    Returns:
        1 for an action that does what was asked, .1 for a call that can be run, else 0.
    """
    did, _ = _drawn_before()[row["session_id"]].run(message)
    return {"right": 1.0, "wrong": 0.1}.get(did, 0.0)

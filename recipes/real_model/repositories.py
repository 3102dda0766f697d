"""Small repositories whose right next action is decided by the prompt, as minimal twins.

A repository has two files and one request. Its twin has the same two files with their roles
exchanged: the same two actions are possible, and the preference is turned round. So neither the
actions nor their order can give the better one away; only what the prompt says of each name can.
Names of the repositories that are tested occur in none that is trained on.
"""

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

SYSTEM = """You are a coding agent. Answer with one tool call, such as
<tool_call>
{"name": "Read", "arguments": {"file_path": "README.md"}}
</tool_call>
or with the tool Bash and a command."""
BLANK = "(The session is not shown.)"

Split = Literal["train", "new_repositories", "new_families"]
RUNS = 'print("done")\n'
REFUSES = 'raise SystemExit("nothing to do here")\n'


@dataclass(frozen=True)
class Family:
    """A template: what the session shows of two names, and what is asked."""

    name: str
    shown: str
    """What a command printed before the lines about the names."""
    line: str
    """With `{x}` and `{status}`."""
    wanted: str
    """Status of the name that the request is about."""
    other: str
    request: str
    verb: Literal["read", "run", "remove"]
    path: str
    texts: tuple[str, str] = (RUNS, REFUSES)
    """Content of the file with the wanted status, and of the other."""

    def call(self, name: str) -> dict[str, Any]:
        """Return the action on one of the two names, as a message."""
        path = self.path.format(x=name)
        command = f"python {path}" if self.verb == "run" else f"rm {path}"
        function = (
            {"name": "Read", "arguments": {"file_path": path}}
            if self.verb == "read"
            else {"name": "Bash", "arguments": {"command": command}}
        )
        call = {"id": "call_1", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


BUG = (
    "def total(items):\n    return sum(items) - 1\n",
    "def total(items):\n    return sum(items)\n",
)
OLD = ("2019-03-02\n", "2026-11-01\n")
TRAINED = (
    Family("tests", "$ pytest -q", "tests/test_{x}.py {status}", "FAILED", "PASSED",
           "Open the module that is broken, src/NAME.py.", "read", "src/{x}.py", BUG),
    Family("syntax", "$ python -m compileall src", "src/{x}.py: {status}", "SyntaxError", "ok",
           "Look at the file that does not compile.", "read", "src/{x}.py",
           ("def f(:\n", "def f():\n    pass\n")),
    Family("sums", "$ sha256sum -c SUMS", "data/{x}.csv: {status}", "FAILED", "OK",
           "Fetch the damaged file once more with fetch/NAME.py.", "run", "fetch/{x}.py"),
    Family("jobs", "Jobs of last night:", "{x}: {status}", "crashed", "finished",
           "Start the one that crashed again, jobs/NAME.py.", "run", "jobs/{x}.py"),
    Family("drafts", "$ head -1 notes/*", "notes/{x}.txt: {status}", "draft", "final",
           "Remove the draft.", "remove", "notes/{x}.txt", ("draft\n", "final\n")),
    Family("mirrors", "$ ping mirrors", "mirror {x} is {status}", "up", "down",
           "Load the index from the mirror that answers, mirrors/NAME.py.", "run",
           "mirrors/{x}.py"),
    Family("conflicts", "$ git status", "{status}: src/{x}.py", "both modified", "modified",
           "Open the file with the conflict.", "read", "src/{x}.py",
           ("<<<<<<< HEAD\na = 1\n=======\na = 2\n>>>>>>> main\n", "a = 1\n")),
    Family("reviews", "Review:", "src/{x}.py {status}", "needs changes", "approved",
           "Open the file that the reviewer is not content with.", "read", "src/{x}.py", BUG),
    Family("timings", "$ python bench.py", "bench/{x}.py {status}", "94.1 s", "0.2 s",
           "Open the slow one.", "read", "bench/{x}.py",
           ("for _ in range(10**9):\n    pass\n", "pass\n")),
    Family("backups", "$ ls backup", "backup/{x}.tar {status}", "2019", "2026",
           "Delete the old backup.", "remove", "backup/{x}.tar", OLD),
    Family("migrations", "$ python manage.py list", "{x} {status}", "pending", "applied",
           "Run the migration that is still missing, migrations/NAME.py.", "run",
           "migrations/{x}.py"),
    Family("services", "$ status", "{x} {status}", "stopped", "running",
           "Read the log of the service that is down, logs/NAME.log.", "read", "logs/{x}.log",
           ("exited with status 1\n", "ready\n")),
    Family("licences", "$ licences", "vendor/{x}.py: {status}", "MIT", "proprietary",
           "Read the code that is free to use.", "read", "vendor/{x}.py",
           ("# MIT\n", "# All rights reserved\n")),
    Family("switches", "Switches:", "{x} = {status}", "on", "off",
           "Read the feature that is switched on, features/NAME.py.", "read", "features/{x}.py",
           ("ENABLED = True\n", "ENABLED = False\n")),
)  # fmt: skip
UNSEEN = (
    Family("coverage", "$ coverage report", "src/{x}.py {status}", "12%", "98%",
           "Open the file that is hardly tested.", "read", "src/{x}.py",
           ("def untested():\n    pass\n", "def tested():\n    pass\n")),
    Family("lint", "$ lint src", "src/{x}.py: {status}", "7 errors", "clean",
           "Open the file that the linter complains about.", "read", "src/{x}.py",
           ("import os,sys\n", "import os\n")),
    Family("releases", "Releases:", "{x} is {status}", "failing", "healthy",
           "Take back the release that fails with rollback/NAME.py.", "run", "rollback/{x}.py"),
    Family("caches", "$ check cache", "cache/{x}.bin {status}", "corrupt", "valid",
           "Delete the broken cache.", "remove", "cache/{x}.bin", ("\x00?\n", "ok\n")),
    Family("hosts", "$ connect", "host {x}: {status}", "connected", "refused",
           "Read the settings of the host that can be reached, hosts/NAME.toml.", "read",
           "hosts/{x}.toml", ("reachable = true\n", "reachable = false\n")),
)  # fmt: skip
FAMILIES = {family.name: family for family in (*TRAINED, *UNSEEN)}

TRAINED_NAMES = """
cart order price tax user login mail queue token cookie page menu form table chart graph image
audio video album track song artist city street country region parcel courier invoice ticket
coupon wallet bank loan salary budget client vendor store shelf basket search filter index report
export import backup sensor motor robot camera lamp door window garden flower forest river engine
wheel bridge tunnel station train plane ship harbor market
""".split()  # noqa: SIM905
TESTED_NAMES = """
weather recipe kitchen library museum ladder pencil paper folder letter stamp planet comet rocket
island desert mountain valley village castle tower mirror candle blanket pillow jacket button
pocket bottle butter cheese honey lemon orange carrot pepper tomato potato rabbit monkey tiger
eagle salmon turtle violin guitar piano drum dance theater cinema novel poem lesson school
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Repository:
    """Two names under one family. Its twins differ in which of them is `wanted`, and nothing else."""

    family: Family
    names: tuple[str, str]
    """In the order in which the prompt shows them."""
    split: Split
    number: int

    @property
    def calls(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The two actions, the same for both twins."""
        first, second = self.names
        return self.family.call(first), self.family.call(second)

    def prompt(self, wanted: int) -> list[dict[str, str]]:
        """Return the messages in which the name number `wanted` is the one the request is about."""
        statuses = [self.family.other, self.family.other]
        statuses[wanted] = self.family.wanted
        lines = [
            self.family.line.format(x=name, status=status)
            for name, status in zip(self.names, statuses, strict=True)
        ]
        return conversation("\n".join([self.family.shown, *lines, self.family.request]))

    def write(self, folder: Path, wanted: int) -> None:
        """Write the files of one twin."""
        for place, name in enumerate(self.names):
            path = folder / self.family.path.format(x=name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.family.texts[int(place != wanted)], "utf-8")


def conversation(text: str) -> list[dict[str, str]]:
    """Return a prompt of one user message."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def repositories(
    n_trained: int = 13, n_new: int = 4, n_unseen: int = 13, seed: int = 0
) -> list[Repository]:
    """Draw the repositories; equal arguments give equal ones.

    Args:
        n_trained: to train on, for each trained family.
        n_new: never trained on, for each trained family.
        n_unseen: for each family that is never trained on.
        seed: of the names and their order.
    """
    draw = random.Random(seed)
    found: list[Repository] = []
    counts: tuple[tuple[Split, tuple[Family, ...], int, list[str]], ...] = (
        ("train", TRAINED, n_trained, TRAINED_NAMES),
        ("new_repositories", TRAINED, n_new, TESTED_NAMES),
        ("new_families", UNSEEN, n_unseen, TESTED_NAMES),
    )
    for split, families, n, names in counts:
        for family in families:
            seen: set[frozenset[str]] = set()
            while len(seen) < n:
                first, second = draw.sample(names, 2)
                if frozenset((first, second)) not in seen:
                    seen.add(frozenset((first, second)))
                    found.append(Repository(family, (first, second), split, len(found)))
    return found


def execute(message: Mapping[str, Any], repository: Repository, wanted: int) -> str:
    """Run an action in a throw-away folder with the repository; say what came of it.

    Nothing of a model's reaches a shell, and no path leaves the folder: `python FILE` and `rm FILE`
    are run as they are, everything else is refused.

    Returns:
        `success`, `wrong` (it ran, and did not do what was asked), `refused` or `no_call`.
    """
    calls = message.get("tool_calls") or []
    if len(calls) != 1:
        return "no_call"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        repository.write(folder, wanted)
        output = _run(calls[0]["function"], folder)
        if output is None:
            return "refused"
        return "success" if _is_done(repository, wanted, folder, output) else "wrong"


def _is_done(repository: Repository, wanted: int, folder: Path, output: str) -> bool:
    family = repository.family
    if family.verb == "read":
        return output == family.texts[0]
    if family.verb == "run":
        return output == "done\n"
    paths = [folder / family.path.format(x=name) for name in repository.names]
    return not paths[wanted].exists() and paths[1 - wanted].exists()


def _run(function: Mapping[str, Any], folder: Path) -> str | None:
    """Run one call; `None` when it is none of the three that are understood."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, Mapping):
        return None
    if function.get("name") == "Read":
        path = _inside(arguments.get("file_path"), folder)
        return path.read_text("utf-8") if path and path.is_file() else None
    words = str(arguments.get("command") or "").split()
    path = _inside(words[1], folder) if len(words) == 2 else None
    if function.get("name") != "Bash" or path is None or not path.is_file():
        return None
    if words[0] == "rm":
        path.unlink()
        return ""
    if words[0] != "python":
        return None
    done = subprocess.run(
        [sys.executable, "-I", str(path)], cwd=folder, capture_output=True, text=True, timeout=30
    )
    return done.stdout if done.returncode == 0 else ""


def _inside(path: Any, folder: Path) -> Path | None:
    pure = PurePosixPath(str(path or ""))
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        return None
    return folder / pure

"""How many recorded commands of git and coreutils that only look give the recorded output on the rebuilt tree.

    python benchmarks/commands.py SESSIONS --repository DIR [--sample 100] [--seed 1] [--misses FILE]

A random sample of the commands runs in the sandbox (bubblewrap), each in its turn and without its own answer.
Left out: commands that the client never ran, and those that ask for more than the tree (time, network, home,
other programs). Outputs are compared line by line, without blanks at the ends of lines and mail addresses.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_pipeline.actions.shell import shell_plan
from replay_pipeline.settings import Settings
from replay_pipeline.stages.workspaces import Workspaces
from replay_pipeline.workspaces.history import History
from replay_pipeline.workspaces.logs import LoggedCall
from replay_pipeline.workspaces.places import StatePlace
from replay_pipeline.workspaces.sandbox import CommandLimits, Sandbox

_PROGRAMS = re.compile(
    r"\b(?:git|ls|cat|head|tail|wc|grep|find|sed|sort|uniq|cut|tree|stat|diff|awk|du|file)\b"
)
_MORE = re.compile(
    r"\b(?:gh|gt|jq|rg|curl|ps|lsof|pgrep|date|sleep|env|printenv|whoami|hostname|which|fd|go|gofmt|"
    r"node|docker|df|claude|git ls-remote)\b|~|/tmp|/var/|/private|\$HOME|/Users/[^ ]*/\."
)
_NOT_RUN = re.compile(r"doesn't want to|sibling tool call|permission|hook|aborted|interrupted")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_STATUS = re.compile(r"\A(?:<error>|Error: )?Exit code \d+\n?")


def looks(step: LoggedCall) -> bool:
    """Whether a call is a command that only looks, and was run."""
    command = step.arguments.get("command")
    if step.name != "Bash" or not isinstance(command, str) or _MORE.search(command):
        return False
    if step.is_error and _NOT_RUN.search(step.text[:200].lower()):
        return False
    return bool(_PROGRAMS.search(command)) and shell_plan(command, step.cwd).only_looks


def walk(work: Workspaces) -> Iterator[tuple[History, LoggedCall]]:
    """Every step, with the history right before its answer."""
    for log, history in work.histories():
        for order, step in enumerate(log.steps):
            history.enter(order, step)
            yield history, step
            history.take(step)


def plain(text: str) -> str:
    """An output without what is not compared."""
    text = _EMAIL.sub("", _STATUS.sub("", text))
    return "\n".join(line.rstrip() for line in text.strip().split("\n"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sessions", type=Path)
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--misses", type=Path, help="Where to write both outputs of each miss.")
    options = parser.parse_args()
    work = Workspaces(Settings(), sources=[options.sessions], repositories=[options.repository])
    sandbox = Sandbox(limits=CommandLimits())
    known = sorted({step.call_id for _, step in walk(work) if looks(step)})
    drawn = {*random.Random(options.seed).sample(known, min(options.sample, len(known)))}
    n, misses = 0, list[dict[str, Any]]()
    for history, step in walk(work):
        if step.call_id not in drawn:
            continue
        place, command = StatePlace(history, step), step.arguments["command"]
        if (root := place.root()) is None:
            continue
        n += 1
        box = {"root": root, "files": place.files(), "cwd": place.cwd, "objects": place.objects()}
        ran = sandbox.run(command, **box)
        if plain(ran.output) != plain(step.text):
            misses.append({"command": command, "recorded": step.text, "rebuilt": ran.output})
    print(f"{n - len(misses)} of {n} give the recorded output; {len(known)} such commands in all")
    if options.misses:
        options.misses.write_text(json.dumps(misses, indent=1), "utf-8")


if __name__ == "__main__":
    sys.exit(main())

"""Recorded commands of git and coreutils that only read, repeated on rebuilt trees."""

import re
from collections.abc import Mapping
from typing import Any

from replay_pipeline.actions.shell import shell_plan
from replay_pipeline.workspaces.logs import LoggedCall
from replay_pipeline.workspaces.sandbox import Ran

_PROGRAMS = re.compile(
    r"\b(?:git|ls|cat|head|tail|wc|grep|find|sed|sort|uniq|cut|tree|stat|diff|awk|du|file)\b"
)
# What asks for more than the tree: time, network, home, other programs.
_MORE = re.compile(
    r"\b(?:gh|gt|jq|rg|curl|ps|lsof|pgrep|date|sleep|env|printenv|whoami|hostname|which|fd|go|gofmt|"
    r"node|docker|df|claude|git ls-remote)\b|~|/tmp|/var/|/private|\$HOME|/Users/[^ ]*/\."
)
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_STATUS = re.compile(r"\A(?:<error>|Error: )?Exit code \d+\n?")
_OF_TREE = re.compile(r"\bgit\s+(?:-\S+\s+)*(?:status|diff|stash|ls-files)\b")
_GIT = re.compile(r"\bgit\b")


def only_reads(step: LoggedCall) -> bool:
    """Return whether a call is a command that only reads the tree or its repository."""
    command = step.arguments.get("command")
    if step.name != "Bash" or not isinstance(command, str) or _MORE.search(command):
        return False
    if step.arguments.get("run_in_background"):
        return False
    return bool(_PROGRAMS.search(command)) and shell_plan(command, step.cwd).only_looks


def is_same_output(step: LoggedCall, ran: Ran) -> bool:
    """Return whether a command printed what is recorded.

    Blanks at the ends of lines and mail addresses are not compared.
    """
    return ran.status is not None and _plain(ran.output) == _plain(step.text)


def _plain(text: str) -> str:
    text = _EMAIL.sub("", _STATUS.sub("", text))
    return "\n".join(line.rstrip() for line in text.strip().split("\n"))


def reason_of(arguments: Mapping[str, Any], ran: Ran | None) -> str:
    """Return the kind of reason for which a command printed something else."""
    command = str(arguments.get("command"))
    if ran is None or ran.status is None:
        return "not_run"
    if _OF_TREE.search(command):
        return "git_changes_differ"
    return "git_history_differs" if _GIT.search(command) else "output_differs"

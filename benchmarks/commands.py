"""What recorded calls give on rebuilt trees, where it isn't what they gave then.

    python benchmarks/commands.py SESSIONS --repository DIR [--sample 100] > MISSES.json

Counts the calls that are reproduced, by project and tool, and prints both outputs of each missed command that
only reads, to read them. The commands run in the sandbox: `--sample` of each project at most.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from replay_pipeline.actions.shell import shell_plan
from replay_pipeline.settings import Settings
from replay_pipeline.stages.work.workspaces import Workspaces
from replay_pipeline.workspaces.history import History
from replay_pipeline.workspaces.logs import Log, LoggedCall
from replay_pipeline.workspaces.sandbox import Ran, Sandbox
from replay_pipeline.workspaces.sightings import Part, part_of, path_of, text_after
from replay_pipeline.workspaces.tools import FILE_TOOLS, ToolResult, ToolRun
from replay_pipeline.workspaces.verdicts import StatePlace, run_command
from replay_pipeline.workspaces.working_trees import text_of

_NOT_RUN = re.compile(
    r"doesn't want to|sibling tool call|posix_spawn|permission|inputvalidationerror|hook|aborted|"
    r"interrupted"
)
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_CUT = re.compile(r"Output too large|<persisted-output>|Results are truncated|Showing results")
_NOTE = re.compile(
    r"^(?:--|\.\.\.|</?persisted-output>|Output too large.*|Preview \(.*|\[Showing results.*|\(Results are truncated.*|Found \d+ .*|No .* found)?$"
)


class RerunCall(msgspec.Struct):
    """One recorded call that was run on the tree, which was rebuilt without the call's answer."""

    step: LoggedCall
    answer: ToolResult
    project: str | None
    """The working tree that it concerns; None outside of the repository."""
    is_same: bool
    """Whether the answer is the recorded one; for a change, whether it could be made."""
    is_exact: bool
    """For a change, whether the whole file is then the recorded one; else as `is_same`."""
    reason: str = ""
    """Why it is not the same; see `docs/workspaces.md`."""


def checks_of(
    work: Workspaces,
    *,
    is_later_used: bool = True,
    sandbox: Sandbox | None = None,
    max_commands: int = 500,
) -> Iterator[RerunCall]:
    """Run every recorded call of a file tool, and commands that only read, on the tree before it.

    Args:
        work: the logs and repositories.
        is_later_used: whether what a log shows after a moment tells of that moment too. No call's
            own answer is used in either case.
        sandbox: runs the commands. Without one, none is run.
        max_commands: how many commands of each project run at most.
    """
    for log, history in work.histories(is_later_used=is_later_used):
        yield from checks(history, log, sandbox=sandbox, max_commands=max_commands)


def checks(
    history: History, log: Log, *, sandbox: Sandbox | None = None, max_commands: int = 0
) -> Iterator[RerunCall]:
    """Run recorded calls on the tree as known before their answers.

    Calls that the client never ran (refused, canceled, malformed) are left out.

    Args:
        history: before the first step.
        log: its calls of file tools are all run.
        sandbox: runs commands that only read, if there is one.
        max_commands: how many of them at most; then a sample of the log.
    """
    drawn = _sample(log, max_commands) if sandbox is not None else frozenset[str]()
    n_at_once = os.cpu_count() or 1
    running: deque[Future[RerunCall]] = deque()
    with ThreadPoolExecutor(n_at_once) as pool:
        for order, step in enumerate(log.steps):
            history.enter(order, step)
            if step.name in FILE_TOOLS and was_run(step):
                yield _check(history, step)
            elif sandbox is not None and step.call_id in drawn:
                if len(running) >= n_at_once:
                    yield running.popleft().result()
                place = StatePlace(history, step)
                place.files()  # of this moment; the command runs while the history goes on
                running.append(pool.submit(_check_command, sandbox, place, step))
            history.take(step)
        yield from (each.result() for each in running)


def was_run(step: LoggedCall) -> bool:
    """Return whether the client ran a call. Others were refused, canceled, or malformed."""
    return not (step.is_error and _NOT_RUN.search(step.text[:200].lower()))


def _sample(log: Log, n: int) -> frozenset[str]:
    """Return the ids of at most `n` commands that only read, the same ones each time."""
    ids = [step.call_id for step in log.steps if was_run(step) and only_reads(step)]
    return frozenset(sorted(ids, key=lambda each: hashlib.blake2b(each.encode()).digest())[:n])


def _check_command(sandbox: Sandbox, place: StatePlace, step: LoggedCall) -> RerunCall:
    ran = run_command(sandbox, place, step.arguments["command"])
    is_same = ran is not None and is_same_output(step, ran)
    reason = "" if is_same else reason_of(step.arguments, ran) if place.root() else "outside"
    answer = ToolResult(ran.output if ran is not None else "")
    return RerunCall(step, answer, place.root(), is_same, is_same, reason)


def _check(history: History, step: LoggedCall) -> RerunCall:
    cwd = step.cwd or "/"
    path = path_of(step) or cwd
    tree = history.tree_of(path)
    # What was read before is lost when a session is resumed: only refusals are held to it.
    read = history.read.get((step.session, step.agent), {}) if step.is_error else None
    run = ToolRun(history, cwd=cwd, read=read)
    answer = run.call(step.name, step.arguments)
    is_exact = is_same = False
    if step.is_error:
        is_exact = is_same = answer.is_known and answer.error_kind is not None
    elif answer.error_kind is None:
        is_same, is_exact = _compared(step, answer, run)
    reason = "" if is_same and is_exact else _reason(history, step, answer, path)
    project = tree.root if tree is not None else None
    return RerunCall(step, answer, project, is_same, is_exact, reason)


def _compared(step: LoggedCall, answer: ToolResult, run: ToolRun) -> tuple[bool, bool]:
    """Return whether an answer is the recorded one, and whether the file is too."""
    if step.name in {"Grep", "Glob"}:
        is_same = _is_same_search(step, answer, run)
        return is_same, is_same
    if step.name == "Read":
        part, path = part_of(step), path_of(step)
        file = run.view.file(path) if path else None
        is_same = part is None or (file is not None and file.text is not None and part.fits(file.text))  # fmt: skip
        return is_same, is_same
    text, path = text_after(step), path_of(step)
    file = run.view.file(path) if path else None
    return True, text is None or (file is not None and file.text == text)


def _is_same_search(step: LoggedCall, answer: ToolResult, run: ToolRun) -> bool:
    cwd = (step.cwd or "/").rstrip("/") + "/"
    recorded = _lines(step.text.replace(cwd, "").split("\n"))
    found = _lines(answer.found)
    if step.arguments.get("output_mode") == "content" and "-n" not in step.arguments:
        # Whether lines are numbered unless asked is another thing from version to version.
        other = run.call(step.name, {**step.arguments, "-n": False})
        found |= _lines(other.found)
        return recorded <= found and bool(recorded) == bool(found)
    details = step.details or {}
    is_cut = bool(
        step.arguments.get("head_limit")
        or details.get("truncated")
        or details.get("appliedLimit")
        or _CUT.search(step.text)
    )
    return recorded <= found and (is_cut or found <= recorded)


def _lines(lines: Iterable[str]) -> set[str]:
    """Return lines of an answer without notes; the client writes `//` in lines of a context as `/`."""
    return {line.replace("//", "/").rstrip() for line in lines if not _NOTE.match(line.rstrip())}


def _reason(history: History, step: LoggedCall, answer: ToolResult, path: str) -> str:
    """Return the kind of reason for which a record is not reproduced."""
    file = history.file(path)
    if not answer.is_known:
        return "not_known" if history.tree_of(path) else "outside"
    if step.is_error:
        return "worked"
    if step.name in {"Grep", "Glob"}:
        if answer.error_kind is None and _EMAIL.search(step.text):
            plain = [_EMAIL.sub("", each) for each in (step.text, "\n".join(answer.found))]
            shown = plain[0].replace((step.cwd or "/").rstrip("/") + "/", "")
            if _lines(shown.split("\n")) == _lines(plain[1].split("\n")):
                return "altered_record"
        return "search_differs" if answer.error_kind is None else answer.error_kind
    part = _shown(step)
    if file is None or part is None:
        return answer.error_kind or "changed_elsewhere"
    if file.text is None:
        return "not_in_git" if not _is_in_history(history, path, None) else "other_commit"
    if _anonymous(part).fits(_EMAIL.sub("", file.text)):
        return "altered_record"
    return "other_commit" if _is_in_history(history, path, part) else "changed_elsewhere"


def _shown(step: LoggedCall) -> Part | None:
    """Return what the step's own record shows of the file before it."""
    if step.name == "Read":
        return part_of(step)
    original = (step.details or {}).get("originalFile")
    if not isinstance(original, str):
        return None
    return Part.whole(original)


def _anonymous(part: Part) -> Part:
    return Part(part.first, tuple(_EMAIL.sub("", line) for line in part.lines), part.is_whole)


def _is_in_history(history: History, path: str, part: Part | None) -> bool:
    """Return whether one of the commits that come into question has what was there."""
    tree = history.tree_of(path)
    if tree is None:
        return False
    for commit in history.commits(tree):
        blob = tree.repository.blob_id(commit.tree, tree.relative(path))
        if blob is not None and (
            part is None or part.fits(text_of(tree.repository.blob(blob)) or "")
        ):
            return True
    return False


def shares(found: Iterable[RerunCall]) -> dict[str, dict[str, dict[str, Any]]]:
    """Count the reproduced calls by working tree (`outside` for none) and tool.

    Each tool has `n`, `n_same`, and `n_exact`. Failed calls of file tools are counted separately,
    for example as `failed Edit`. `reasons` counts calls that are not reproduced.
    """
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    for each in found:
        is_failed = each.step.is_error and each.step.name in FILE_TOOLS
        tool = f"failed {each.step.name}" if is_failed else each.step.name
        for project in ("all" if each.project else "outside", each.project):
            if project is None:
                continue
            row = tables.setdefault(project, {}).setdefault(
                tool, {"n": 0, "n_same": 0, "n_exact": 0, "reasons": Counter()}
            )
            row["n"] += 1
            row["n_same"] += each.is_same
            row["n_exact"] += each.is_exact
            if not each.is_same:
                row["reasons"][each.reason] += 1
    return tables


_PROGRAMS = re.compile(
    r"\b(?:git|ls|cat|head|tail|wc|grep|find|sed|sort|uniq|cut|tree|stat|diff|awk|du|file)\b"
)
# What asks for more than the tree: time, network, home, other programs.
_MORE = re.compile(
    r"\b(?:gh|gt|jq|rg|curl|ps|lsof|pgrep|date|sleep|env|printenv|whoami|hostname|which|fd|go|gofmt|"
    r"node|docker|df|claude|git ls-remote)\b|~|/tmp|/var/|/private|\$HOME|/Users/[^ ]*/\."
)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sessions", type=Path)
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--sample", type=int, default=100)
    options = parser.parse_args()
    work = Workspaces(Settings(), sources=[options.sessions], repositories=[options.repository])
    found = list(checks_of(work, sandbox=Sandbox(), max_commands=options.sample))
    misses = [
        {
            "command": each.step.arguments["command"],
            "reason": each.reason,
            "recorded": each.step.text,
            "rebuilt": each.answer.text,
        }
        for each in found
        if each.step.name == "Bash" and not each.is_same
    ]
    json.dump({"projects": shares(found), "misses": misses}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()

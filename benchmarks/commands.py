"""What recorded calls give on rebuilt trees, and what looks would be answered with.

    python benchmarks/commands.py SESSIONS --repository DIR > FOUND.json

Counts the calls of file tools that are reproduced, by project and tool. Of recorded looks it counts those at files and
commits alone, those that have an answer, and the answers with other lines than the recorded ones, which it prints.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from replay_pipeline.actions import canonical_action
from replay_pipeline.actions.keys import purpose_of
from replay_pipeline.settings import Settings
from replay_pipeline.stages.work.workspaces import Workspaces
from replay_pipeline.types import LookAnswer
from replay_pipeline.workspaces.history import History
from replay_pipeline.workspaces.logs import LoggedCall
from replay_pipeline.workspaces.looks import LookPlace, look_at
from replay_pipeline.workspaces.sandbox import Sandbox
from replay_pipeline.workspaces.shows import shown_by
from replay_pipeline.workspaces.sightings import Part, part_of, path_of, text_after
from replay_pipeline.workspaces.tools import FILE_TOOLS, ToolResult, ToolRun
from replay_pipeline.workspaces.working_trees import text_of

_NOT_RUN = re.compile(
    r"doesn't want to|sibling tool call|posix_spawn|permission|inputvalidationerror|hook|aborted|"
    r"interrupted"
)
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_LIMITED = re.compile(r"\n\n\[Showing results with pagination = .*\]\Z")
_SHORT_ID = re.compile(r"\b(?=\w*\d)[0-9a-f]{7,12}\b")
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


def checks_of(work: Workspaces, *, is_later_used: bool = True) -> Iterator[RerunCall]:
    """Run every recorded call of a file tool on the tree before it.

    Calls that the client never ran (refused, canceled, malformed) are left out.

    Args:
        work: the logs and repositories.
        is_later_used: whether what a log shows after a moment tells of that moment too. No call's
            own answer is used in either case.
    """
    for log, history in work.histories(is_later_used=is_later_used):
        for order, step in enumerate(log.steps):
            history.enter(order, step)
            if step.name in FILE_TOOLS and was_run(step):
                yield _check(history, step)
            history.take(step)


def looks_of(work: Workspaces, sandbox: Sandbox) -> Iterator[tuple[LoggedCall, LookAnswer | None]]:
    """Yield each recorded look, and what it shows of the files before it; its own answer isn't used."""
    for log, history in work.histories():
        for order, step in enumerate(log.steps):
            history.enter(order, step)
            call = {"function": {"name": step.name, "arguments": step.arguments}}
            look = canonical_action({"tool_calls": [call]}, cwd=step.cwd)
            if purpose_of(look) == "looks" and was_run(step):
                others = [each for each in log.steps if each is not step]
                place = LookPlace(history, order, step, others)
                yield step, look_at(place, step.name, step.arguments, sandbox)
            history.take(step)


def is_same_text(told: str, recorded: str, cwd: str) -> bool:
    """Return whether an answer has the recorded lines.

    Their order isn't compared, which is that of the files' last changes, nor are mail addresses and names, which
    the record of a public session replaces, the length of shortened ids, and the client's note of a limit.
    """
    lines, recorded_lines = (_plain(text, cwd) for text in (told, recorded))
    left = Counter(recorded_lines) - Counter(lines)
    return len(lines) == len(recorded_lines) and all("REDACTED" in line for line in left)


def _plain(text: str, cwd: str) -> list[str]:
    text = _LIMITED.sub("", _EMAIL.sub("", text)).replace(cwd.rstrip("/") + "/", "")
    return [_SHORT_ID.sub("", line).rstrip() for line in text.strip().split("\n")]


def was_run(step: LoggedCall) -> bool:
    """Return whether the client ran a call. Others were refused, canceled, or malformed."""
    return not (step.is_error and _NOT_RUN.search(step.text[:200].lower()))


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
    found = _lines(each.replace(cwd, "") for each in answer.found)
    if step.arguments.get("output_mode") == "content" and "-n" not in step.arguments:
        # Whether lines are numbered unless asked is another thing from version to version.
        other = run.call(step.name, {**step.arguments, "-n": False})
        found |= _lines(each.replace(cwd, "") for each in other.found)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sessions", type=Path)
    parser.add_argument("--repository", type=Path, required=True)
    options = parser.parse_args()
    work = Workspaces(Settings(), sources=[options.sessions], repositories=[options.repository])
    looks: dict[str, Counter[str]] = {}
    wrong = []
    for step, answer in looks_of(work, Sandbox()):
        counts = looks.setdefault(step.name, Counter())
        is_possible = step.name in FILE_TOOLS
        if step.name == "Bash":
            is_possible = shown_by(step.arguments["command"], step.cwd or "/") is not None
        counts.update(n=1, of_files=is_possible, answered=answer is not None)
        if answer is not None and not is_same_text(answer.text, step.text, step.cwd):
            counts["other"] += 1
            told, recorded = answer.text, step.text
            wrong.append({"arguments": step.arguments, "told": told, "recorded": recorded})
    found = {"projects": shares(checks_of(work)), "looks": looks, "wrong": wrong}
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()

"""Say what a look shows of the files as they were, where that is surely known.

Nobody may be told what was not there. So a look is answered at each commit that may have been checked out then, and
with and without the files that a command may have changed since. It has an answer if all of these are the same.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from replay_pipeline.actions.paths import absolute
from replay_pipeline.types import LookAnswer
from replay_pipeline.workspaces.git import GitCommit
from replay_pipeline.workspaces.history import History
from replay_pipeline.workspaces.logs import LoggedCall
from replay_pipeline.workspaces.sandbox import Sandbox, git_files
from replay_pipeline.workspaces.shows import Shown, shown_by
from replay_pipeline.workspaces.tools import MAX_READ_LINES, ToolRun
from replay_pipeline.workspaces.tree import Tree, TreeFile, is_below
from replay_pipeline.workspaces.working_trees import WorkingTree, text_of

LOOKS_AT_FILES = frozenset({"Read", "Grep", "Glob"})
REFUSED = "<tool_use_error>"
"""How a client marks what a tool refused; what a person refused has no such mark."""
_NO_TEXT = re.compile(r"\.(?:ipynb|pdf|png|jpe?g|gif|webp|bmp|ico|svg)$", re.IGNORECASE)
"""Files that a client shows in another way than by their lines."""
_WITH_TAB = re.compile(r"\s*\d+\t")
_REPLACED = "REDACTED"
"""Where an export replaced parts of names, one name may stand for several files."""
_ARROW = re.compile(r"^( *\d+)→", re.MULTILINE)
_MOST_CHARS = {"Grep": 20_000, "Bash": 30_000}
_MOST_CHARS_READ = 60_000
_MOST_FOUND = {"Grep": 250, "Glob": 100}
"""Longer answers would be cut by the client, nobody knows where."""
_MOST_POSSIBLE = 48
"""Of so many commits at most it is tried out whether they show the same."""
_NOTHING = ("", "(Bash completed with no output)")
"""What clients show of a command that prints nothing, older and newer ones."""


class LookPlace(NamedTuple):
    """The moment before a decision: the files then, and the log around it."""

    history: History
    order: int
    """Index of the first step of the log that comes after it."""
    step: LoggedCall
    """A step of the same session next to it."""
    steps: Sequence[LoggedCall]


def look_at(
    at: LookPlace, name: str, arguments: Mapping[str, Any], sandbox: Sandbox | None
) -> LookAnswer | None:
    """Return what a call of a tool would have shown, or None where that isn't surely known.

    Args:
        at: where it looks.
        name: the tool.
        arguments: those of the call, with the real names of folders.
        sandbox: runs commands that only show files and commits; without one they have no answer.
    """
    if name in LOOKS_AT_FILES:
        if _REPLACED in str(arguments):
            return None
        answer = partial(_shown, at, name, arguments)
        place = arguments.get("file_path") or arguments.get("path")
        named = [absolute(place, at.step.cwd or "/")] if isinstance(place, str) else []
        found = _agreed(at.history, answer, named, is_by_file=name != "Read")
    else:
        is_command = name == "Bash" and sandbox is not None
        found = _of_command(at, arguments["command"], sandbox) if is_command else None
    if found is None or len(found.text) > _MOST_CHARS.get(name, _MOST_CHARS_READ):
        return None
    return found


class _AsAt:
    """The files in one of the ways in which they may have been.

    The first is the likeliest, file by file. In each other one, a working tree stands at another one of the commits
    that are about as likely, and a file that may have changed is as it was known, or else empty.

    Args:
        history: before the look.
        nth: which of these ways.
    """

    def __init__(self, history: History, nth: int) -> None:
        self._history = history
        self._nth = nth
        self.n_possible = 1
        """How many ways there are that differ in what was asked for."""
        self.unsure = set[str]()
        self.folders = set[str]()

    def _commit(self, tree: WorkingTree) -> GitCommit | None:
        self._history.commits(tree)
        likely = tree.likely()
        self.n_possible = max(self.n_possible, len(likely) + 1)
        return likely[min(max(0, self._nth - 1), len(likely) - 1)] if likely else None

    def file(self, path: str) -> TreeFile | None:
        """Return a file, or None outside of what is known."""
        file = self._history.file(path)
        if file is None or file.is_sure:
            return file
        self.unsure.add(path)
        tree = self._history.tree_of(path)
        if tree is None or file.source != "git" or (commit := self._commit(tree)) is None:
            before = self._history.known.get(path)
            known = before.text if before is not None else None
            is_alike = _but_for_the_last_line(self._history, path, file) is not None
            others = [*filter(None, [known]), *([] if is_alike else [""])]
            self.n_possible = max(self.n_possible, 1 + len(others))
            if self._nth == 0:
                return file
            return TreeFile(others[min(self._nth, len(others)) - 1], file.source)
        if self._nth == 0:
            return file  # by what was seen of it, it may be as none of the likely commits has it
        blob = tree.repository.blob_id(commit.tree, tree.relative(path))
        text = text_of(tree.repository.blob(blob)) if blob else None
        return TreeFile(text, "git", is_sure=text is not None)  # it may be there without a commit

    def below(self, folder: str) -> list[str] | None:
        """Return the files below a folder."""
        self.folders.add(folder)
        tree = self._history.tree_of(folder)
        if tree is None:
            return None
        found = self._history.below(folder, self._commit(tree))
        if not found:
            return None  # git has nothing there, and knows not what else is
        gone = {
            path for path in found if tree.is_named_by_change(tree.relative(path), is_removal=True)
        }
        more = self._history.others_below(folder, {*found})
        if gone or more:
            self.n_possible = max(self.n_possible, 2)
        return sorted({*found} - gone if self._nth else {*found} | more)


def _but_for_the_last_line(history: History, path: str, file: TreeFile) -> str | None:
    """Return how a file was seen before, if that differs in its last, empty line alone, which some clients don't show."""
    before = history.known.get(path)
    text, shown = before.text if before is not None else None, file.text or ""
    if text is None or text == shown or text.rstrip("\n") != shown.rstrip("\n"):
        return None
    return text


class _Only:
    """Some of the files of a tree, and one that has nothing in it."""

    def __init__(self, files: Tree, paths: set[str]) -> None:
        self.file = files.file
        self._files = files
        self._paths = paths

    def below(self, folder: str) -> list[str] | None:
        """Return the files below a folder."""
        paths = self._files.below(folder)
        return None if paths is None else [*filter(self._paths.__contains__, paths), f"{folder}/?"]


def _agreed(
    history: History,
    answer: Callable[[Tree], LookAnswer | None],
    named: Iterable[str],
    *,
    is_by_file: bool = False,
) -> LookAnswer | None:
    """Return what is answered in each way in which the files may have been, if it is the same.

    Args:
        history: before the look.
        answer: answers it on a tree.
        named: the files that it is about; nothing is told of one that may have changed nobody knows how.
        is_by_file: whether an answer consists of those for each file, so that only files that may differ are compared.
    """
    for path in named:
        file = history.file(path)
        if file is None or file.is_sure or file.source == "git":
            continue
        if _but_for_the_last_line(history, path, file) is None:
            return None
    first = _AsAt(history, 0)
    found = answer(first)
    if found is None or first.n_possible > _MOST_POSSIBLE:
        return None
    ways: list[Tree] = [first, *(_AsAt(history, nth) for nth in range(1, first.n_possible))]
    if is_by_file:
        listed = [set(way.below(folder) or ()) for folder in first.folders for way in ways]
        differ = first.unsure | (
            set().union(*listed) - set(listed[0]).intersection(*listed) if listed else set()
        )
        if not any(path.endswith("/.gitignore") for path in differ):
            ways = [_Only(way, differ) for way in ways]
    same = answer(ways[0])
    return found if all(answer(way) == same for way in ways[1:]) else None


def _shown(
    at: LookPlace, name: str, arguments: Mapping[str, Any], files: Tree
) -> LookAnswer | None:
    run = ToolRun(files, cwd=at.step.cwd or "/")
    is_absent = False
    if name == "Glob":
        folder = arguments.get("path")
        if at.history.has_trees_below(run.path(folder or ".")):
            return None  # it lists their files too, of which nobody knows all
        if folder is None and at.step.cwd != _first_cwd(at):
            return None  # some clients look in the folder in which they were started
    if name == "Read":
        file = files.file(run.path(arguments["file_path"]))
        if file is None or _NO_TEXT.search(arguments["file_path"]):
            return None
        if file.text is not None and not _is_text(file.text):
            return None
        is_absent = file.is_sure
    result = run.call(name, arguments)
    kinds = (None, "is_directory", *(("not_found",) if is_absent else ()))
    if not result.text or result.error_kind not in kinds:
        return None
    if len(result.found) > (arguments.get("head_limit") or _MOST_FOUND.get(name, 0)):
        return None  # which ones are shown goes by an order that nobody knows
    if name == "Read" and result.text.count("\n") + 1 >= MAX_READ_LINES:
        return None
    text = result.text
    if result.error_kind == "not_found":
        text = f"{REFUSED}{text}</tool_use_error>"
    elif name == "Read" and _numbers_with_tabs(at):
        text = _ARROW.sub(r"\1\t", text)
    return LookAnswer(text=text, source="files")


def _first_cwd(at: LookPlace) -> str:
    """Return the folder in which the session began."""
    return next((s.cwd for s in at.steps if s.session == at.step.session), at.step.cwd)


def _numbers_with_tabs(at: LookPlace) -> bool:
    """Return whether this client sets a tab behind the numbers of lines, as newer ones do."""
    return any(
        _WITH_TAB.match(step.text)
        for step in at.steps
        if step.name == "Read" and step.session == at.step.session
    )


def _of_command(at: LookPlace, command: str, sandbox: Sandbox) -> LookAnswer | None:
    """Return what a command prints that only shows files and commits."""
    cwd = at.step.cwd or "/"
    tree = at.history.tree_of(cwd)
    shown = shown_by(command, cwd) if tree is not None else None
    if tree is None or shown is None or (shown.lists and tree.root in shown.folders):
        return None  # what git ignores lies mostly in the root
    head = at.history.head(tree)
    named = [each.replace("HEAD", head or "?") for each in shown.commits]
    if not all(map(tree.repository.has, named)):
        return None
    printed: dict[tuple[tuple[str, bytes], ...], LookAnswer | None] = {}

    def answer(files: Tree) -> LookAnswer | None:
        found = _files_of(files, tree, shown)
        if found is None:
            return None
        key = tuple(sorted(found.items()))
        if key not in printed:
            printed[key] = _printed(at, tree, shown, found, sandbox)
        return printed[key]

    return _agreed(at.history, answer, shown.files)


def _files_of(files: Tree, tree: WorkingTree, shown: Shown) -> dict[str, bytes] | None:
    """Return the files that a command shows, by path relative to the root, or None if one isn't there."""
    paths = set(shown.files)
    for folder in shown.folders:
        below = files.below(folder)
        if not below:
            return None  # what is not there is complained of in other words
        paths.update(below)
    found = {}
    for path in paths:
        file = files.file(path) if is_below(path, tree.root) else None
        if file is None or not _is_text(file.text):
            return None
        found[tree.relative(path)] = (file.text or "").encode()
    return found


def _is_text(text: str | None) -> bool:
    return text is not None and not {"\0", "\ufffd"} & {*text}


def _distance(one: LoggedCall, other: LoggedCall) -> tuple[bool, float]:
    """Return how far apart calls are: those of one session are nearer than others."""
    return one.session != other.session, abs(one.answered - other.answered)


def _printed(
    at: LookPlace,
    tree: WorkingTree,
    shown: Shown,
    files: dict[str, bytes],
    sandbox: Sandbox,
) -> LookAnswer | None:
    """Return what a command prints on some files."""
    objects = None
    if shown.commits:
        objects = tree.repository.objects
        commits = tree.repository.commits
        head = at.history.head(tree) or next(iter(commits))
        if not sandbox.can_read(objects):
            return None
        files |= git_files(tree.repository, commits[head], at.step.branch, at.step.answered)
    run = partial(sandbox.run, root=tree.root, files=files, cwd=at.step.cwd or "/", objects=objects)
    ran = run(shown.run)
    whole = run(shown.uncut) if shown.uncut is not None else ran
    if sorted(whole.output.split("\n")) != sorted(ran.output.split("\n")):
        return None
    if ran.status == 0 and ran.output.strip():
        return LookAnswer(text=ran.output.strip("\n").rstrip(), source="command")
    if ran.status == 0 or (ran.status == 1 and shown.can_find_nothing and not ran.output):
        told = [each for each in at.steps if each.text in _NOTHING and each.name == "Bash"]
        nearest = min(told, key=lambda each: _distance(each, at.step), default=None)
        return LookAnswer(text=nearest.text if nearest else _NOTHING[1], source="command")
    return None

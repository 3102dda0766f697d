"""Rebuild the files step by step from the contents that a log shows and from git.

A working tree starts with the files of a commit. Contents in the log replace them. The files before
a step never use the step's own answer, unless the caller asks for it. So the recorded answer can
test the tree; `benchmarks/commands.py` does.
"""

import re
from copy import copy

import msgspec

from replay_pipeline.actions.shell import shell_plan
from replay_pipeline.workspaces.git import GitCommit, Repository
from replay_pipeline.workspaces.logs import Log, LoggedCall
from replay_pipeline.workspaces.sightings import (
    LONGEST_GAP_S,
    Part,
    Sighting,
    Sightings,
    part_of,
    parts_in,
    path_of,
    paths_of,
    text_after,
)
from replay_pipeline.workspaces.tools import ToolRun
from replay_pipeline.workspaces.tree import Source, TreeFile, is_below
from replay_pipeline.workspaces.working_trees import Evidence, Roots, Told, WorkingTree, text_of

_MOVES = re.compile(
    r"\bgit\s+(?:-C\s+\S+\s+|-c\s+\S+\s+)*(?:checkout|switch|stash|reset|pull|rebase|merge|restore|"
    r"cherry-pick|revert|am|clean|commit|worktree)\b|\bgh\s+pr\s+checkout\b|\bgt\s+\w+"
)
_CONFLICT = re.compile(r"^(?:CONFLICT \(|Unmerged paths:|both modified:)", re.MULTILINE)
_DISCARDS = re.compile(
    r"\bgit\s+(?:stash(?!\s+(?:list|show|pop|apply|drop))|reset\s+--hard|checkout\s+(?:\S+\s+)?--\s|"
    r"checkout\s+\.|restore\b|clean\b)"
)


_SURELY_TOLD_S = 600.0
"""For so long a command's word on the commit is taken for sure: a person may commit as well."""
_LINTS = re.compile(r"lint|clippy|\bruff\b|\b(?:fmt|format|fix)\b")
"""Such a command may mend what was written, if the project is set up so."""
_SOON_S = 3600.0
"""A file that is first seen later than this may have been another one before."""
_ELSEWHERE = re.compile(r"\bcd\s|\s-C\s|--git-dir|\bssh\b")
_ASKS_HEAD = re.compile(
    r"git log(?: (?:--oneline|--stat|--(?:no-)?decorate|-n ?\d+|-\d+|[\w/-]+(?:\.[\w/-]+)*\.\.HEAD))*|"
    r"git rev-parse (?:--short )?HEAD"
)
_BEGINS_WITH_ID = re.compile(r"(?:commit )?([0-9a-f]{7,40})\b")
_SAYS_HEAD = re.compile(
    r"^(?:\[[\w./-]+(?: \([\w-]+\))? ([0-9a-f]{7,40})\] |HEAD is now at ([0-9a-f]{7,40})\b"
    r"|Updating [0-9a-f]+\.\.([0-9a-f]{7,40})$)",
    re.MULTILINE,
)


def _commit_told(command: str, text: str) -> str | None:
    """Return the beginning of the id of the commit that is checked out after a command of git, as its answer says."""
    if _ELSEWHERE.search(command):
        return None
    said = [*_SAYS_HEAD.finditer(text)] if _MOVES.search(command) else []
    if said:
        return said[-1][said[-1].lastindex or 0]
    asked = _BEGINS_WITH_ID.match(text) if _ASKS_HEAD.fullmatch(command.strip()) else None
    return asked[1] if asked else None


class KnownContent(msgspec.Struct):
    """The content of a file that is known from the log."""

    text: str | None
    moment: float
    session: str
    source: Source
    origin: str
    head_blob: str | None
    """The commit's blob at this path at that time."""
    branch: str | None
    is_written: bool
    """Whether the agent wrote it. Otherwise it read it."""


class ShownLines(msgspec.Struct):
    """Lines of a file that the log showed, and the commit of the working tree then."""

    part: Part
    moment: float
    head_blob: str | None
    branch: str | None


class History:
    """Every working tree of a project, updated step by step through its log.

    It is a `Tree`: `file` and `below` return the files before the next step.
    """

    def __init__(
        self, repository: Repository | None, log: Log, *, is_later_used: bool = True
    ) -> None:
        """Begin before the first step.

        Args:
            repository: the project's own history.
            log: what was recorded.
            is_later_used: whether what the log shows after a moment tells of that moment too: an
                edit quotes the whole file as it was before it.
        """
        self.repository = repository
        self.is_later_used = is_later_used
        self.roots = Roots(repository, log.steps) if repository else None
        self.sightings = Sightings(log)
        self.known: dict[str, KnownContent] = {}
        self.parts: dict[str, list[ShownLines]] = {}
        """What was seen of each file since it was last known whole."""
        self._rewritten = set[str]()
        """Files that were found otherwise than the agent wrote them: neither as written nor as committed."""
        self.read: dict[tuple[str, str], dict[str, str | None]] = {}
        """Files that a session has read, and how they were then."""
        self._trees: dict[str, WorkingTree] = {}
        self._now = (-1, 0.0, "", "")
        self._own_change: str | None = None
        self._others: tuple[object, str, set[str]] = (None, "", set())
        self._uncommitted = [path for path in self.sightings.paths() if self._is_uncommitted(path)]
        self._copies: tuple[dict[str, KnownContent], dict[str, list[ShownLines]]] | None = None
        """What `kept` returned last, while no step has changed it."""
        if is_later_used:
            for step in log.steps:
                self._see(step)

    def kept(self) -> "History":
        """Return the files as they are now, which later steps of this history leave alone."""
        other = copy(self)
        if self._copies is None:
            self._copies = dict(self.known), dict(self.parts)
        other.known, other.parts = self._copies
        other._rewritten = set(self._rewritten)
        other._trees = {root: copy(tree) for root, tree in self._trees.items()}
        return other

    def tree_of(self, path: str) -> WorkingTree | None:
        """Return the working tree that contains a path."""
        root = self.roots.root_of(path) if self.roots else None
        if root is None or self.repository is None:
            return None
        tree = self._trees.get(root)
        if tree is None:
            tree = self._trees[root] = WorkingTree(root, self.repository)
        return tree

    def _is_uncommitted(self, path: str) -> bool:
        tree = self.tree_of(path)
        return (
            tree is not None
            and self.roots is not None
            and not self.roots.was_committed(tree.relative(path))
        )

    def has_trees_below(self, folder: str) -> bool:
        """Return whether other working trees lie in a folder, as those of `git worktree` do."""
        return self.roots is not None and self.roots.has_any_below(folder)

    def enter(self, order: int, step: LoggedCall, *, is_own_used: bool = False) -> None:
        """Go to the time before a step's answer.

        Args:
            order: the step's position in the log.
            step: the step.
            is_own_used: whether contents that the step itself shows may be used.
        """
        # A whole answer may be used: then what the step shows comes after this moment.
        self._now = order - is_own_used, step.answered, step.session, "" if is_own_used else step.call_id  # fmt: skip
        self._own_change = None
        if not is_own_used and step.name not in {"Read", "Grep", "Glob", "Bash"}:
            self._own_change = path_of(step)
        tree = self.tree_of(step.cwd or "/")
        if tree is not None:
            tree.branch = step.branch
        for path in paths_of(step):
            other = self.tree_of(path)
            if other is not None and other is not tree and other.branch is None:
                other.branch = step.branch

    def _see(self, step: LoggedCall) -> None:
        """Take in what tells of the commit: lines of files, and commands that move it."""
        if step.name == "Bash":
            command = step.arguments.get("command")
            tree = self.tree_of(step.cwd or "/")
            if tree is None or not isinstance(command, str):
                return
            if not shell_plan(command, step.cwd).keeps_files:
                tree.touches.append(step.answered)
            if "git" not in command:
                return
            is_move = bool(_MOVES.search(command))
            if is_move:
                tree.moves.append(step.answered)
            if begin := _commit_told(command, step.text):
                names = [name for name in tree.repository.commits if name.startswith(begin)]
                commit_id = names[0] if len(names) == 1 else begin
                tree.told.append(Told(step.answered, step.call_id, step.branch, commit_id, is_move))
        elif not step.is_error:
            for path, part in parts_in(step):
                if (tree := self.tree_of(path)) is not None:
                    name = tree.relative(path)
                    tree.add(Evidence(step.answered, step.call_id, name, part, step.branch))

    def head(self, tree: WorkingTree) -> str | None:
        """Return the commit that is surely checked out in a working tree at this time, or None if nobody says."""
        return tree.kept(self._now[1], without=self._now[3], within_s=_SURELY_TOLD_S)

    def commits(self, tree: WorkingTree) -> list[GitCommit]:
        """Return the possible commits of a working tree, the likeliest first."""
        _, moment, _, without = self._now
        return tree.commits(moment, without=without, is_later_used=self.is_later_used)

    def _next(self, path: str, tree: WorkingTree | None) -> Sighting | None:
        """Return what the log shows of a file next, if nothing is known to have come between."""
        order, moment, _, _ = self._now
        if not self.is_later_used or path == self._own_change:
            return None
        found = self.sightings.next(path, order)
        if found is None or found.moment - moment > LONGEST_GAP_S:
            return None
        if tree is not None and tree.is_moved(moment, found.moment):
            return None
        return found

    def file(self, path: str) -> TreeFile | None:
        """Return the file at a path at this time, or None if nothing is known about it."""
        tree = self.tree_of(path)
        known, later = self.known.get(path), self._next(path, tree)
        if later is not None:
            if later.is_absent:
                is_same = known is None or known.text is None
                return TreeFile(None, "log", is_sure=is_same, origin=later.call_id)
            if later.part is not None and later.part.is_whole:
                is_soon = later.moment - self._now[1] < _SOON_S and not (
                    tree is not None and tree.is_touched(self._now[1], later.moment)
                )
                # Where a command came in between that may have changed it, it is as it was found behind it.
                is_new = known is None or (tree is not None and tree.touched > known.moment)
                is_same = (is_new and is_soon) or (known and known.text) == later.part.text
                return TreeFile(later.part.text, "log", is_sure=is_same, origin=later.call_id)
        if tree is None:
            return self._of_log(known, later) if known is not None else None
        is_own = known is not None and known.is_written and known.session == self._now[2]
        if known is not None and is_own and not self._is_moved(tree, known):
            return self._of_log(known, later, tree)
        parts = [each.part for each in self.parts.get(path, ()) if self._is_held(tree, path, each)]
        if later is not None and later.part is not None:
            parts.append(later.part)
        return self._of_tree(tree, path, known, parts, later)

    def _of_log(
        self, known: KnownContent, later: Sighting | None, tree: WorkingTree | None = None
    ) -> TreeFile:
        """Return a file as the log showed it, surely if it is seen so again or nothing may have changed it."""
        is_sure = tree is None or tree.touched <= known.moment
        if tree is not None and known.is_written and tree.linted > known.moment:
            is_sure = False
        if later is not None and later.part is not None and known.text is not None:
            is_sure = later.part.fits(known.text)
        return TreeFile(known.text, known.source, is_sure=is_sure, origin=known.origin)

    def _of_tree(
        self,
        tree: WorkingTree,
        path: str,
        known: KnownContent | None,
        parts: list[Part],
        later: Sighting | None,
    ) -> TreeFile | None:
        """Return the file of a working tree, where the log alone does not decide."""
        relative = tree.relative(path)
        is_of_head = known is not None and known.head_blob == self._head_blob(tree, relative)
        # What another session has not committed is not carried to another branch.
        is_here = known is not None and (
            known.session == self._now[2] or known.branch == tree.branch
        )
        if known is not None and is_of_head and is_here and _holds(known, parts):
            return self._of_log(known, later, tree)
        commits = self.commits(tree)
        # What was seen first may have changed since; what was seen last counts.
        blob = commit = None
        for start in range(max(1, len(parts))):
            blob, commit = tree.blob_at(relative, commits, parts[start:])
            if commit is not None:
                break
        if commit is None:
            return self._mixed(tree, relative, known, parts)
        if blob is None:
            if known is not None and self._is_left(known, relative):
                return self._of_log(known, later, tree)
            return TreeFile(None, "git", is_sure=False, origin=commit.id)
        text = text_of(tree.repository.blob(blob))
        is_rewritten = path in self._rewritten or tree.is_named_by_change(relative)
        is_elsewhere = tree.is_elsewhere(self._now[1], without=self._now[3])
        if text is not None and (tree.has_conflicts or is_rewritten or is_elsewhere):
            return TreeFile(text, "mixed", is_sure=False, origin=commit.id)
        # Where another commit is about as likely, the file is sure if it is the same there.
        is_sure = all(
            tree.repository.blob_id(each.tree, relative) == blob for each in tree.likely()
        )
        return None if text is None else TreeFile(text, "git", is_sure, commit.id)

    def _is_left(self, known: KnownContent, relative: str) -> bool:
        """Return whether a file that the agent wrote is still there although the commit has it not.

        What another session wrote has been committed since, if commits know it, and a checkout of
        another branch takes it away.
        """
        is_own = known.session == self._now[2]
        is_committed = self.roots is not None and self.roots.was_committed(relative)
        return known.is_written and known.text is not None and (is_own or not is_committed)

    def _is_moved(self, tree: WorkingTree, seen: KnownContent | ShownLines) -> bool:
        """Return whether git may have changed a file since the log showed it."""
        return seen.branch != tree.branch or tree.is_moved(seen.moment, self._now[1])

    def _is_held(self, tree: WorkingTree, path: str, seen: ShownLines) -> bool:
        """Return whether lines that were seen bind the file now.

        They do until git may have changed it: on the same branch before its next command, else as
        long as the likeliest commit has the same file as then.
        """
        if not self._is_moved(tree, seen) and self._now[1] - seen.moment < LONGEST_GAP_S:
            return True
        return seen.head_blob == self._head_blob(tree, tree.relative(path))

    def _head_blob(self, tree: WorkingTree, relative: str) -> str | None:
        commits = self.commits(tree)
        return tree.repository.blob_id(commits[0].tree, relative) if commits else None

    def _mixed(
        self, tree: WorkingTree, relative: str, known: KnownContent | None, parts: list[Part]
    ) -> TreeFile | None:
        """Return the file of the likeliest commit, with the lines in it that the log shows."""
        blob = self._head_blob(tree, relative)
        base = known.text if known else text_of(tree.repository.blob(blob)) if blob else None
        if base is None:
            return None
        lines = base.split("\n")
        for part in parts:
            lines[part.first - 1 : part.first - 1 + len(part.lines)] = part.lines
        return TreeFile("\n".join(lines), "mixed", is_sure=False)

    def below(self, folder: str, commit: GitCommit | None = None) -> list[str] | None:
        """Return the files below a folder at this time, or None outside of every working tree.

        Args:
            folder: the folder.
            commit: the commit that is checked out there; by default the likeliest one.
        """
        tree = self.tree_of(folder)
        if tree is None or not (commits := [commit] if commit else self.commits(tree)):
            return None
        tracked = tree.repository.files(commits[0].tree)
        paths = {f"{tree.root}/{path}" for path in tracked}
        for path, known in self.known.items():
            is_new = known.is_written and path not in paths and is_below(path, tree.root)
            if is_new and self.tree_of(path) is tree and self._is_left(known, tree.relative(path)):
                paths.add(path)
        return sorted(path for path in paths if is_below(path, folder))

    def others_below(self, folder: str, listed: set[str]) -> set[str]:
        """Return further files below a folder that may be there: the log shows them about then, or no commit has them."""
        if self._others[:2] != (self._now, folder):
            paths = {*self._uncommitted, *self.sightings.near(self._now[1], _SOON_S)}
            files = ((path, self.file(path)) for path in paths if is_below(path, folder))
            there = {path for path, file in files if not (file and file.is_sure and not file.text)}
            self._others = self._now, folder, there
        return self._others[2] - listed

    def take(self, step: LoggedCall) -> None:
        """Apply the answer of a step, and the changes that it made."""
        if not self.is_later_used:
            self._see(step)
        self._now = (*self._now[:3], "")
        self._copies = None
        if step.name == "Read":
            self._take_read(step)
        elif step.name in {"Edit", "MultiEdit", "Write", "NotebookEdit"} and not step.is_error:
            self._take_change(step)
        elif step.name == "Bash":
            self._take_command(step)

    def _learn(self, path: str, text: str | None, step: LoggedCall, *, is_written: bool) -> None:
        tree = self.tree_of(path)
        self.parts.pop(path, None)
        self._rewritten.discard(path)
        head = self._head_blob(tree, tree.relative(path)) if tree is not None else None
        branch = tree.branch if tree is not None else None
        self.known[path] = KnownContent(
            text, step.answered, step.session, "log", step.call_id, head, branch, is_written
        )

    def _take_read(self, step: LoggedCall) -> None:
        path, part = path_of(step), part_of(step)
        if path is None:
            return
        if step.is_error or part is None:
            if "does not exist" in step.text[:80]:
                self._learn(path, None, step, is_written=False)
            return
        before = self.known.get(path)
        is_written = False
        if before is not None:
            if before.text is not None and part.fits(before.text):
                is_written = before.is_written
            else:
                del self.known[path]
                if before.is_written:
                    self._rewritten.add(path)
        if part.is_whole:
            self._learn(path, part.text, step, is_written=is_written)
        else:
            kept = [each for each in self.parts.get(path, ()) if not _overlaps(each.part, part)]
            tree = self.tree_of(path)
            head = self._head_blob(tree, tree.relative(path)) if tree is not None else None
            branch = tree.branch if tree is not None else None
            self.parts[path] = [*kept, ShownLines(part, step.answered, head, branch)]
        self.read.setdefault((step.session, step.agent), {})[path] = (
            part.text if part.is_whole else None
        )

    def _take_change(self, step: LoggedCall) -> None:
        path = path_of(step)
        if path is None:
            return
        text = text_after(step)
        if text is None:
            run = ToolRun(self, cwd=step.cwd or "/")
            answer = run.call(step.name, step.arguments)
            if answer.error_kind is not None:
                self.known.pop(path, None)
                return
            text = run.view.changes[path]
        self._learn(path, text, step, is_written=True)
        self.read.setdefault((step.session, step.agent), {})[path] = text

    def _take_command(self, step: LoggedCall) -> None:
        command = step.arguments.get("command")
        tree = self.tree_of(step.cwd or "/")
        if tree is None or not isinstance(command, str):
            return
        if not shell_plan(command, step.cwd).keeps_files:
            tree.touched = step.answered
            tree.changes = [*tree.changes, command]
        if _LINTS.search(command):
            tree.linted = step.answered
        if _MOVES.search(command) and not step.is_error:
            tree.changes = []
            self._rewritten = {each for each in self._rewritten if self.tree_of(each) is not tree}
        if _CONFLICT.search(step.text):
            tree.has_conflicts = True
        elif _MOVES.search(command) and not step.is_error:
            tree.has_conflicts = False
        if _DISCARDS.search(command):
            for path in [each for each in self.known if is_below(each, tree.root)]:
                del self.known[path]
            for path in [each for each in self.parts if is_below(each, tree.root)]:
                del self.parts[path]


def _holds(known: KnownContent, parts: list[Part]) -> bool:
    return known.text is not None and all(part.fits(known.text) for part in parts)


def _overlaps(one: Part, other: Part) -> bool:
    return one.first < other.first + len(other.lines) and other.first < one.first + len(one.lines)

"""Find the working trees of a repository in a log, and the commit of each from what is shown of its files."""

import re
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from replay_pipeline.actions.paths import absolute
from replay_pipeline.workspaces.git import GitCommit, Repository
from replay_pipeline.workspaces.logs import LoggedCall
from replay_pipeline.workspaces.sightings import Part
from replay_pipeline.workspaces.tree import is_below

_N_COMMITS = 20
_N_LATER = 6
_N_EVIDENCE = 40
_FADE = 0.92
_OTHER_HEAD = 0.2
"""How much evidence from before a checkout, or of another branch, counts."""
_ON_BRANCH = 0.5
"""How much it counts that a commit was once the newest of the branch that the log names, and again
that it is the newest change made on the branch, even if a rebase made the commit again later."""
_IS_NEWEST = 1.6
"""How much it counts that it is the newest commit of a branch that isn't a trunk, and no rebase made it again later:
where commands of git tell the commit, that is right in 95 %. Trunks are often behind."""
_WAS_CHECKED_OUT = 10.0
"""How much it counts that git's own log of HEAD has it: only more than most evidence overrules it."""
_ABOUT = 1.0
"""How much less evidence a commit has that may as well be the one."""
_LONGEST_TOLD_S = 6 * 3600.0
"""For so long a command's word on the commit is believed."""
_HALF_LIFE_S = 3600.0
"""Others move a branch without a word in the log, so evidence grows old."""


_REMOVES = re.compile(r"\b(?:rm|mv|rename|delete|unlink)\b")


class Evidence(msgspec.Struct, frozen=True, order=True):
    """The content that one step shows of a file without known changes."""

    moment: float
    call_id: str
    path: str
    """Path relative to the root."""
    part: Part
    branch: str | None = None


class Told(NamedTuple):
    """What a command of git says of the commit that is checked out."""

    moment: float
    call_id: str
    branch: str | None
    commit_id: str
    """Only its beginning, where the repository hasn't got it."""
    is_new: bool
    """Whether the command itself checked it out."""


class WorkingTree:
    """One working tree of a repository, and the commits that were checked out there."""

    def __init__(self, root: str, repository: Repository) -> None:
        """Begin without evidence."""
        self.root = root
        self.repository = repository
        self.branch: str | None = None
        self.evidence: list[Evidence] = []
        self.checkouts = repository.checkouts(root)
        self.moves: list[float] = []
        """When a command may have moved HEAD or changed files by git, in order."""
        self.told: list[Told] = []
        """What commands of git say of the commit, in order."""
        self._fits: dict[tuple[Part, str], bool] = {}
        self._ranked: tuple[object, list[GitCommit], list[GitCommit]] = (None, [], [])
        self.touched = 0.0
        """When a command last ran that may have changed any file."""
        self.touches: list[float] = []
        """When such commands run, in order."""
        self.linted = 0.0
        """When a command last ran that may have mended written files."""
        self.changes: list[str] = []
        """Commands since the last one of git that may have changed files."""
        self.has_conflicts = False
        """Whether git has left marks of conflicts in files that no commit has."""

    def relative(self, path: str) -> str:
        """Return the repository's name for a path below the root."""
        return path.removeprefix(self.root + "/")

    def is_named_by_change(self, relative: str, *, is_removal: bool = False) -> bool:
        """Return whether a command that may have changed, or removed, files names one, since git last put files there."""
        return any(
            relative in command and (not is_removal or _REMOVES.search(command))
            for command in self.changes
        )

    def add(self, evidence: Evidence) -> None:
        """Add evidence about a file."""
        insort(self.evidence, evidence)

    def is_touched(self, since: float, until: float) -> bool:
        """Return whether a command ran between two moments that may have changed any file."""
        return bisect_right(self.touches, since) < bisect_left(self.touches, until)

    def is_moved(self, since: float, until: float) -> bool:
        """Return whether a git command ran between two moments."""
        return bisect_right(self.moves, since) < bisect_left(self.moves, until)

    def commits(self, moment: float, *, without: str, is_later_used: bool) -> list[GitCommit]:
        """Return the commits that may have been checked out at a time, the likeliest first.

        Args:
            moment: the time, in seconds since 1970.
            without: a call whose answer must not be used.
            is_later_used: whether later steps of the log are used too.
        """
        key = moment, without, is_later_used, self.branch, len(self.evidence)
        if self._ranked[0] != key:
            found = self._rank(moment, without=without, is_later_used=is_later_used)
            self._ranked = key, *found
        return self._ranked[1]

    def likely(self) -> list[GitCommit]:
        """Return the commits among those of `commits`, at its time, that are about as likely as the first one."""
        return self._ranked[2]

    def _rank(
        self, moment: float, *, without: str, is_later_used: bool
    ) -> tuple[list[GitCommit], list[GitCommit]]:
        candidates = self._candidates(moment, without=without, is_later_used=is_later_used)
        evidence = list(self._near(moment, without=without, is_later_used=is_later_used))

        repository = self.repository
        branch = self.branch if self.branch in repository.tips else repository.default_branch
        line = repository.line(branch) if branch is not None else set[str]()
        kept, own = self.kept(moment, without=without), self._own(moment + 1)

        is_behind = self.branch in repository.trunks

        def score(commit: GitCommit) -> float:
            agrees = sum(weight for weight, each in evidence if self._agrees(each, commit))
            agrees += _ON_BRANCH * (commit.id in line)
            if commit.id == own:
                is_as_then = commit.committed <= moment + 1 and not is_behind
                agrees += _IS_NEWEST if is_as_then else _ON_BRANCH
            return agrees + _WAS_CHECKED_OUT * (commit.id == kept)

        scores = {commit.id: score(commit) for commit in candidates}
        least = max(scores.values(), default=0.0) - _ABOUT
        ranked = sorted(candidates, key=lambda commit: -scores[commit.id])
        return ranked, [commit for commit in ranked if scores[commit.id] >= least]

    def _own(self, moment: float) -> str | None:
        """Return the newest commit that was made on the branch itself up to a moment."""
        commit = self.repository.own_at(self.branch, moment) if self.branch else None
        return commit.id if commit is not None else None

    def kept(
        self, moment: float, *, without: str = "", within_s: float = _LONGEST_TOLD_S
    ) -> str | None:
        """Return the commit that git's own log of HEAD has for a moment, or else what commands of git say."""
        end = bisect_right(self.checkouts, moment, key=lambda each: each[0])
        commit_id = self.checkouts[end - 1][1] if end else self._told_at(moment, without, within_s)
        return commit_id if commit_id in self.repository.commits else None

    def is_elsewhere(self, moment: float, *, without: str = "") -> bool:
        """Return whether git says that a commit is checked out which the repository hasn't got."""
        told = self._told_at(moment, without, _LONGEST_TOLD_S)
        return bool(told) and told not in self.repository.commits

    def _told_at(self, moment: float, without: str, within_s: float) -> str | None:
        """Return the commit that the nearest command of git names, if none may have moved it in between."""
        at = bisect_right(self.told, moment, key=lambda each: each.moment)
        near = (*self.told[:at][::-1][:2], *self.told[at : at + 2])
        for each in near:
            is_later = each.moment > moment
            since, until = sorted((each.moment, moment))
            if (
                each.call_id != without
                and each.branch == self.branch
                and not (is_later and each.is_new)
                and until - since < within_s
                and not self.is_moved(since, until)
            ):
                return each.commit_id
        return None

    def _candidates(self, moment: float, *, without: str, is_later_used: bool) -> list[GitCommit]:
        moment += 1
        repository = self.repository
        found: dict[str, GitCommit] = {}
        if (kept := self.kept(moment, without=without)) is not None:
            found[kept] = repository.commits[kept]
        if (own := self._own(moment)) is not None:
            found[own] = repository.commits[own]
        near = [
            *repository.before(moment, branch=self.branch, n=_N_COMMITS),
            *repository.before(moment, branch=None, n=_N_COMMITS),
        ]
        if is_later_used:
            near += repository.after(moment, branch=self.branch, n=_N_LATER)
        for commit in near:
            found.setdefault(commit.id, commit)
        return list(found.values())

    def _near(
        self, moment: float, *, without: str, is_later_used: bool
    ) -> Iterator[tuple[float, Evidence]]:
        """Yield evidence around a moment, and what each counts."""
        at = bisect_right(self.evidence, moment, key=lambda each: each.moment)
        moved = bisect_right(self.moves, moment)
        last = self.moves[moved - 1] if moved else 0.0
        weight = 1.0
        for each in self.evidence[max(0, at - _N_EVIDENCE) : at][::-1]:
            if each.call_id != without:
                is_here = each.moment >= last and each.branch == self.branch
                age = 0.5 ** ((moment - each.moment) / _HALF_LIFE_S)
                yield weight * age * (1.0 if is_here else _OTHER_HEAD), each
                weight *= _fade(each)
        if is_later_used:
            # A commit by somebody else moves it without a word in the log.
            next_commits = self.repository.after(moment + 1, branch=self.branch, n=1)
            until = min(
                [*self.moves[moved : moved + 1], *(c.committed for c in next_commits)],
                default=float("inf"),
            )
            weight = 1.0
            for each in self.evidence[at : at + _N_EVIDENCE]:
                if each.moment > until or each.branch != self.branch:
                    break
                if each.call_id != without:
                    yield weight, each
                    weight *= _fade(each)

    def _agrees(self, evidence: Evidence, commit: GitCommit) -> bool:
        blob = self.repository.blob_id(commit.tree, evidence.path)
        return blob is not None and self.is_fitting(evidence.part, blob)

    def is_fitting(self, part: Part, blob: str) -> bool:
        """Return whether a blob contains the lines that were seen."""
        known = self._fits.get((part, blob))
        if known is None:
            text = text_of(self.repository.blob(blob))
            known = self._fits[part, blob] = text is not None and part.fits(text)
        return known

    def blob_at(
        self, path: str, commits: Sequence[GitCommit], parts: Sequence[Part]
    ) -> tuple[str | None, GitCommit | None]:
        """Return the likeliest commit that agrees with the shown contents, and the file's blob in it.

        If no commit agrees, both are None. If the commit lacks the file, only the blob is None.
        """
        for commit in commits:
            blob = self.repository.blob_id(commit.tree, path)
            if blob is None:
                if not parts:
                    return None, commit
            elif all(self.is_fitting(part, blob) for part in parts):
                return blob, commit
        return None, None


def _fade(evidence: Evidence) -> float:
    """Return how much less what is further away counts: a line that a search found tells besides what was read."""
    return _FADE if len(evidence.part.lines) > 1 else 1.0


def text_of(data: bytes | None) -> str | None:
    """Return a file's text as the client reads it, or None without a file."""
    if data is None:
        return None
    return data.decode("utf-8", "replace").removeprefix("\ufeff").replace("\r\n", "\n")


_PATH_ARGUMENTS = ("file_path", "notebook_path", "path")
_N_TREES = 40


class Roots:
    """The working trees of one repository, found from the paths in a log.

    A folder is a root if the paths below it are the names of the repository's files. So deleted
    worktrees and clones on other machines are found as well.
    """

    def __init__(self, repository: Repository, steps: Iterable[LoggedCall]) -> None:
        """Look through the paths of all calls."""
        known = self._paths = _paths_of(repository)
        votes: Counter[str] = Counter()
        n_deep: Counter[str] = Counter()
        paths: set[str] = set()
        cwds: set[str] = set()
        for step in steps:
            cwds.add(step.cwd or "")
            paths.update(_paths_in(step))
        for path in paths:
            parts = path.split("/")
            for i in range(2, len(parts)):
                if "/".join(parts[i:]) in known:
                    root = "/".join(parts[:i])
                    votes[root] += 1
                    n_deep[root] += len(parts) - i > 1
                    break
        # A file in the top folder, such as README.md, is in every project.
        found = [root for root in votes if n_deep[root] >= 2 or (n_deep[root] and root in cwds)]
        self._roots = sorted({*found, *repository.worktrees()}, key=len, reverse=True)

    def was_committed(self, path: str) -> bool:
        """Return whether any commit has this path, relative to a root."""
        return path in self._paths

    def has_any_below(self, folder: str) -> bool:
        """Return whether working trees lie in a folder."""
        return any(root != folder and is_below(root, folder) for root in self._roots)

    def root_of(self, path: str) -> str | None:
        """Return the innermost working tree that contains a path."""
        return next((root for root in self._roots if is_below(path, root)), None)


def _paths_in(step: LoggedCall) -> Iterable[str]:
    for name in _PATH_ARGUMENTS:
        value = step.arguments.get(name)
        if isinstance(value, str) and value:
            yield absolute(value, step.cwd or "/")


def _paths_of(repository: Repository) -> set[str]:
    """Return paths of files in the newest commits and at the tips of branches."""
    commits = [*repository.before(float("inf"), branch=None, n=_N_TREES)]
    commits += [repository.commits[tip] for tip in set(repository.tips.values()) if tip in repository.commits]  # fmt: skip
    return {path for tree in {commit.tree for commit in commits} for path in repository.files(tree)}

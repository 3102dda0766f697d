"""The files behind states, from a user's own logs and repositories.

Raw logs are read here, not the tables: what was redacted is no file any more. Nothing of it is
written anywhere.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from replay_pipeline.errors import ConfigError, IngestError
from replay_pipeline.ingesters import default_sources
from replay_pipeline.ingesters.corpus import session_files
from replay_pipeline.ingesters.log_rows import state_ids_for
from replay_pipeline.settings import Settings
from replay_pipeline.workspaces.environment import CheckedTask, Run
from replay_pipeline.workspaces.git import Repository, find_repositories
from replay_pipeline.workspaces.history import History
from replay_pipeline.workspaces.logs import Log, LoggedCall, read_log
from replay_pipeline.workspaces.sightings import paths_of
from replay_pipeline.workspaces.verdicts import StatePlace
from replay_pipeline.workspaces.working_trees import Roots


class Workspaces:
    """The logs of a user by project folder, and the repositories that they were about.

    One project folder is in memory at a time.
    """

    def __init__(
        self, settings: Settings, *, sources: Sequence[Path] = (), repositories: Sequence[Path] = ()
    ) -> None:
        """Find the session files.

        Args:
            settings: its sources and repositories are taken where none are named.
            sources: session files, or folders of them.
            repositories: git repositories of the projects; else those of the settings, and those
                found from the folders that the sessions name.

        Raises:
            ConfigError: there is no session.
        """
        self.repositories = tuple(repositories or settings.workspaces.repositories)
        folders: dict[Path, list[Path]] = defaultdict(list)
        for source in sources or settings.ingest.sources or default_sources():
            for path in _files(source):
                folders[_project_folder(path)].append(path)
        if not folders:
            raise ConfigError("no session found: name a folder or a .jsonl file")
        self.folders = [folders[key] for key in sorted(folders)]

    def histories(self, *, is_later_used: bool = True) -> Iterator[tuple[Log, History]]:
        """Yield each project's log and its files, before the first step."""
        for files in self.folders:
            log = read_log(files, copies=_copies_beside(files[0]))
            if log.steps:
                yield from self._of_log(log, is_later_used=is_later_used)

    def _of_log(self, log: Log, *, is_later_used: bool) -> Iterator[tuple[Log, History]]:
        """Yield the log of a project folder, divided by the repository that each session was about."""
        places = self.repositories or find_repositories(
            {step.cwd for step in log.steps if step.cwd}
        )
        left = log
        for place in places:
            with closing(Repository(Path(place))) as repository:
                mine = _sessions_in(repository, left.steps)
                part = _part_of(left, mine)
                if part.steps:
                    yield part, History(repository, part, is_later_used=is_later_used)
            left = _part_of(left, {step.session for step in left.steps} - mine)
        if left.steps:
            yield left, History(None, left, is_later_used=is_later_used)

    def show(self, state: str) -> dict[str, Any]:
        """Return the files at a state: its commit, and those that are not as the commit has them.

        Raises:
            ConfigError: no call of these sessions was made at this state.
        """
        for log, history in self.histories():
            ids = {state_id: decision for decision, state_id in ids_of(log).items()}
            named = [each for each in ids if each.startswith(state)]
            if len(named) > 1:
                raise ConfigError(
                    f"{len(named)} states have ids that begin with {state}; give more characters"
                )
            if not named:
                continue
            for order, step in enumerate(log.steps):
                if step.decision == ids[named[0]]:
                    return {"state_id": named[0], **_shown(history, log, order)}
                history.enter(order, step)
                history.take(step)
        raise ConfigError(
            f"{state}: these sessions have no tool call at this state, so it has no files"
        )

    def tasks(
        self, checks_of: Mapping[str, str], *, run: Run, limit: int, max_calls: int
    ) -> list[CheckedTask]:
        """Return states of working trees that have a check, the first decisions after a request."""
        found: list[CheckedTask] = []
        for log, history in self.histories():
            ids = ids_of(log)
            seen: set[str] = set()
            for order, step in enumerate(log.steps):
                if len(found) >= limit:
                    return found
                history.enter(order, step, is_own_used=True)
                place = StatePlace(history, step)
                check = checks_of.get(place.root() or "")
                if check and step.session not in seen and step.request:
                    seen.add(step.session)
                    files = place.files()
                    found.append(
                        CheckedTask(
                            state_id=ids[step.decision],
                            root=place.root() or "",
                            cwd=place.cwd,
                            check=check,
                            messages=[{"role": "user", "content": step.request}],
                            files=lambda files=files: files,
                            run=run,
                            max_calls=max_calls,
                        )
                    )
                history.enter(order, step)
                history.take(step)
        return found


def ids_of(log: Log) -> dict[str, str]:
    """Return the id of the state of each decision in a log."""
    decisions = list(dict.fromkeys(step.decision for step in log.steps))
    return dict(zip(decisions, state_ids_for(decisions), strict=True))


def _shown(history: History, log: Log, order: int) -> dict[str, Any]:
    """Return what is known of the files right before a decision's first answer."""
    first = log.steps[order]
    history.enter(order, first, is_own_used=True)
    tree = history.tree_of(first.cwd or "/")
    steps = [step for step in log.steps[order:] if step.decision == first.decision]
    paths = {path for step in steps for path in paths_of(step)}
    told = {*history.known, *history.sightings.paths()}
    changed = {path for path in told if tree is not None and history.tree_of(path) is tree}
    commits = history.commits(tree) if tree is not None else []
    files = []
    for path in sorted(paths | changed):
        file = history.file(path)
        if file is not None and (path in paths or file.source != "git"):
            files.append(
                {
                    "path": path,
                    "exists": file.text is not None,
                    "source": file.source,
                    "is_sure": file.is_sure,
                    "origin": file.origin,
                    "n_chars": len(file.text or ""),
                }
            )
    return {
        "session_id": first.session,
        "cwd": first.cwd,
        "branch": first.branch,
        "root": tree.root if tree is not None else None,
        "commit": commits[0].id if commits else None,
        "n_files": len(history.below(tree.root) or ()) if tree is not None else 0,
        "calls": [step.name for step in steps],
        "files": files,
    }


def _files(source: Path) -> Iterator[Path]:
    path = Path(source).expanduser()
    if path.is_dir():
        yield from session_files(path)
    elif path.is_file():
        yield path
    else:
        raise IngestError(f"{path}: no such file or folder")


def _project_folder(path: Path) -> Path:
    """Return the folder of a project; a subagent's file lies two or more below it."""
    parts = path.parts
    if "subagents" in parts:
        return Path(*parts[: max(1, parts.index("subagents") - 1)])
    return path.parent


def _copies_beside(path: Path) -> Path | None:
    """Return the folder of the client's copies, where a session lies in its own folder."""
    folder = _project_folder(path).parent.parent / "file-history"
    return folder if folder.is_dir() else None


def _sessions_in(repository: Repository, steps: Sequence[LoggedCall]) -> set[str]:
    """Return sessions most of whose calls were made in the repository."""
    roots = Roots(repository, steps)
    inside: Counter[str] = Counter()
    for step in steps:
        inside[step.session] += 1 if roots.root_of(step.cwd or "/") else -1
    return {session for session, n in inside.items() if n > 0}


def _part_of(log: Log, sessions: set[str]) -> Log:
    return Log(
        steps=[step for step in log.steps if step.session in sessions],
        backups=[backup for backup in log.backups if backup.session in sessions],
    )

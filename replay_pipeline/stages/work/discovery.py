"""Find new sessions, here or on the Hub, group them into batches, and keep their bytes."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from replay_pipeline.errors import MissingDependencyError, PublishError
from replay_pipeline.ingesters import TraceBatch, discover, keep, write_manifest
from replay_pipeline.ingesters.agents.opencode_database import databases_in, readable_sessions
from replay_pipeline.ingesters.corpus import SUFFIXES
from replay_pipeline.ingesters.log_rows import sha_of
from replay_pipeline.settings import Settings
from replay_pipeline.stages.project import Project

_SOURCE = re.compile(r"(?:^|/)hf:/{1,2}datasets/([\w.-]+/[\w.-]+)/?$")


def find_batches(project: Project, *, settle_s: float = 0.0) -> list[TraceBatch]:
    """Group new session bytes into batches and write their manifests. Returns the new ones.

    A file that changed less than `settle_s` seconds ago waits for the next time.
    """
    options = project.settings.ingest
    new = discover(
        [
            place
            for source in options.sources
            for place in _places_of(source, project.settings, settle_s)
        ],
        known=project.manifests(),
        max_batch_bytes=options.max_batch_bytes,
        max_batch_sessions=options.max_batch_sessions,
        settle_s=settle_s,
    )
    for batch in new:
        write_manifest(batch, project.root.path)
        keep_bytes(project, batch)
    project.forget()
    return new


def keep_bytes(project: Project, batch: TraceBatch) -> None:
    """Keep the bytes of a batch's sessions, if the settings say so, because agents delete their logs."""
    if folder := project.settings.kept_dir():
        keep(batch, folder)


def _places_of(source: Path, settings: Settings, settle_s: float) -> Iterator[Path]:
    """Yield where the session files of a source are; what is no file here is brought into the local folder."""
    if repository_of(source):
        source = fetch_sessions(source, settings.local_dir())
    source = source.expanduser()
    databases = databases_in(source)
    if databases != [source]:
        yield source
    for database in databases:
        place = settings.local_dir() / "databases" / sha_of(str(database.resolve()))
        yield from readable_sessions(database, place, settle_s=settle_s)


def repository_of(source: Path) -> str | None:
    """Return the Hub repository of a source `hf://datasets/OWNER/NAME`, or None."""
    match = _SOURCE.search(source.as_posix())
    return match[1] if match else None


def fetch_sessions(source: Path, folder: Path) -> Path:
    """Download the files of a source, and return their folder.

    A local path is returned unchanged. From a repository, the files that may be sessions are
    downloaded into their own private folder below `folder`. Existing files aren't downloaded
    again. A file that was deleted on the Hub stays here.

    Raises:
        PublishError: the Hub can't be reached, or denies access.
        MissingDependencyError: the extra `publish` is not installed.
    """
    name = repository_of(source)
    if name is None:
        return source
    try:
        hub = import_module("replay_pipeline.publish.hub")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{source}: the Hub needs huggingface_hub: pip install 'replay-pipeline[publish]'"
        ) from error
    repository = hub.HubDataset(name)
    if not repository.exists():
        raise PublishError(f"{name}: it is no dataset on the Hub, or you may not read it")
    return repository.download(folder / "hub" / name, SUFFIXES)

"""Find new sessions, group them into batches, and keep their bytes."""

from collections.abc import Iterator
from pathlib import Path

from replay_pipeline.ingesters import TraceBatch, discover, keep, write_manifest
from replay_pipeline.ingesters.agents.opencode_database import databases_in, readable_sessions
from replay_pipeline.ingesters.log_rows import sha_of
from replay_pipeline.settings import Settings
from replay_pipeline.stages.hub_sources import fetch_sessions, repository_of
from replay_pipeline.stages.project import Project


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
    project.forget_batches()
    return new


def keep_bytes(project: Project, batch: TraceBatch) -> None:
    """Keep the bytes of a batch's sessions, if the settings say so, because agents delete their logs."""
    if folder := project.kept_folder():
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

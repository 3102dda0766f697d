"""New sessions: found, grouped into batches, and kept."""

from replay_pipeline.ingesters import TraceBatch, discover, keep, write_manifest
from replay_pipeline.stages.hub_sources import fetch_sessions, repository_of
from replay_pipeline.stages.project import Project


def find_batches(project: Project, *, settle_s: float = 0.0) -> list[TraceBatch]:
    """Group new session bytes into batches and write their manifests. Returns the new ones.

    Files written to less than `settle_s` seconds ago are left for the next time.
    """
    options = project.settings.ingest
    new = discover(
        [fetch_sessions(source, project.settings.local_dir()) for source in options.sources]
        if any(map(repository_of, options.sources))
        else options.sources,
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
    """Keep the bytes of a batch's sessions, if they are to be kept: agents delete their logs."""
    if folder := project.kept_folder():
        keep(batch, folder)

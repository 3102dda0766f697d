"""Download sessions from a dataset repository on the Hub, and keep them up to date."""

import logging
import re
from importlib import import_module
from pathlib import Path, PurePosixPath

from replay_pipeline.errors import MissingDependencyError, PublishError
from replay_pipeline.storage.store import written_whole

logger = logging.getLogger(__name__)

_SOURCE = re.compile(r"(?:^|/)hf:/{1,2}datasets/([\w.-]+/[\w.-]+)/?$")
_SUFFIXES = frozenset({".jsonl", ".json"})


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
    here, head = folder / "hub" / name, repository.head()
    for file_name, remote in head.files.items():
        path = PurePosixPath(file_name)
        if path.suffix not in _SUFFIXES or path.is_absolute() or ".." in path.parts:
            continue
        target = here / path
        if target.is_file() and remote.is_same(target):
            continue
        data = repository.read(file_name, revision=head.sha)
        with written_whole(target, is_private=True) as file:
            file.write(data)
        logger.info("%s: fetched from %s", file_name, name)
    return here

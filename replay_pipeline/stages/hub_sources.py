"""Sessions that lie on the Hub: the files of a dataset repository, brought here and kept up to date."""

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
    """Give the dataset repository that a source names: `hf://datasets/OWNER/NAME`."""
    match = _SOURCE.search(source.as_posix())
    return match[1] if match else None


def fetch_sessions(source: Path, folder: Path) -> Path:
    """Bring what a source names onto this machine, and give where it lies.

    A path of this machine is given back as it is. Of a repository the files that may be sessions
    are fetched into a folder of its own below `folder`, for its owner alone; those that are there
    already are left. A file that has left the repository stays here.

    Raises:
        PublishError: the Hub cannot be reached, or refused.
        MissingDependencyError: the extra `publish` is not installed.
    """
    repository = repository_of(source)
    if repository is None:
        return source
    try:
        hub = import_module("replay_pipeline.publish.hub").HubDataset(repository)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{source}: the Hub needs huggingface_hub: pip install 'replay-pipeline[publish]'"
        ) from error
    if not hub.exists():
        raise PublishError(f"hf://datasets/{repository}: no such dataset, or no right to read it")
    head = hub.head()
    here = folder / "hub" / repository
    for name, remote in head.files.items():
        path = PurePosixPath(name)
        if path.suffix not in _SUFFIXES or path.is_absolute() or ".." in path.parts:
            continue
        target = here / path
        if not (target.is_file() and remote.is_same(target)):
            data = hub.read(name, revision=head.sha)
            with written_whole(target, is_private=True) as file:
                file.write(data)
            logger.info("%s: fetched from %s", name, repository)
    return here

"""Download sessions from a dataset repository or a bucket on the Hub, and keep them up to date."""

import logging
import os
import re
from functools import partial
from importlib import import_module
from pathlib import Path, PurePosixPath

from replay_pipeline.errors import MissingDependencyError, PublishError
from replay_pipeline.storage.store import written_whole

logger = logging.getLogger(__name__)

_SOURCE = re.compile(r"(?:^|/)hf:/{1,2}((?:datasets|buckets)/[\w.-]+/[\w.-]+)/?$")
_SUFFIXES = frozenset({".jsonl", ".json"})


def repository_of(source: Path) -> str | None:
    """Return the Hub repository of a source: `datasets/OWNER/NAME` or `buckets/OWNER/NAME`."""
    match = _SOURCE.search(source.as_posix())
    return match[1] if match else None


def fetch_sessions(source: Path, folder: Path) -> Path:
    """Download the files of a source, and return their folder.

    A local path is returned unchanged. From a repository or bucket, the files that may be sessions
    are downloaded into their own private folder below `folder`. Existing files aren't downloaded
    again. A file that was deleted on the Hub stays here.

    Raises:
        PublishError: the Hub can't be reached, or denies access.
        MissingDependencyError: the extra `publish` is not installed.
    """
    place = repository_of(source)
    if place is None:
        return source
    kind, name = place.split("/", 1)
    try:
        hub = import_module("replay_pipeline.publish.hub")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{source}: the Hub needs huggingface_hub: pip install 'replay-pipeline[publish]'"
        ) from error
    store = (hub.HubBucket if kind == "buckets" else hub.HubDataset)(name)
    if not store.exists():
        raise PublishError(f"hf://{place}: it does not exist, or you may not read it")
    here = folder / ("hub" if kind == "datasets" else "hub-buckets") / name
    if kind == "datasets":
        head = store.head()
        files, read = head.files, partial(store.read, revision=head.sha)
    else:
        files, read = store.files(), store.read
    for file_name, remote in files.items():
        path = PurePosixPath(file_name)
        if path.suffix not in _SUFFIXES or path.is_absolute() or ".." in path.parts:
            continue
        target = here / path
        if target.is_file() and remote.is_same(target):
            continue
        data = read(file_name)
        with written_whole(target, is_private=True) as file:
            file.write(data)
        if kind == "buckets" and remote.changed_s is not None:
            # A bucket names no hash that could be computed here: the time tells what has changed.
            os.utime(target, (remote.changed_s, remote.changed_s))
        logger.info("%s: fetched from %s", file_name, place)
    return here

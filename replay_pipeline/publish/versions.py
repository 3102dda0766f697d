"""A dataset on an object store: complete versions side by side, each published by one request.

`<place>/000012-3f9a/` is a complete dataset folder that never changes, and the object
`<place>/000012.json` marks it as published. The mark with the highest number is the present
version. A publisher that dies leaves a folder that nobody reads. Of two publishers, the store lets
only one create the mark.
"""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from replay_pipeline.errors import StorageError
from replay_pipeline.publish import layout
from replay_pipeline.storage.outages import translated
from replay_pipeline.storage.store import (
    Place,
    copy_files,
    files_below,
    remove_tree,
    written_whole,
)

logger = logging.getLogger(__name__)

_N_KEPT = 2
"""Versions that stay: who reads the one before the newest may finish."""


def newest(place: Place) -> Place | None:
    """Return the folder of the present version, or None if nothing is published.

    For a local dataset, this is `place` itself.
    """
    if isinstance(place, Path):
        return place if place.is_dir() else None
    numbers = _published(place)
    return place / _folder_of(place, numbers[-1]) if numbers else None


def local_copy(place: Place, folder: Path) -> Path:
    """Return the dataset as a local folder: `place` itself, or a copy of the newest version.

    Args:
        place: place of the dataset.
        folder: folder for a copy. Existing files aren't downloaded again.

    Raises:
        StorageError: the store cannot be read.
    """
    if isinstance(place, Path):
        return place
    source = newest(place)
    wanted = set(files_below(source)) if source else set()
    there = set(files_below(folder))
    for name in there - wanted:
        (folder / name).unlink()
    if source:
        folder.mkdir(parents=True, exist_ok=True)
        copy_files(source, folder, sorted(n for n in wanted if n not in there or not _lasts(n)))
    return folder


@contextmanager
def to_be_published(place: Place, folder: Path) -> Iterator[Path]:
    """Open the dataset as a local folder, and publish its changes at the end.

    Args:
        place: place of the dataset.
        folder: folder for the working copy of a dataset on an object store.

    Raises:
        StorageError: the store can't be written, or somebody else published meanwhile. The store
            has the old version, or theirs.
    """
    if isinstance(place, Path):
        yield place
        return
    base = newest(place)
    before = _content(local_copy(place, folder))
    yield folder
    after = _content(folder)
    if after != before:
        same = sorted(name for name in after if before.get(name) == after[name])
        _publish(place, base, folder, same=same, new=sorted(after.keys() - set(same)))


def _publish(
    place: Place, base: Place | None, folder: Path, *, same: list[str], new: list[str]
) -> None:
    number = _number_of(base.name) + 1 if base else 1
    target = place / f"{number:06}-{uuid4().hex[:4]}"
    if base:
        copy_files(base, target, same)
    copy_files(folder, target, new)
    try:
        with written_whole(place / f"{number:06}.json", is_new=True) as file:
            file.write(json.dumps({"folder": target.name}).encode())
    except FileExistsError as error:
        remove_tree(target)
        raise StorageError(
            f"{place}: somebody else published version {number} meanwhile; publish again"
        ) from error
    logger.info("%s: version %d, %d new files", place, number, len(new))
    _forget(place, before=number - _N_KEPT + 1)


def _forget(place: Place, *, before: int) -> None:
    """Delete old versions, each mark first, and what publishers that died have left of them."""
    with translated(place, "listed"):
        there = sorted(place.iterdir(), key=lambda path: (path.suffix != ".json", path.name))
    for path in there:
        if _number_of(path.name) < before:
            remove_tree(path)


def _published(place: Place) -> list[int]:
    """Return numbers of the published versions, oldest first."""
    with translated(place, "listed"):
        return sorted(_number_of(path.name) for path in place.glob("*.json"))


def _folder_of(place: Place, number: int) -> str:
    mark = place / f"{number:06}.json"
    with translated(mark, "read"):
        return json.loads(mark.read_text("utf-8"))["folder"]


def _number_of(name: str) -> int:
    """Return the number in the name of a mark or folder.

    Raises:
        StorageError: the name is not that of a version.
    """
    match = re.match(r"(\d{6})[-.]", name)
    if match is None:
        raise StorageError(
            f"{name!r} is not a version of a dataset; empty this folder, or publish to another one"
        )
    return int(match[1])


def _lasts(name: str) -> bool:
    """Return whether a file of this name never changes: shards are named by their content."""
    return name.startswith(f"{layout.DATA}/")


def _content(folder: Path) -> dict[str, bytes]:
    """Return each file: the bytes of those that may change, nothing for those that never do."""
    return {
        name: b"" if _lasts(name) else (folder / name).read_bytes() for name in files_below(folder)
    }

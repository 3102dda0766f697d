"""Where a dataset lies: a folder that changes in one step or not at all, or an object store.

In a folder, the next version is built next to the folder, with hard links to unchanged files. Then both swap
names in one step. If a publisher is killed, the folder has the old version or the new one. Two
publishers to one folder take turns.

On an object store, complete versions lie side by side. `<place>/000012-3f9a/` is a complete dataset
folder that never changes, and the object `<place>/000012.json` marks it as published. The mark with
the highest number is the present version. A publisher that dies leaves a folder that nobody reads.
Of two publishers, the store lets only one create the mark.
"""

import ctypes
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from replay_pipeline.errors import StorageError
from replay_pipeline.publish import layout
from replay_pipeline.storage.locks import take_lock
from replay_pipeline.storage.outages import translated
from replay_pipeline.storage.store import (
    Place,
    copy_files,
    files_below,
    remove_tree,
    written_whole,
)

logger = logging.getLogger(__name__)

_OF_BATCHES = (f"{layout.DATA}/", f"{layout.CLIENT_TEXTS}/")
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@dataclass(frozen=True, kw_only=True)
class FolderChange:
    """The changes of a new version, as paths inside the folder."""

    written: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock the folder against other publishers, here and in other processes.

    Raises:
        StorageError: the parent folder can't be created or written.
    """
    parent = folder.resolve().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        lock = take_lock(parent / f".{folder.resolve().name}.lock", waits=True)
    except OSError as error:
        raise StorageError(f"{parent}: cannot hold a dataset ({error.strerror})") from error
    assert lock is not None
    try:
        yield
    finally:
        lock.release()


def replace_files(
    folder: Path,
    files: Mapping[str, bytes | Path],
    removed: set[str],
    look: Callable[[Path], object] | None = None,
) -> FolderChange:
    """Change a folder to its next version: add `files`, remove `removed`, and keep the rest.

    The folder isn't touched if nothing would change, or if `look` raises for the next version.

    Raises:
        StorageError: the folder can't be written, or the disk is full. It is unchanged.
    """
    folder = folder.resolve()
    recover(folder)
    same = {path for path, data in files.items() if _is_same(folder / path, data)}
    change = FolderChange(
        written=sorted(files.keys() - same),
        removed=sorted(path for path in removed - files.keys() if (folder / path).exists()),
        unchanged=sorted(same),
    )
    if not change.written and not change.removed:
        return change
    next_version = folder.with_name(f".{folder.name}.next-{uuid4().hex[:8]}")
    try:
        next_version.mkdir(parents=True)
        if folder.exists():
            shutil.copymode(folder, next_version)
        _link(folder, next_version, leave_out={*change.written, *change.removed})
        for path in change.written:
            _write(next_version / path, files[path])
        if look is not None:
            look(next_version)
        _swap(folder, next_version)
    except OSError as error:
        raise StorageError(
            f"{folder}: cannot be written ({error.strerror or error}); the dataset is as before. "
            "Check the folder's permissions and free space."
        ) from error
    finally:
        shutil.rmtree(next_version, ignore_errors=True)
    return change


def recover(folder: Path) -> None:
    """Undo what a killed publisher left: remove its new files, and restore the old ones."""
    for left in sorted(folder.parent.glob(f".{folder.name}.old-*")):
        if folder.exists():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.rename(folder)
    for left in folder.parent.glob(f".{folder.name}.next-*"):
        shutil.rmtree(left, ignore_errors=True)


def file_contents(folder: Path, under: str) -> dict[str, bytes]:
    """Return the files below a path of the folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted((folder / under).rglob("*"))
        if path.is_file()
    }


def list_files(folder: Path) -> set[str]:
    """Return the paths of all files in the folder."""
    return {path for path, is_folder in _tree(folder) if not is_folder}


def _tree(folder: str | Path, inside: str = "") -> Iterator[tuple[str, bool]]:
    """Yield path and whether it is a folder of all that is below a folder, parents first.

    A dataset of many nights has a hundred thousand of them, for which `Path` is too slow and large.
    """
    if not inside and not Path(folder).is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            path, is_folder = inside + entry.name, entry.is_dir(follow_symlinks=False)
            yield path, is_folder
            if is_folder:
                yield from _tree(entry.path, f"{path}/")


def _is_same(path: Path, data: bytes | Path) -> bool:
    if not path.is_file():
        return False
    size = data.stat().st_size if isinstance(data, Path) else len(data)
    if path.stat().st_size != size:
        return False
    return path.read_bytes() == (data.read_bytes() if isinstance(data, Path) else data)


def _link(source: Path, target: Path, *, leave_out: set[str]) -> None:
    """Link all files but those left out; a folder of data that would have none is not made."""
    made = {""}
    for path, is_folder in _tree(source):
        if path in leave_out or (is_folder and path.startswith(_OF_BATCHES)):
            continue
        folder = path if is_folder else path.rpartition("/")[0]
        if folder not in made:
            Path(f"{target}/{folder}").mkdir(parents=True, exist_ok=True)
            made.add(folder)
        if not is_folder:
            here, there = f"{source}/{path}", f"{target}/{path}"
            try:
                os.link(here, there, follow_symlinks=False)
            except OSError:  # another file system, or one without hard links
                shutil.copy2(here, there, follow_symlinks=False)


def _write(path: Path, data: bytes | Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(data, Path):
        shutil.copyfile(data, path)
    else:
        path.write_bytes(data)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _swap(folder: Path, next_version: Path) -> None:
    if not folder.exists():
        next_version.rename(folder)
    elif not _exchange(folder, next_version):
        old = folder.with_name(f".{folder.name}.old-{uuid4().hex[:8]}")
        folder.rename(old)
        next_version.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def _exchange(folder: Path, next_version: Path) -> bool:
    """Swap two folders in one step, where the system can."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    paths = os.fsencode(folder), os.fsencode(next_version)
    return rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0


_N_KEPT = 2
"""Versions that stay: who reads the one before the newest may finish."""


def newest(place: Place) -> Place | None:
    """Return the folder of the present version, or None if nothing is published.

    For a local dataset, this is `place` itself.
    """
    if isinstance(place, Path):
        return place if place.is_dir() else None
    with translated(place, "read"):
        marks = sorted(place.glob("*.json"), key=lambda path: _number_of(path.name))
        return place / json.loads(marks[-1].read_text("utf-8"))["folder"] if marks else None


def local_copy(place: Place, folder: Path) -> Path:
    """Return the dataset as a local folder: `place` itself, or a copy of the newest version.

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

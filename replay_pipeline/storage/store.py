"""Access the place of tables, a local folder or a prefix on an object store, by the same code.

fsspec opens a URL such as `s3://bucket/root`. The store's own client takes credentials, endpoint,
and region from the environment, never from a setting.
"""

import io
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from replay_pipeline.errors import ConfigError, MissingDependencyError, StorageError
from replay_pipeline.storage.outages import CHECK, translated

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from replay_pipeline.storage.object_paths import ObjectPath

    Place: TypeAlias = Path | ObjectPath
else:
    # The clients of object stores take a while to import, and most runs need none.
    Place = Any

_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "azure"),
}
_N_COPIES_AT_ONCE = 16


def as_path(place: object) -> Place:
    """Return the path that `place` names: a local path, a `file://` path, or a URL for fsspec.

    Raises:
        ConfigError: the scheme of the URL is unknown.
        MissingDependencyError: the package for the store isn't installed.
    """
    text = str(place)
    scheme, mark, rest = text.partition("://")
    if not mark:
        return Path(text)
    if scheme in ("file", "local"):
        return Path(rest)
    try:
        from replay_pipeline.storage.object_paths import ObjectPath  # noqa: PLC0415

        # With a cached listing, what another machine wrote would stay unseen.
        path = ObjectPath(text.rstrip("/"), use_listings_cache=False)
        path.fs  # noqa: B018 (imports the client of the store)
    except ImportError as error:
        extra = _EXTRAS.get(scheme, "s3")
        raise MissingDependencyError(
            f"{text}: {error}; pip install 'replay-pipeline[{extra}]'"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{text}: {error}; name a folder, s3://... or gs://...") from error
    return path


def check_reachable(root: Place) -> None:
    """Check that an object store answers and has the bucket. A missing local folder is fine.

    Raises:
        StorageError: the store doesn't answer, refuses the credentials, or doesn't have the bucket.
    """
    if isinstance(root, Path) or not root.drive:
        return
    with translated(root, "reached"):
        is_there = root.fs.exists(root.drive)
    if not is_there:
        raise StorageError(
            f"{root}: there is no bucket {root.drive!r}, or you may not access it. {CHECK}"
        )


@contextmanager
def written_whole(
    path: Place, *, is_new: bool = False, is_private: bool = False
) -> Iterator[BinaryIO]:
    """Open a file that appears at `path` as a whole or not at all.

    A local file is written under another name and renamed at the end. On an object store, it is one
    request.

    Args:
        path: path of the file.
        is_new: refuse to replace a file, by a conditional request to the store.
        is_private: whether only its owner may read it. Otherwise the umask decides.

    Raises:
        FileExistsError: `is_new` is set, and the file exists.
        StorageError: the folder can't be written, the disk is full, or the store refused. `path` is
            unchanged.
    """
    if isinstance(path, Path):
        with _renamed(path, is_new=is_new, mode=0o600 if is_private else 0o666) as file:
            yield file
        return
    buffer = io.BytesIO()
    yield buffer
    with translated(path, "written"):
        mode = "create" if is_new else "overwrite"
        path.fs.pipe_file(path.path, buffer.getvalue(), mode=mode)


@contextmanager
def _renamed(path: Path, *, is_new: bool, mode: int) -> Iterator[BinaryIO]:
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not `mkstemp`, whose files ignore the umask.
        unfinished = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        handle = os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        temporary = unfinished
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            path.hardlink_to(temporary)
        else:
            temporary.replace(path)
    except OSError as error:
        if is_new and isinstance(error, FileExistsError):
            raise
        raise StorageError(
            f"{path}: cannot be written ({error.strerror or error}); nothing was changed. "
            "Check the folder's permissions and free space."
        ) from error
    finally:
        if temporary:
            temporary.unlink(missing_ok=True)


def stamps_below(folder: Place) -> dict[str, str]:
    """Return a stamp for each file below a folder, which changes when the file is rewritten.

    On an object store, it takes one listing and reads no file.
    """
    files, start = _opened(folder)
    with translated(folder, "listed"):
        found: Any = files.find(start, detail=True)
    return {
        key[len(start) + 1 :]: repr(sorted(info.items())) for key, info in sorted(found.items())
    }


def files_below(folder: Place) -> list[str]:
    """Return the relative paths of all files below a folder, sorted."""
    return list(stamps_below(folder))


def folders_in(folder: Place) -> list[str]:
    """Return the names of the folders directly in a folder, sorted. Empty if it doesn't exist."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def names_of_json(folder: Place) -> list[str]:
    """Return the names, without suffix, of the JSON files directly in a folder, sorted. Empty if it doesn't exist."""
    if not isinstance(folder, Path):
        names = [path.name for path in folder.glob("*.json")]
    elif folder.is_dir():
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    else:
        names = []
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def read_files(folder: Place, names: Sequence[str]) -> list[bytes | None]:
    """Read files below a folder, in the order of `names`. A missing file is None.

    On an object store, many requests run at once.

    Raises:
        StorageError: the store doesn't answer, or refuses.
    """
    files, start = _opened(folder)
    paths = [f"{start}/{name}" for name in names]
    with translated(folder, "read"):
        found = files.cat(paths, on_error="return") if paths else {}
        for result in found.values():
            if isinstance(result, Exception) and not isinstance(result, FileNotFoundError):
                raise result
    results = [found[path] for path in paths]
    return [result if isinstance(result, bytes) else None for result in results]


_READ: dict[tuple[str, str], dict[str, tuple[str, bytes]]] = {}
"""The stamp and the bytes of each JSON file that was read, by data root and folder."""


def json_files(root: Place, folder: str) -> list[tuple[str, bytes]]:
    """Return the name and the bytes of each JSON file directly in a folder of `root`, sorted by name.

    A process reads a file again only if it has changed.

    Raises:
        StorageError: the object store with the files can't be reached.
    """
    place = root / folder
    if isinstance(place, Path) and not place.is_dir():
        return []
    stamps = _stamps(place)
    known = _READ.get((str(root), folder), {})
    new = [name for name, stamp in stamps.items() if known.get(name, ("",))[0] != stamp]
    read = dict(zip(new, read_files(place, new), strict=True))
    found: dict[str, tuple[str, bytes]] = {}
    for name, stamp in stamps.items():
        data = read[name] if name in read else known[name][1]
        if data is not None:
            found[name] = stamp, data
    _READ[str(root), folder] = found
    return [(name, data) for name, (_, data) in found.items()]


def _stamps(folder: Place) -> dict[str, str]:
    """Return what differs once a file is written again, of each JSON file in a folder."""
    if not isinstance(folder, Path):
        stamps = stamps_below(folder)
    else:
        with os.scandir(folder) as entries:
            stamps = {
                entry.name: f"{stat.st_mtime_ns}:{stat.st_size}:{stat.st_ino}"
                for entry in entries
                if entry.is_file()
                for stat in [entry.stat()]
            }
    return {
        name: stamp
        for name, stamp in sorted(stamps.items())
        if name.endswith(".json") and "/" not in name and not name.startswith(".")
    }


def copy_files(source: Place, target: Place, names: Iterable[str]) -> None:
    """Copy files from one folder to another, many at once.

    Each folder is on this machine or on an object store.

    Raises:
        StorageError: a file can't be copied. Others may have been.
    """

    def one(name: str) -> None:
        here, there = source / name, target / name
        with translated(there, f"copied from {here}"):
            if isinstance(here, Path) or isinstance(there, Path):
                with written_whole(there) as file:
                    file.write(here.read_bytes())
            else:
                there.fs.cp_file(here.path, there.path)

    with ThreadPoolExecutor(_N_COPIES_AT_ONCE) as pool:
        for _ in pool.map(one, names):
            pass


def remove_tree(folder: Place) -> None:
    """Delete a folder and everything below it, if it exists.

    Raises:
        StorageError: it can't be deleted.
    """
    files, start = _opened(folder)
    with translated(folder, "deleted"):
        if files.exists(start):
            files.rm(start, recursive=True)


def _opened(place: Place) -> "tuple[AbstractFileSystem, str]":
    """Return the file system that holds `place`, and its path there."""
    if not isinstance(place, Path):
        return place.fs, place.path.rstrip("/")
    from fsspec.implementations.local import LocalFileSystem  # noqa: PLC0415

    return LocalFileSystem(), str(place.absolute())

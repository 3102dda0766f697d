"""Where tables lie: a folder of this machine, or a prefix of an object store, by the same code.

A URL such as `s3://bucket/root` is opened by fsspec. Credentials, endpoint and region are what the
store's own client finds in the environment; none is ever taken from a setting.
"""

import io
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from replay_pipeline.errors import ConfigError, MissingDependencyError, StorageError
from replay_pipeline.storage.outages import CHECK, translated

_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "azure"),
}
_N_COPIES_AT_ONCE = 16


def as_path(place: object) -> Path:
    """The path that `place` names: a local path, a `file://` path, or a URL that fsspec opens.

    A path on an object store is typed as `Path`, since it has the same interface, though it is no
    `os.PathLike`; `is_local` tells them apart.

    Raises:
        ConfigError: no store is known for the scheme of the URL.
        MissingDependencyError: the package that speaks to the store is not installed.
    """
    text = str(place)
    scheme, mark, rest = text.partition("://")
    if not mark:
        return Path(text)
    if scheme in ("file", "local"):
        return Path(rest)
    extra = _EXTRAS.get(scheme, "s3")
    try:
        # Needed for object stores only.
        from replay_pipeline.storage.object_paths import ObjectPath  # noqa: PLC0415

        # With a cached listing, what another machine wrote would stay unseen.
        path: Any = ObjectPath(text.rstrip("/"), use_listings_cache=False)
        path.fs  # noqa: B018 (imports the client of the store)
    except ImportError as error:
        raise MissingDependencyError(
            f"{text}: {error}; pip install 'replay-pipeline[{extra}]'"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{text}: {error}; name a folder, s3://... or gs://...") from error
    return path


def is_local(path: Path) -> bool:
    """Whether `path` is on a file system of this machine."""
    return isinstance(path, Path)


def check_reachable(root: Path) -> None:
    """See that an object store answers and has the bucket; a local folder is made when needed.

    Raises:
        StorageError: it does not answer, refuses the credentials, or has no such bucket.
    """
    if is_local(root):
        return
    store: Any = root
    with translated(root, "reached"):
        is_there = not store.drive or store.fs.exists(store.drive)
    if not is_there:
        raise StorageError(
            f"{root}: there is no bucket {store.drive!r}, or it may not be seen from here. {CHECK}"
        )


@contextmanager
def put_whole(path: Path, *, is_new: bool = False) -> Iterator[BinaryIO]:
    """Open an object that appears under `path` with one request at the end, or not at all.

    Args:
        path: where, on an object store.
        is_new: refuse to replace an object, by the store's own conditional request.

    Raises:
        FileExistsError: `is_new`, and there is such an object.
        StorageError: the store refused; `path` is as before.
    """
    target: Any = path
    buffer = io.BytesIO()
    yield buffer
    with translated(path, "written"):
        mode = "create" if is_new else "overwrite"
        target.fs.pipe_file(target.path, buffer.getvalue(), mode=mode)


def stamps_below(folder: Path) -> dict[str, object]:
    """For each file below a folder, by its path inside it: what differs once it is written again.

    One listing on an object store; nothing is read.
    """
    if is_local(folder):
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in paths}
    there: Any = folder
    with translated(folder, "listed"):
        found = there.fs.find(there.path, detail=True)
    start = len(there.path.rstrip("/")) + 1
    return {key[start:]: repr(sorted(info.items())) for key, info in sorted(found.items())}


def files_below(folder: Path) -> list[str]:
    """Every file below a folder, by its path inside it, sorted."""
    return list(stamps_below(folder))


def read_files(folder: Path, names: Sequence[str]) -> list[bytes | None]:
    """The bytes of files below a folder, in the order of `names`; `None` for one that is not there.

    On an object store many requests are under way at once.

    Raises:
        StorageError: the store does not answer, or refuses.
    """
    if is_local(folder):
        return [_bytes_of(folder / name) for name in names]
    there: Any = folder
    paths = [f"{there.path.rstrip('/')}/{name}" for name in names]
    with translated(folder, "read"):
        found = there.fs.cat(paths, on_error="return") if paths else {}
        for result in found.values():
            if isinstance(result, Exception) and not isinstance(result, FileNotFoundError):
                raise result
    results = [found[path] for path in paths]
    return [result if isinstance(result, bytes) else None for result in results]


def _bytes_of(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy files from one folder to another, many at once.

    The folders are on this machine, on an object store, or one on each.

    Raises:
        StorageError: one cannot be copied; the others may have been.
    """

    def one(name: str) -> None:
        _copy(source / name, target / name)

    with ThreadPoolExecutor(_N_COPIES_AT_ONCE) as pool:
        for _ in pool.map(one, names):
            pass


def _copy(source: Path, target: Path) -> None:
    with translated(target, f"copied from {source}"):
        if is_local(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            aside = target.with_name(f".{target.name}.aside")
            aside.write_bytes(source.read_bytes())
            aside.replace(target)
        elif is_local(source):
            target.write_bytes(source.read_bytes())
        else:
            here, there = cast("Any", source), cast("Any", target)
            there.fs.cp_file(here.path, there.path)


def remove_tree(folder: Path) -> None:
    """Delete a folder and everything below it, if it is there.

    Raises:
        StorageError: it cannot be deleted.
    """
    if is_local(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    there: Any = folder
    with translated(folder, "deleted"):
        if there.exists():
            there.fs.rm(there.path, recursive=True)

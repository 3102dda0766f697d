"""The door to object stores: five verbs, one of which decides every race.

`put_if_absent` is the only verb that the protocol trusts to be atomic. Every payload is named by
its hash and checked after reading, so a torn, late or stale object costs time and nothing else.
"""

import logging
import os
import threading
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import fsspec

from trainer.diloco.hub_store import HubStore
from trainer.errors import ObjectStoreError, TrainerConfigError

__all__ = ["FileStore", "FsspecStore", "MemoryStore", "ObjectStore", "open_store"]

logger = logging.getLogger(__name__)

CONDITIONAL_CREATE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
"""fsspec protocols whose `pipe_file(mode="create")` is one conditional request."""


class ObjectStore(Protocol):
    """What a round needs of a store. Every method may raise `ObjectStoreError`."""

    def put(self, key: str, data: bytes) -> None:
        """Write an object whole; readers see the old or the new bytes, never a part."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless the key exists; True if this call created it."""
        ...

    def get(self, key: str) -> bytes | None:
        """Return an object's bytes, or None if there is no such key."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """Return the sorted keys under a prefix that ends with a slash."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys; those that do not exist are passed over."""
        ...


class MemoryStore:
    """A store inside one process, shared by its threads."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes) -> None:
        """Write an object."""
        with self._lock:
            self._objects[key] = bytes(data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless the key exists."""
        with self._lock:
            if key in self._objects:
                return False
            self._objects[key] = bytes(data)
            return True

    def get(self, key: str) -> bytes | None:
        """Return an object's bytes, or None."""
        with self._lock:
            return self._objects.get(key)

    def keys(self, prefix: str) -> list[str]:
        """Return the sorted keys under a prefix."""
        with self._lock:
            return sorted(key for key in self._objects if key.startswith(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys."""
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)


class FileStore:
    """A folder as a store: written aside and synced, then linked or renamed into place.

    `os.link` fails if the name exists, on local disks and on NFS alike, which makes it the
    conditional create that `open(..., "x")` is not: the name never shows unfinished bytes.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def put(self, key: str, data: bytes) -> None:
        """Write an object; the rename is atomic."""
        try:
            self._written_aside(key, data).replace(self.root / key)
        except OSError as error:
            raise _failed("write", self.root / key, error) from error

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless the name exists."""
        try:
            aside = self._written_aside(key, data)
        except OSError as error:
            raise _failed("write", self.root / key, error) from error
        try:
            (self.root / key).hardlink_to(aside)
        except FileExistsError:
            return False
        except OSError as error:
            raise _failed("link", self.root / key, error) from error
        finally:
            aside.unlink(missing_ok=True)
        return True

    def get(self, key: str) -> bytes | None:
        """Return an object's bytes, or None."""
        try:
            return (self.root / key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _failed("read", self.root / key, error) from error

    def keys(self, prefix: str) -> list[str]:
        """Return the sorted keys under a prefix; unfinished writes are not among them."""
        keys: list[str] = []
        for folder, _, names in os.walk(self.root / prefix):
            here = Path(folder).relative_to(self.root).as_posix()
            keys += [f"{here}/{name}" for name in names if not name.startswith(".aside-")]
        return sorted(keys)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys."""
        for key in keys:
            try:
                (self.root / key).unlink(missing_ok=True)
            except OSError as error:
                raise _failed("delete", self.root / key, error) from error

    def _written_aside(self, key: str, data: bytes) -> Path:
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".aside-{uuid.uuid4().hex}")
        with aside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return aside


class FsspecStore:
    """Any fsspec file system with a conditional create: S3 and its kin, Google, Azure.

    Listing caches are off: with them a key put by another machine stays invisible, to `exists`
    too.
    """

    def __init__(self, uri: str, options: Mapping[str, Any] | None = None) -> None:
        settings = {"use_listings_cache": False, "skip_instance_cache": True, **(options or {})}
        try:
            self._files, root = fsspec.core.url_to_fs(uri, **settings)
        except (ImportError, ValueError) as error:
            raise TrainerConfigError(f"{uri}: {error}") from error
        self._root = root.rstrip("/") + "/"

    def put(self, key: str, data: bytes) -> None:
        """Write an object; object stores show it whole or not at all."""
        self._call("write", key, lambda path: self._files.pipe_file(path, data))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless the key exists, by the store's own conditional request."""
        return self._call("create", key, lambda path: self._create(path, data))

    def get(self, key: str) -> bytes | None:
        """Return an object's bytes, or None."""
        return self._call("read", key, self._read)

    def keys(self, prefix: str) -> list[str]:
        """Return the sorted keys under a prefix."""
        found = self._call("list", prefix, self._find)
        return sorted(str(path).removeprefix(self._root) for path in found)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys."""
        for key in keys:
            self._call("delete", key, self._remove)

    def _create(self, path: str, data: bytes) -> bool:
        try:
            self._files.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        return True

    def _read(self, path: str) -> bytes | None:
        try:
            return self._files.cat_file(path)
        except FileNotFoundError:
            return None

    def _find(self, path: str) -> list[str]:
        try:
            return self._files.find(path)
        except FileNotFoundError:
            return []

    def _remove(self, path: str) -> None:
        try:
            self._files.rm_file(path)
        except FileNotFoundError:
            return

    def _call(self, verb: str, key: str, request: Any) -> Any:
        path = self._root + key
        try:
            return request(path)
        except Exception as error:
            raise _failed(verb, path, error) from error


_memory: dict[str, MemoryStore] = {}


def open_store(uri: str, *, options: Mapping[str, Any] | None = None) -> ObjectStore:
    """Open the store that a URI names.

    Args:
        uri: `file:///path` or a plain path, `memory://name` (one process), `s3://bucket/prefix`,
            `gs://…`, `abfs://…`, `hf://datasets/owner/name/prefix`.
        options: Options of the fsspec file system, such as `endpoint_url` for S3.

    Raises:
        TrainerConfigError: The scheme is unknown, its package is missing, or it has no
            conditional create, without which two replicas could commit two truths.
    """
    scheme = urlsplit(uri).scheme
    if scheme in {"", "file", "local"}:
        return FileStore(uri.removeprefix(f"{scheme}://"))
    if scheme == "memory":
        return _memory.setdefault(uri.rstrip("/"), MemoryStore())
    if scheme == "hf":
        return HubStore(uri, options)
    if scheme in CONDITIONAL_CREATE:
        return FsspecStore(uri, options)
    raise TrainerConfigError(
        f"{uri}: no conditional create is known for {scheme}://; use file://, s3://, gs://, "
        "abfs:// or hf://datasets/owner/name"
    )


def _failed(verb: str, path: object, error: Exception) -> ObjectStoreError:
    return ObjectStoreError(f"cannot {verb} {path}: {type(error).__name__}: {error}")

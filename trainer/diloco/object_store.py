"""The interface to object stores: five operations, one of which decides every race.

The protocol needs only `put_if_absent` to be atomic. Every payload is named by its hash and checked
after reading, so an incomplete, late, or stale object costs only time.
"""

import contextlib
import os
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from trainer.errors import ObjectStoreError, TrainerConfigError

Result = TypeVar("Result")

CONDITIONAL_CREATE = frozenset({"s3", "s3a", "gs", "gcs"})
"""fsspec protocols whose `pipe_file(mode="create")` is one conditional request."""


class ObjectStore(ABC):
    """The operations of a store that a round needs.

    Every operation raises `ObjectStoreError` if the store fails, and can be retried. A store
    implements the five methods that begin with an underscore, with its own errors.
    """

    place: str = ""
    """Prefix of keys in error messages."""

    def put(self, key: str, data: bytes) -> None:
        """Write an object as a whole. Readers see the old or the new bytes, never a part."""
        self._asked("write", key, lambda: self._put(key, data))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless the key exists, and return whether this call created it."""
        return self._asked("create", key, lambda: self._create(key, data))

    def get(self, key: str) -> bytes | None:
        """Return an object's bytes, or None if the key doesn't exist."""
        return self._asked("read", key, lambda: self._get(key))

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the bytes of several objects, read at the same time."""
        with ThreadPoolExecutor(max_workers=8) as pool:
            return list(pool.map(self.get, keys))

    def keys(self, prefix: str) -> list[str]:
        """Return the sorted keys under a prefix, which is empty or ends with a slash."""
        return sorted(self._asked("list", prefix, lambda: self._keys(prefix)))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys. Missing keys are ignored."""
        wanted = sorted(set(keys))
        if wanted:
            self._asked("delete", wanted[0], lambda: self._delete(wanted))

    def _asked(self, verb: str, key: str, request: Callable[[], Result]) -> Result:
        try:
            return request()
        except (ObjectStoreError, TrainerConfigError):
            raise
        except Exception as error:  # each client has its own, and all mean: try again
            why = f"{type(error).__name__}: {error}"
            raise ObjectStoreError(f"cannot {verb} {self.place}{key}: {why}") from error

    @abstractmethod
    def _put(self, key: str, data: bytes) -> None: ...

    @abstractmethod
    def _create(self, key: str, data: bytes) -> bool: ...

    @abstractmethod
    def _get(self, key: str) -> bytes | None: ...

    @abstractmethod
    def _keys(self, prefix: str) -> Iterable[str]: ...

    @abstractmethod
    def _delete(self, keys: list[str]) -> None: ...


class MemoryStore(ObjectStore):
    """A store inside one process, shared by its threads."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def _put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._objects[key] = bytes(data)

    def _create(self, key: str, data: bytes) -> bool:
        with self._lock:
            is_absent = key not in self._objects
            self._objects.setdefault(key, bytes(data))
            return is_absent

    def _get(self, key: str) -> bytes | None:
        with self._lock:
            return self._objects.get(key)

    def _keys(self, prefix: str) -> list[str]:
        with self._lock:
            return [key for key in self._objects if key.startswith(prefix)]

    def _delete(self, keys: list[str]) -> None:
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)


class FileStore(ObjectStore):
    """A folder as a store. Files are written under another name, synced, and then linked or renamed.

    `os.link` fails if the name exists, on local disks and on NFS. So it is a conditional create
    that never shows unfinished bytes, unlike `open(..., "x")`.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.place = f"{root}/"

    def _put(self, key: str, data: bytes) -> None:
        self._written_aside(key, data).replace(self.root / key)

    def _create(self, key: str, data: bytes) -> bool:
        aside = self._written_aside(key, data)
        try:
            (self.root / key).hardlink_to(aside)
        except FileExistsError:
            return False
        finally:
            aside.unlink(missing_ok=True)
        return True

    def _get(self, key: str) -> bytes | None:
        try:
            return (self.root / key).read_bytes()
        except FileNotFoundError:
            return None

    def _keys(self, prefix: str) -> list[str]:
        keys: list[str] = []
        for folder, _, names in os.walk(self.root / prefix):
            here = Path(folder).relative_to(self.root)
            keys += [(here / name).as_posix() for name in names if not name.startswith(".aside-")]
        return keys

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            (self.root / key).unlink(missing_ok=True)

    def _written_aside(self, key: str, data: bytes) -> Path:
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".aside-{uuid.uuid4().hex}")
        with aside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return aside


class FsspecStore(ObjectStore):
    """Any fsspec file system with a conditional create: S3 and compatible stores, and Google.

    Listing caches are off, because they would hide keys that another machine puts, even from
    `exists`.
    """

    def __init__(self, uri: str, options: Mapping[str, Any] | None = None) -> None:
        settings = {"use_listings_cache": False, "skip_instance_cache": True, **(options or {})}
        try:
            self._files, root = fsspec.core.url_to_fs(uri, **settings)
        except (ImportError, ValueError) as error:
            raise TrainerConfigError(f"{uri}: {error}") from error
        self._root = self.place = root.rstrip("/") + "/"

    def _put(self, key: str, data: bytes) -> None:
        self._files.pipe_file(self._root + key, data)

    def _create(self, key: str, data: bytes) -> bool:
        try:
            self._files.pipe_file(self._root + key, data, mode="create")
        except FileExistsError:
            return False
        return True

    def _get(self, key: str) -> bytes | None:
        try:
            return self._files.cat_file(self._root + key)
        except FileNotFoundError:
            return None

    def _keys(self, prefix: str) -> list[str]:
        try:
            found = self._files.find(self._root + prefix)
        except FileNotFoundError:
            return []
        return [str(path).removeprefix(self._root) for path in found]

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._root + key)


MAX_CONFLICTS = 20
TYPES = {"datasets": "dataset", "spaces": "space"}


class HubStore(ObjectStore):
    """A repository of the Hugging Face Hub as a store, in which every write is a commit.

    Buckets of the Hub have no conditional write, but commits do. `put_if_absent` commits on top of
    the revision in which the file was missing, and the Hub refuses if somebody else has committed
    since. The Hub limits commits per hour, so this store is for rounds of many minutes.

    Raises:
        TrainerConfigError: The URI names a bucket, or no repository.
    """

    def __init__(self, uri: str, options: Mapping[str, Any] | None = None) -> None:
        path = uri.removeprefix("hf://").strip("/")
        if path.startswith("buckets/"):
            raise TrainerConfigError(
                f"{uri}: buckets have no conditional write; use a repository, such as "
                "hf://datasets/owner/name"
            )
        kind, _, rest = path.partition("/")
        self._type = TYPES.get(kind, "model")
        parts = (rest if kind in TYPES else path).split("/")
        if len(parts) < 2 or not all(parts[:2]):
            raise TrainerConfigError(f"{uri}: expected hf://datasets/owner/name/prefix")
        self._repo = "/".join(parts[:2])
        self._prefix = "".join(f"{part}/" for part in parts[2:])
        settings = dict(options or {})
        self._api = HfApi(endpoint=settings.get("endpoint"), token=settings.get("token"))

    def _put(self, key: str, data: bytes) -> None:
        self._commit([self._add(key, data)])

    def _create(self, key: str, data: bytes) -> bool:
        for _ in range(MAX_CONFLICTS):
            head = self._api.repo_info(self._repo, repo_type=self._type).sha
            if self._read(key, head) is not None:
                return False
            try:
                self._commit([self._add(key, data)], head)
            except HfHubHTTPError as error:
                # Somebody else has committed since: look again whether the file is there.
                if error.response is None or error.response.status_code not in (409, 412):
                    raise
            else:
                return True
        raise ObjectStoreError(f"cannot create {key}: other writers kept changing the repository")

    def _get(self, key: str) -> bytes | None:
        return self._read(key, "main")

    def _delete(self, keys: list[str]) -> None:
        there = set(keys) & set(self._keys(""))
        if there:
            paths = [self._prefix + key for key in sorted(there)]
            self._commit([CommitOperationDelete(path_in_repo=path) for path in paths])

    def _add(self, key: str, data: bytes) -> CommitOperationAdd:
        return CommitOperationAdd(path_in_repo=self._prefix + key, path_or_fileobj=data)

    def _commit(self, operations: list[Any], parent: str | None = None) -> None:
        self._api.create_commit(
            self._repo,
            operations=operations,
            commit_message="outer loop",
            repo_type=self._type,
            parent_commit=parent,
        )

    def _read(self, key: str, revision: str | None) -> bytes | None:
        name, at = self._prefix + key, self._api.endpoint
        url = hf_hub_url(self._repo, name, repo_type=self._type, revision=revision, endpoint=at)
        headers = build_hf_headers(token=self._api.token)
        response = get_session().get(url, headers=headers, follow_redirects=True)
        try:
            hf_raise_for_status(response)
        except EntryNotFoundError:
            return None
        return response.content

    def _keys(self, prefix: str) -> list[str]:
        folder = (self._prefix + prefix).rstrip("/") or None
        try:
            tree = list(
                self._api.list_repo_tree(self._repo, folder, recursive=True, repo_type=self._type)
            )
        except EntryNotFoundError:
            return []
        paths = [entry.path for entry in tree if isinstance(entry, RepoFile)]
        return [path.removeprefix(self._prefix) for path in paths]


_memory: dict[str, MemoryStore] = {}


def open_store(uri: str, *, options: Mapping[str, Any] | None = None) -> ObjectStore:
    """Open the store that a URI names.

    Args:
        uri: `file:///path` or a plain path, `memory://name` (one process), `s3://bucket/prefix`,
            `gs://…`, `hf://datasets/owner/name/prefix`.
        options: Options of the fsspec file system, such as `endpoint_url` for S3.

    Raises:
        TrainerConfigError: The scheme is unknown, its package is missing, or it has no conditional
            create. Without that, two replicas could commit different decisions.
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
        f"{uri}: no conditional create is known for {scheme}://; use file://, s3://, gs:// or "
        "hf://datasets/owner/name"
    )


def check_store(uri: str) -> None:
    """Write a test object to a store, read it back, and delete it.

    Raises:
        ObjectStoreError: The store doesn't answer, or returns other bytes.
        TrainerConfigError: The store's package is missing.
    """
    store, key, data = open_store(uri), f"probe/{uuid.uuid4().hex}", os.urandom(64)
    store.put(key, data)
    if store.get(key) != data:
        raise ObjectStoreError(f"{store.place}{key}: other bytes came back than were written")
    store.delete([key])

"""A Hugging Face repository as an object store: every write is a commit.

Buckets of the Hub have no conditional write; commits do. `put_if_absent` commits on top of the
revision in which the file was seen to be missing, and the Hub refuses that if anybody else has
committed since. The Hub limits commits per hour, so this store suits rounds of many minutes.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from trainer.errors import ObjectStoreError, TrainerConfigError

__all__ = ["HubStore"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_CONFLICTS = 20
TYPES = {"datasets": "dataset", "spaces": "space"}


class HubStore:
    """Keeps a run's objects in a repository of the Hub.

    Args:
        uri: `hf://datasets/owner/name/prefix`; without `datasets/` it is a model repository.
        options: `endpoint` and `token`, if not the usual ones.

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
        self._token = settings.get("token")
        self._api = HfApi(endpoint=settings.get("endpoint"), token=self._token)

    def put(self, key: str, data: bytes) -> None:
        """Commit an object."""
        self._asked("write", key, lambda: self._commit([self._add(key, data)], None))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Commit an object unless it exists in the revision committed upon."""
        for _ in range(MAX_CONFLICTS):
            created = self._asked("create", key, lambda: self._create(key, data))
            if created is not None:
                return created
        raise ObjectStoreError(f"cannot create {key}: the repository never stands still")

    def get(self, key: str) -> bytes | None:
        """Return an object's bytes at the newest commit, or None."""
        return self._asked("read", key, lambda: self._read(key, "main"))

    def keys(self, prefix: str) -> list[str]:
        """Return the sorted keys under a prefix."""
        return self._asked("list", prefix, lambda: self._listed(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys in one commit."""
        wanted = set(keys)
        there = wanted & set(self.keys("")) if wanted else set()
        if there:
            operations = [
                CommitOperationDelete(path_in_repo=self._prefix + k) for k in sorted(there)
            ]
            self._asked("delete", min(there), lambda: self._commit(operations, None))

    def _add(self, key: str, data: bytes) -> CommitOperationAdd:
        return CommitOperationAdd(path_in_repo=self._prefix + key, path_or_fileobj=data)

    def _commit(
        self, operations: list[CommitOperationAdd] | list[CommitOperationDelete], parent: str | None
    ) -> None:
        self._api.create_commit(
            self._repo,
            operations=operations,
            commit_message="outer loop",
            repo_type=self._type,
            parent_commit=parent,
        )

    def _create(self, key: str, data: bytes) -> bool | None:
        """Try once; None if somebody else committed in between."""
        head = self._head()
        if self._read(key, head) is not None:
            return False
        try:
            self._commit([self._add(key, data)], head)
        except HfHubHTTPError as error:
            if error.response is None or error.response.status_code not in (409, 412):
                raise
            return None
        return True

    def _head(self) -> str | None:
        return self._api.repo_info(self._repo, repo_type=self._type).sha

    def _read(self, key: str, revision: str | None) -> bytes | None:
        room = "" if self._type == "model" else f"{self._type}s/"
        path = f"{room}{self._repo}/resolve/{revision or 'main'}/{quote(self._prefix + key)}"
        endpoint = self._api.endpoint or constants.ENDPOINT
        headers = build_hf_headers(token=self._token)
        response = get_session().get(f"{endpoint}/{path}", headers=headers, follow_redirects=True)
        try:
            hf_raise_for_status(response)
        except EntryNotFoundError:
            return None
        return response.content

    def _listed(self, prefix: str) -> list[str]:
        try:
            tree = self._api.list_repo_tree(
                self._repo,
                (self._prefix + prefix).rstrip("/") or None,
                recursive=True,
                repo_type=self._type,
            )
            paths = [entry.path for entry in tree if isinstance(entry, RepoFile)]
        except EntryNotFoundError:
            return []
        return sorted(path.removeprefix(self._prefix) for path in paths)

    def _asked(self, verb: str, key: str, request: Callable[[], Result]) -> Result:
        try:
            return request()
        except (HfHubHTTPError, OSError, RuntimeError) as error:
            # The client wraps a failed upload in a plain RuntimeError.
            raise _failed(verb, key, error) from error


def _failed(verb: str, key: str, error: Exception) -> ObjectStoreError:
    return ObjectStoreError(f"cannot {verb} {key} on the Hub: {error}")

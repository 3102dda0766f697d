"""A Hugging Face repository as an object store, in which every write is a commit.

Buckets of the Hub have no conditional write, but commits do. `put_if_absent` commits on top of the
revision in which the file was missing, and the Hub refuses if somebody else has committed since.
The Hub limits commits per hour, so this store is for rounds of many minutes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from trainer.errors import ObjectStoreError, TrainerConfigError
from trainer.outer.object_store import ObjectStore

MAX_CONFLICTS = 20
TYPES = {"datasets": "dataset", "spaces": "space"}


class HubStore(ObjectStore):
    """The store of a run's objects in a repository of the Hub.

    Args:
        uri: `hf://datasets/owner/name/prefix`. Without `datasets/`, it is a model repository.
        options: `endpoint` and `token`, if not the default ones.

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


def upload_model(folder: Path, repo: str) -> None:
    """Upload a model's folder to a private repository of the Hub, in one commit.

    Raises:
        ObjectStoreError: The Hub refused.
    """
    api = HfApi()
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Export the model")
    except (HfHubHTTPError, OSError, RuntimeError) as error:
        raise ObjectStoreError(f"cannot upload to {repo}: {error}") from error

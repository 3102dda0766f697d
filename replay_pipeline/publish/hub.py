"""The only module that talks to the Hugging Face Hub. It changes one dataset repository in whole commits.

A publication owns the files of its batches, and nobody else writes them. The card belongs to all,
and is rebuilt from the manifests of the newest version. Everything goes into one commit on top of
that version. If another commit comes in between, it is made again on top of that one.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay
from tenacity.wait import wait_random_exponential

from replay_pipeline.errors import ConfigError, PublishError
from replay_pipeline.publish import batch_facts, card, layout
from replay_pipeline.settings import config_dir
from replay_pipeline.storage.permissions import make_private_folder
from replay_pipeline.storage.trust import check_binding

logger = logging.getLogger(__name__)

T = TypeVar("T")
Data = bytes | Path
Manifests = Mapping[str, Mapping[str, Any]]
"""Manifests by batch."""

_CONFLICTS = (409, 412)
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_MAX_WAIT_S = 20.0
"""The longest pause between two tries."""
_NETWORK_PACKAGES = ("httpx", "httpx2", "httpcore", "httpcore2")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file in a listing of the repository."""

    git_oid: str
    sha256: str | None
    """Hash of a file in the large-file store."""

    def is_same(self, data: Data) -> bool:
        """Return whether the file has these bytes."""
        content = data.read_bytes() if isinstance(data, Path) else data
        if self.sha256:
            return hashlib.sha256(content).hexdigest() == self.sha256
        header = b"blob %d\0" % len(content)
        return hashlib.sha1(header + content, usedforsecurity=False).hexdigest() == self.git_oid


@dataclass(frozen=True, slots=True)
class Head:
    """The newest version of the repository."""

    sha: str
    files: Mapping[str, RemoteFile]


class ConflictError(PublishError):
    """Another commit came in between."""


class HubDataset:
    """One dataset repository on the Hub. Faults that pass are waited out.

    Args:
        repo_id: `owner/name`.
        token: by default `HF_TOKEN`, or what `hf auth login` has stored.
        endpoint: by default the Hub, or `HF_ENDPOINT`.
        patience_s: how long faults are waited out, in seconds.

    Raises:
        UntrustedError: the token may not be sent to the endpoint.
    """

    def __init__(
        self,
        repo_id: str,
        *,
        token: str | None = None,
        endpoint: str | None = None,
        patience_s: float = 300.0,
    ) -> None:
        self.repo_id = repo_id
        self._api = HfApi(endpoint=endpoint, token=token)
        if token is None:
            check_binding("HF_TOKEN", self._api.endpoint, folder=config_dir())
        self._repo: dict[str, Any] = {"repo_id": repo_id, "repo_type": "dataset"}
        self._patience_s = patience_s

    def retry(self, call: Callable[[], T], *, conflicts: bool = False) -> T:
        """Call until it works, as long as what is in the way passes.

        Raises:
            PublishError: the Hub refused, or the patience is over.
        """
        retrying = Retrying(
            retry=retry_if_exception(
                lambda error: (
                    isinstance(error, _PassingError)
                    or (conflicts and isinstance(error, ConflictError))
                )
            ),
            stop=stop_after_delay(self._patience_s),
            wait=self._wait,
            before_sleep=self._tell,
            reraise=True,
        )
        return retrying(self._call, call)

    def _tell(self, state: RetryCallState) -> None:
        if state.attempt_number == 1 and state.outcome:
            logger.warning(
                "%s; tried again for %.0f s", state.outcome.exception(), self._patience_s
            )

    def _wait(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, _PassingError) and error.retry_after_s is not None:
            return min(error.retry_after_s, self._patience_s)
        return wait_random_exponential(0.1, max=_MAX_WAIT_S)(state)

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except PublishError:
            raise
        except HFValidationError as error:
            raise ConfigError(f"repo_id {self.repo_id!r}: {error}") from error
        except Exception as error:
            if (known := self._translated(error)) is None:
                raise
            raise known from error

    def _translated(self, error: BaseException) -> PublishError | None:
        """Return the fault in our words; the client wraps what went wrong in an upload once more."""
        if isinstance(error, HfHubHTTPError) and not isinstance(error, LocalEntryNotFoundError):
            return self._of_answer(error)
        package = type(error).__module__.split(".")[0]
        if isinstance(error, LocalEntryNotFoundError) or package in _NETWORK_PACKAGES:
            return _PassingError(f"{self.repo_id}: the Hub was not reached ({error})")
        cause = error.__cause__
        return None if cause is None else self._translated(cause)

    def _of_answer(self, error: HfHubHTTPError) -> PublishError:
        status = error.response.status_code
        if status in _CONFLICTS:
            return ConflictError(f"{self.repo_id}: another commit came in between ({status})")
        if status in _TRANSIENT:
            after = error.response.headers.get("Retry-After", "")
            message = f"{self.repo_id}: the Hub answers {status}; nothing was published. Try later"
            return _PassingError(message, float(after) if after.isdigit() else None)
        if status in (401, 403):
            return PublishError(
                f"{self.repo_id}: the Hub refuses ({status}); set HF_TOKEN to a token that may "
                "write to this dataset"
            )
        if isinstance(error, EntryNotFoundError):
            return ConflictError(f"{self.repo_id}: a file is gone that was there ({error})")
        return PublishError(f"{self.repo_id}: {error}")

    def exists(self) -> bool:
        """Return whether the repository exists."""
        return self.retry(lambda: self._api.repo_exists(**self._repo))

    def ensure(self, *, private: bool) -> None:
        """Create the repository if it doesn't exist.

        Raises:
            PublishError: the Hub refused.
        """
        self.retry(lambda: self._api.create_repo(**self._repo, private=private, exist_ok=True))

    def head(self) -> Head:
        """Return the newest version of the main branch."""

        def read() -> Head:
            sha = self._api.dataset_info(self.repo_id, revision="main").sha or ""
            entries = self._api.list_repo_tree(**self._repo, recursive=True, revision=sha)
            files = {
                entry.path: RemoteFile(entry.blob_id, entry.lfs.sha256 if entry.lfs else None)
                for entry in entries
                if isinstance(entry, RepoFile)
            }
            return Head(sha, files)

        return self.retry(read)

    def read(self, path: str, *, revision: str) -> bytes:
        """Return the bytes of a file at a version."""
        name = self.retry(
            lambda: self._api.hf_hub_download(**self._repo, filename=path, revision=revision)
        )
        return Path(name).read_bytes()

    def download(self, folder: Path, suffixes: Iterable[str]) -> Path:
        """Bring the newest files with these suffixes into a private folder, and return it."""
        make_private_folder(folder)
        patterns = [f"*{suffix}" for suffix in suffixes]
        name = self.retry(
            lambda: self._api.snapshot_download(
                **self._repo, local_dir=folder, allow_patterns=patterns
            )
        )
        return Path(name)

    def commit(
        self,
        added: Mapping[str, Data],
        removed: set[str],
        *,
        message: str,
        parent: str,
    ) -> str:
        """Make one commit, which succeeds or fails as a whole.

        Raises:
            ConflictError: another commit came in between. Read the head again.
            PublishError: the Hub refused.
        """
        operations = [CommitOperationDelete(path) for path in sorted(removed)]
        operations += [CommitOperationAdd(path, data) for path, data in sorted(added.items())]

        def create() -> str:
            return self._api.create_commit(
                **self._repo,
                operations=operations,
                commit_message=message,
                parent_commit=parent,
            ).oid

        return self._call(create)

    def tag(self, name: str, *, revision: str, message: str) -> None:
        """Tag a version. An existing tag doesn't move."""
        self.retry(
            lambda: self._api.create_tag(
                **self._repo, tag=name, revision=revision, tag_message=message, exist_ok=True
            )
        )

    def erase(self, is_erased: Callable[[str], bool]) -> None:
        """Delete all earlier versions, and large files, for good."""
        self.retry(lambda: self._api.super_squash_history(**self._repo))
        kept = {file.sha256 for file in self.head().files.values()}

        def delete() -> None:
            files = [
                file
                for file in self._api.list_lfs_files(**self._repo)
                if is_erased(file.filename) and file.file_oid not in kept
            ]
            self._api.permanently_delete_lfs_files(**self._repo, lfs_files=files)

        self.retry(delete)


class _PassingError(PublishError):
    """A fault that passes by itself."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, kw_only=True)
class Publication:
    """The batches, facts, and files of one publication."""

    batches: frozenset[str]
    """Batches whose files it owns. Their other files are removed."""
    files: Mapping[str, Data]
    manifests: Manifests
    facts: Mapping[str, Any]
    """Facts on the card that aren't in the manifests."""
    known: Mapping[str, bytes] = field(default_factory=dict)
    """Known manifests by path, which needn't be read from the Hub."""

    @property
    def message(self) -> str:
        """Return the title of the commit."""
        names = sorted(self.batches)
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"{'Publish' if self.manifests else 'Retract'} {shown}"


def push(hub: HubDataset, brings: Publication) -> tuple[str | None, str, Manifests]:
    """Commit what the Hub lacks of a publication on top of its newest version, then tag that version.

    Returns the new commit, or None if the Hub was up to date or its answer was lost; the tag; and
    the manifests of all batches there.

    Raises:
        PublishError: the Hub refused, or was faulty for too long.
    """
    read: dict[str, bytes] = {}

    def attempt() -> tuple[str | None, str, Manifests]:
        head = hub.head()
        others = remote_manifests(hub, head, owned=brings.batches, known=brings.known, read=read)
        manifests = {**others, **brings.manifests}
        facts = batch_facts.merge_facts(remote_facts(hub, head), brings.facts)
        files: dict[str, Data] = {
            **{path: data for path, data in brings.files.items() if layout.batch_of(path)},
            layout.FACTS: batch_facts.encode(facts),
            layout.CARD: card.render(manifests, facts),
        }
        added = {
            path: data
            for path, data in files.items()
            if path not in head.files or not head.files[path].is_same(data)
        }
        owned = {path for path in head.files if layout.batch_of(path) in brings.batches}
        if not added and owned <= brings.files.keys():
            return None, head.sha, manifests
        removed = owned - brings.files.keys()
        sha = hub.commit(added, removed, message=brings.message, parent=head.sha)
        return sha, sha, manifests

    commit, sha, manifests = hub.retry(attempt, conflicts=True)
    name = f"data-{batch_facts.content_digest(manifests)}"
    hub.tag(name, revision=sha, message=brings.message)
    return commit, name, manifests


def remote_manifests(
    hub: HubDataset,
    head: Head,
    *,
    known: Mapping[str, bytes],
    owned: Collection[str] = (),
    read: dict[str, bytes] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the manifests of batches that others own. `read` caches downloads."""
    read = {} if read is None else read
    manifests: dict[str, dict[str, Any]] = {}
    for path, file in head.files.items():
        batch = layout.batch_of(path)
        if batch is None or batch in owned or path != layout.manifest_path(batch):
            continue
        if path in known and file.is_same(known[path]):
            manifests[batch] = json.loads(known[path])
            continue
        if file.git_oid not in read:
            read[file.git_oid] = hub.read(path, revision=head.sha)
        manifests[batch] = json.loads(read[file.git_oid])
    return manifests


def remote_facts(hub: HubDataset, head: Head) -> dict[str, Any]:
    """Return the facts on the Hub's card that aren't in a manifest."""
    if layout.FACTS not in head.files:
        return {}
    return json.loads(hub.read(layout.FACTS, revision=head.sha))

"""Push a publication to a repository on the Hub, even if others publish at the same time.

A publication owns the files of its batches, and nobody else writes them. The card belongs to all,
and is rebuilt from the manifests of the newest version. Everything goes into one commit on top of
that version. If others are always faster, the owned files are committed without a parent, which is
safe, and the card follows.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from replay_pipeline.errors import PublishError
from replay_pipeline.publish import batch_facts, card, layout
from replay_pipeline.publish.hub import ConflictError, Data, Head, HubDataset

logger = logging.getLogger(__name__)

_MAX_CONFLICTS = 5


@dataclass(frozen=True, kw_only=True)
class Publication:
    """The batches, facts, and files of one publication."""

    batches: frozenset[str]
    """Batches whose files it owns. Their other files are removed."""
    files: Mapping[str, Data]
    manifests: Mapping[str, Mapping[str, Any]]
    facts: Mapping[str, Any]
    """Facts on the card that aren't in the manifests."""
    known: Mapping[str, bytes] = field(default_factory=dict)
    """Known manifests by path, which needn't be read from the Hub."""

    @property
    def digest(self) -> str:
        """Return a hash of the publication's contents."""
        names = sorted(path for path in self.files if layout.batch_of(path))
        return hashlib.sha256(
            "\n".join([*names, batch_facts.content_digest(self.manifests)]).encode()
        ).hexdigest()[:12]

    @property
    def message(self) -> str:
        """Return the title of the commit."""
        names = sorted(self.batches)
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        verb = "Publish" if self.manifests else "Retract"
        return f"{verb} {shown} ({self.digest})"


@dataclass(frozen=True, kw_only=True)
class Synced:
    """The state of the Hub after a push."""

    commits: list[str]
    """The new commits, oldest first."""
    tag: str
    manifests: Mapping[str, Mapping[str, Any]]


class Sync:
    """The push of one publication to the Hub."""

    def __init__(self, hub: HubDataset, contribution: Publication) -> None:
        self._hub = hub
        self._brings = contribution
        self._read: dict[str, bytes] = {}
        self._n_conflicts = 0
        self._first_head = ""
        self._was_disturbed = False
        self._commits: list[str] = []

    def run(self) -> Synced:
        """Commit until the Hub has everything, then tag that version.

        Raises:
            PublishError: the Hub refused, or was faulty for too long.
        """
        sha, manifests = self._hub.retry(self._attempt, conflicts=True)
        if self._was_disturbed:  # answers were lost, or others did part of it: look what is ours
            self._commits = self._hub.find_commits(self._brings.message, since=self._first_head)
        name = f"data-{batch_facts.content_digest(manifests)}"
        self._hub.tag(name, revision=sha, message=self._brings.message)
        return Synced(commits=self._commits, tag=name, manifests=manifests)

    def _attempt(self) -> tuple[str, Mapping[str, Mapping[str, Any]]]:
        while True:
            head = self._hub.head()
            self._first_head = self._first_head or head.sha
            others = remote_manifests(self._hub, head, self._brings, self._read)
            manifests = {**others, **self._brings.manifests}
            owned = _changed(
                head, {p: d for p, d in self._brings.files.items() if layout.batch_of(p)}
            )
            removed = {
                path
                for path in head.files
                if layout.batch_of(path) in self._brings.batches and path not in self._brings.files
            }
            shared = _changed(head, self._shared_files(head, manifests))
            if not owned and not removed and not shared:
                return head.sha, manifests
            is_apart = bool(owned or removed) and self._n_conflicts >= _MAX_CONFLICTS
            added = owned if is_apart else {**owned, **shared}
            self._commit(added, removed, parent=None if is_apart else head.sha)

    def _commit(self, added: Mapping[str, Data], removed: set[str], *, parent: str | None) -> None:
        message = self._brings.message
        try:
            sha = self._hub.commit(added, removed, message=message, parent=parent)
        except ConflictError:
            self._was_disturbed = True
            self._n_conflicts += 1
            raise
        except PublishError:
            self._was_disturbed = True
            raise
        self._commits.append(sha)
        self._n_conflicts = 0

    def _shared_files(
        self, head: Head, manifests: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, bytes]:
        facts = batch_facts.merge_facts(remote_facts(self._hub, head), self._brings.facts)
        return {layout.FACTS: batch_facts.encode(facts), layout.CARD: card.render(manifests, facts)}


def remote_manifests(
    hub: HubDataset, head: Head, brings: Publication, read: dict[str, bytes]
) -> dict[str, dict[str, Any]]:
    """Return the manifests of batches that others own. `read` caches downloads."""
    manifests: dict[str, dict[str, Any]] = {}
    for path, file in head.files.items():
        batch = layout.batch_of(path)
        if batch is None or batch in brings.batches or path != layout.manifest_path(batch):
            continue
        if (known := brings.known.get(path)) is not None and file.is_same(known):
            manifests[batch] = json.loads(known)
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


def _changed(head: Head, files: Mapping[str, Data]) -> dict[str, Data]:
    return {
        path: data
        for path, data in files.items()
        if path not in head.files or not head.files[path].is_same(data)
    }

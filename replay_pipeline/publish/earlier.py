"""Read what was published before, from the dataset folder and from the Hub."""

import importlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from replay_pipeline.errors import MissingDependencyError
from replay_pipeline.publish import batch_facts, layout
from replay_pipeline.publish.client_texts import ClientTextTable, taken_out, texts_in
from replay_pipeline.publish.folder import file_contents, list_files
from replay_pipeline.publish.splits import SPLITS, Split, name_sha


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """How to reach the Hub."""

    repo_id: str | None = None
    private: bool = True
    token: str | None = None
    endpoint: str | None = None
    patience_s: float = 300.0

    def open(self) -> Any:
        """Return the repository, which may not exist yet, or None without a `repo_id`."""
        if self.repo_id is None:
            return None
        return hub_room().hub.HubDataset(
            self.repo_id, token=self.token, endpoint=self.endpoint, patience_s=self.patience_s
        )


def hub_room() -> Any:
    """Return the modules that need the Hub's client. A plain folder doesn't need them.

    Raises:
        MissingDependencyError: the Hub's client is not installed.
    """
    try:
        importlib.import_module("replay_pipeline.publish.sync")
    except ImportError as error:
        raise MissingDependencyError(
            f"the Hub's client is missing ({error}): pip install 'replay-pipeline[publish]'"
        ) from error
    return importlib.import_module("replay_pipeline.publish")


def read_manifests(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the manifests of a dataset folder, by batch."""
    return {
        batch: msgspec.json.decode((folder / path).read_bytes())
        for path in sorted(f"{layout.MANIFESTS}/{n}" for n in list_files(folder / layout.MANIFESTS))
        if (batch := layout.batch_of(path)) is not None
    }


@dataclass(frozen=True, kw_only=True)
class Published:
    """The dataset as it is in the folder and on the Hub."""

    folder: Path
    hub: Any
    """The repository, or None if you don't use one."""
    before: dict[str, dict[str, Any]]
    """Manifests of the folder, by batch."""
    manifests: dict[str, dict[str, Any]]
    """Manifests of all batches."""
    facts: dict[str, Any]

    @classmethod
    def at(cls, folder: Path, hub: Any) -> "Published":
        """Read the manifests of all batches, and the facts, from the folder and the Hub."""
        before = read_manifests(folder)
        manifests = dict(before)
        path = folder / layout.FACTS
        facts = json.loads(path.read_text("utf-8")) if path.exists() else {}
        if hub is not None and hub.exists():
            room = hub_room().sync
            head = hub.head()
            known = room.Publication(
                batches=frozenset(),
                files={},
                manifests={},
                facts={},
                known=file_contents(folder, layout.MANIFESTS),
            )
            manifests = {**room.remote_manifests(hub, head, known, {}), **manifests}
            facts = batch_facts.merge_facts(room.remote_facts(hub, head), facts)
        return cls(folder=folder, hub=hub, before=before, manifests=manifests, facts=facts)

    def rows(
        self,
        manifest: Mapping[str, Any],
        config: str,
        named: Mapping[str, str],
        texts: ClientTextTable,
    ) -> Iterator[pa.Table]:
        """Yield the rows of a batch in a config, from the folder or else from the Hub.

        Args:
            manifest: manifest of the batch.
            config: the config.
            named: conversation of each session, for rows without one.
            texts: stores the client texts that prompts of an older version contain.
        """
        keep = None if layout.length_of(config) else texts.keep
        for side in SPLITS:
            for file in self._shards(manifest, config, side):
                for part in layout.read_shard(file, config):
                    rows = taken_out(part, keep) if self._has_texts_inside(manifest) else part
                    place = rows.column_names.index("conversation")
                    told = pa.array([
                        named.get(session or "", conversation)
                        for session, conversation in zip(
                            rows["session_id"].to_pylist(),
                            rows["conversation"].to_pylist(),
                            strict=True,
                        )
                    ], pa.string())  # fmt: skip
                    yield rows.set_column(place, rows.field(place), told)

    def _has_texts_inside(self, manifest: Mapping[str, Any]) -> bool:
        is_older = manifest.get("layout", 1) < layout.VERSION
        return is_older and bool(self.facts.get("client_texts"))

    def texts(self, manifest: Mapping[str, Any]) -> ClientTextTable:
        """Return the client texts of a batch, from the folder or the Hub."""
        batch = manifest["trace_batch"]
        found = texts_in(self.folder, batch)
        if not found and manifest.get("client_texts") and self.hub is not None:
            for path in self.hub.head().files:
                if path.startswith(f"{layout.CLIENT_TEXTS}/{batch}/"):
                    data = io.BytesIO(self.hub.read(path, revision="main"))
                    found |= {row["hash"]: row for row in pq.read_table(data).to_pylist()}
        return ClientTextTable(found.values())

    def _shards(
        self, manifest: Mapping[str, Any], config: str, side: str
    ) -> Iterator[Path | bytes]:
        batch, version = manifest["trace_batch"], manifest.get("layout", 1)
        for name in manifest["files"].get(config, {}).get(side, {}):
            path = f"{layout.batch_dir(config, side, batch, version=version)}/{name}"
            local = self.folder / path
            yield local if local.exists() else self.hub.read(path, revision="main")

    def sides(self, named: Mapping[str, str]) -> tuple[dict[str, Split], set[str]]:
        """Return the split of everything published, by hash, and the conversations that were divided.

        An older version split each session separately, so a conversation could have rows in both
        splits. Such a conversation moves to train as a whole, because what was ever in train must
        never be in test.
        """
        sides = batch_facts.known_sides(self.manifests.values(), self.facts)
        cut: set[str] = set()
        for manifest in self.manifests.values():
            if "conversations" in manifest:
                continue
            for config, side in product(("pairs", "positives"), SPLITS):
                for file in self._shards(manifest, config, side):
                    rows = pq.read_table(
                        io.BytesIO(file) if isinstance(file, bytes) else file,
                        columns=["session_id", "state_id"],
                        partitioning=None,
                    )
                    for sha in {name_sha(name) for name in layout.conversations_in(rows, named)}:
                        if sides.setdefault(sha, side) != side:
                            sides[sha] = "train"
                            cut.add(sha)
        return sides, cut

"""Publish pairs as a dataset folder in the layout of the Hub, and on the Hub itself."""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from replay_pipeline.errors import ConfigError, PublishError, SecretFoundError
from replay_pipeline.publish import card, layout
from replay_pipeline.publish.card import CardFacts
from replay_pipeline.publish.folder import list_files, read_files, replace_files
from replay_pipeline.publish.splits import SPLITS, SessionSplit, Split, session_sha
from replay_pipeline.redact import find_secrets
from replay_pipeline.schemas import POSITIVES

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 256_000_000
"""Arrow bytes of one shard, before compression."""


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """What one publication did."""

    dataset: str
    """The folder."""
    repo_id: str | None = None
    rows_by_split: dict[str, dict[str, int]] = field(default_factory=dict)
    """Rows of the whole dataset by config and split."""
    batches: list[str] = field(default_factory=list)
    """Batches that this publication brought."""
    files_written: list[str] = field(default_factory=list)
    files_unchanged: list[str] = field(default_factory=list)
    files_removed: list[str] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    """Ids of the commits that were made on the Hub, oldest first; empty: it had all of it."""
    tag: str | None = None
    """Name of this content: equal content has an equal tag."""

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)


def publish(
    batches: Iterable[tuple[str, pa.Table]],
    *,
    folder: Path,
    repo_id: str | None = None,
    positives: Iterable[tuple[str, pa.Table]] = (),
    private: bool = True,
    test_fraction: float = 0.25,
    card_facts: CardFacts | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> PublishReport:
    """Bring batches into the dataset: new ones are added, known ones replaced, others stay.

    The folder goes from its old version to the new one at once. Publishing the same rows again
    changes nothing.

    Args:
        batches: batch key and table `normalized_pairs`.
        folder: the dataset folder; made when it is missing.
        repo_id: Hub dataset `owner/name` to bring to the same content.
        positives: batch key and table `positives` of the same or other batches.
        private: visibility of a repository that is created.
        test_fraction: share of sessions, by hash, in the test split.
        card_facts: what the card should say beyond what the rows say.
        max_shard_bytes: size at which a batch is written as several files.

    Raises:
        ConfigError: a batch key cannot be a folder name or comes twice, or the test fraction
            differs from that of batches that stay.
        SecretFoundError: a secret is in the rows or in the card; nothing was written.
        StorageError: the folder cannot be written; it is as before.
        PublishError: the Hub refused; the folder has the new version, the Hub the old one.
    """
    given = _by_key(batches)
    given_positives = _by_key(positives)
    keys = sorted({*given, *given_positives})
    if repo_id is not None:
        logger.info("publishing %s to %s (private: %s)", folder, repo_id, private)
    stay = {
        key: manifest for key, manifest in read_manifests(folder).items() if key not in set(keys)
    }
    split = _session_split([*given.values(), *given_positives.values()], stay, test_fraction)
    files: dict[str, bytes] = {}
    manifests = dict(stay)
    for key in keys:
        pairs = layout.pair_rows(given[key], key) if key in given else layout.PAIRS.empty_table()
        agreed = layout.positive_rows(given_positives.get(key, POSITIVES.empty_table()), key)
        made, manifests[key] = _batch_files(key, pairs, agreed, split, max_shard_bytes)
        files |= made
        files[layout.manifest_path(key)] = card.encode(manifests[key])
    facts = {**_read_facts(folder), **(card_facts or {})}
    files[layout.FACTS] = card.encode(facts)
    files[layout.CARD] = card.render(manifests, facts)
    for path in (layout.FACTS, layout.CARD):
        _refuse_secrets(files[path].decode(), path)
    stale = {path for path in list_files(folder) if layout.batch_of(path) in set(keys)}
    change = replace_files(folder, files, stale - files.keys())
    return PublishReport(
        dataset=str(folder),
        repo_id=repo_id,
        rows_by_split=card.rows_by_split(manifests),
        batches=keys,
        files_written=change.written,
        files_unchanged=change.unchanged,
        files_removed=change.removed,
        tag=f"data-{card.digest_of(manifests)}",
    )


def read_manifests(folder: Path) -> dict[str, dict[str, Any]]:
    """The manifests of a dataset folder, by batch."""
    return {
        batch: json.loads(data)
        for path, data in read_files(folder, layout.MANIFESTS).items()
        if (batch := layout.batch_of(path)) is not None
    }


def _read_facts(folder: Path) -> dict[str, Any]:
    path = folder / layout.FACTS
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def _by_key(batches: Iterable[tuple[str, pa.Table]]) -> dict[str, pa.Table]:
    tables: dict[str, pa.Table] = {}
    for key, table in batches:
        if not layout.is_batch_key(key):
            raise ConfigError(
                f"trace batch {key!r}: a key is up to 100 letters, digits, '.', '_' and '-', "
                "and begins with a letter or digit, since it names folders of the dataset"
            )
        if key in tables:
            raise ConfigError(f"trace batch {key!r} is given twice")
        tables[key] = table
    return tables


def _session_split(
    tables: list[pa.Table], stay: Mapping[str, Mapping[str, Any]], test_fraction: float
) -> SessionSplit:
    pins: dict[str, Split] = {}
    filled: set[Split] = set()
    for key, manifest in stay.items():
        if manifest["test_fraction"] != test_fraction:
            raise ConfigError(
                f"test_fraction is {test_fraction}, but batch {key} was published with "
                f"{manifest['test_fraction']}: a session could end up in both splits. Keep the "
                "fraction, or publish all batches again"
            )
        pins |= manifest["pins"]
        filled |= {split for split in SPLITS if manifest["sessions"].get(split)}
    sessions = {session for table in tables for session in _sessions(table)}
    return SessionSplit.over(sessions, test_fraction=test_fraction, pins=pins, published=filled)


def _sessions(table: pa.Table) -> list[str]:
    """The session of each row; a row without one is a session of its own."""
    return [
        session or state
        for session, state in zip(
            table["session_id"].to_pylist(), table["state_id"].to_pylist(), strict=True
        )
    ]


def _batch_files(
    key: str, pairs: pa.Table, positives: pa.Table, split: SessionSplit, max_shard_bytes: int
) -> tuple[dict[str, bytes], dict[str, Any]]:
    tables = {
        "pairs": pairs,
        "positives": positives,
        "prompts": layout.prompt_rows(pairs, positives),
        "pairs_distillable": pairs.filter(pairs["is_distillable"]),
    }
    _refuse_secret_rows(tables["pairs"], key, "pairs")
    _refuse_secret_rows(tables["positives"], key, "positives")
    files: dict[str, bytes] = {}
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for config, table in tables.items():
        sides = [split.of(session) for session in _sessions(table)]
        for side in SPLITS:
            rows = table.filter(pa.array([s == side for s in sides], pa.bool_()))
            for name, data, n_rows in layout.shards(rows, max_shard_bytes=max_shard_bytes):
                path = f"{layout.batch_dir(config, side, key)}/{name}"
                files[path] = data
                counts.setdefault(config, {}).setdefault(side, {})[name] = n_rows
    sessions = {*_sessions(pairs), *_sessions(positives)}
    sides = [split.of(session) for session in sessions]
    shas = {session_sha(session) for session in sessions}
    manifest = card.manifest_of(
        key,
        files=counts,
        pairs=pairs,
        sessions={side: sides.count(side) for side in SPLITS},
        test_fraction=split.test_fraction,
        pins={sha: side for sha, side in split.pins.items() if sha in shas},
    )
    return files, manifest


def _refuse_secret_rows(table: pa.Table, batch: str, config: str) -> None:
    """Scan every text once: states of one session share most of their messages."""
    seen: set[int] = set()
    names = [
        field.name
        for field in table.schema
        if pa.types.is_string(field.type) or pa.types.is_list(field.type)
    ]
    for row in table.select(names).to_pylist():
        for name, value in row.items():
            for text in value if isinstance(value, list) else [value]:
                if text is None or (sha := xxhash.xxh3_64_intdigest(text.encode())) in seen:
                    continue
                seen.add(sha)
                _refuse_secrets(text, f"batch {batch}, {config}, state {row['state_id']}, {name}")


def _refuse_secrets(text: str, where: str) -> None:
    try:
        hits = find_secrets(text)
    except Exception as error:  # whatever stops the scanner stops the publication
        raise PublishError(f"{where}: could not be scanned for secrets ({error})") from error
    if hits:
        kinds = ", ".join(sorted({hit.kind for hit in hits}))
        raise SecretFoundError(
            f"{where}: holds a secret ({kinds}); nothing was published. Remove it at its source, "
            "ingest again, and revoke it if it is real"
        )

"""Find changed bytes: in the tables by the digests in receipts, in the dataset by its manifests.

Delete what is damaged, and `run` makes it again without paying for anything twice.
"""

import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import quote

from replay_pipeline.publish.layout import MANIFESTS, VERSION, batch_dir
from replay_pipeline.replay import has_ledger
from replay_pipeline.stages.project import Project, file_digest
from replay_pipeline.storage.schemas import TABLES
from replay_pipeline.storage.store import names_of_json


def verify(project: Project) -> dict[str, Any]:
    """Read everything that receipts and manifests vouch for, and the ledger.

    Returns the damaged files, each with its path, stage, batch, and what is wrong with it, and the
    number of intact files by stage.

    Raises:
        StorageError: the object store that holds the root cannot be reached.
    """
    damaged: list[dict[str, str]] = []
    n_files: Counter[str] = Counter()

    def judge(path: str, stage: str, batch: str, *, digest: str, wanted: str) -> None:
        if digest == wanted:
            n_files[stage] += 1
            return
        why = "it is gone" if digest == "-" else "it is not what was written"
        damaged.append({"path": path, "why": why, "stage": stage, "batch": batch})

    for receipt in project.receipts.all():
        for table, wanted in receipt.outputs.items():
            if table in TABLES:
                digest = file_digest(project.root.part(table, receipt.batch))
                path = project.root.name_of(table, receipt.batch)
                judge(path, receipt.stage, receipt.batch, digest=digest, wanted=wanted)
    for batch in names_of_json(project.place_of(f"dataset/{MANIFESTS}")):
        if batch.startswith("_"):
            continue
        path = f"dataset/{MANIFESTS}/{batch}.json"
        try:
            manifest = json.loads(project.place_of(path).read_bytes())
            if manifest.get("layout") != VERSION:
                why = "another version of this program published it"
                damaged.append({"path": "dataset", "why": why, "stage": "publish", "batch": "all"})
                break
            shards = list(_shards(manifest))
        except (ValueError, LookupError, TypeError, AttributeError):
            judge(path, "publish", batch, digest="", wanted="a manifest")
            continue
        for shard in shards:
            place = project.place_of(shard)
            digest = hashlib.sha256(place.read_bytes()).hexdigest() if place.exists() else "-"
            # A shard is called by the beginning of its digest.
            judge(shard, "publish", batch, digest=digest[: len(place.stem)], wanted=place.stem)
    url = project.settings.ledger_url()
    if not _is_ledger_sound(url):
        why = "nothing else has its answers: bring back a backup"
        damaged.append({"path": url, "why": why, "stage": "ledger", "batch": "all"})
    return {"damaged": damaged, "n_files": dict(sorted(n_files.items()))}


def _shards(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paths of the shards that a manifest names."""
    for config, splits in manifest["files"].items():
        for split, names in splits.items():
            folder = batch_dir(config, split, manifest["trace_batch"])
            yield from (f"dataset/{folder}/{name}" for name in names)


def _is_ledger_sound(url: str) -> bool:
    if not has_ledger(url) or "://" in url:
        return True
    try:
        with closing(sqlite3.connect(f"file:{quote(url)}?mode=ro", uri=True)) as ledger:
            return ledger.execute("pragma integrity_check").fetchall() == [("ok",)]
    except sqlite3.DatabaseError:
        return False

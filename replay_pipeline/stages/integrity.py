"""Find every changed byte of a data root, and rebuild the files with damage.

Each receipt has a digest of every file that its stage wrote, and one of itself. Dataset files have
their digest in their name or in the receipt of the publication.
"""

import hashlib
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

from replay_pipeline.errors import ReplayPipelineError
from replay_pipeline.ingesters import keep, read_manifest
from replay_pipeline.publish.layout import batch_dir
from replay_pipeline.replay import has_ledger
from replay_pipeline.stages import chain
from replay_pipeline.stages.engine import COPIED, do_aside
from replay_pipeline.stages.project import Project, bytes_digest, file_digest
from replay_pipeline.stages.publish import published_manifests
from replay_pipeline.stages.receipts import Receipt, digest_in, is_intact, receipt_in
from replay_pipeline.storage.root_index import FILE
from replay_pipeline.storage.store import files_below, folders_in, written_whole

logger = logging.getLogger(__name__)

_GONE, _CHANGED = "it is gone", "it is not what was written"
_OTHERWISE = (
    "today it comes out otherwise than its receipt says: the code, the settings or the ledger have "
    "changed since. `replay-pipeline {stage}` does what is stale; what is not is done once its "
    "receipt is deleted, which may pay for answers that the ledger has lost"
)


@dataclass(frozen=True)
class Damage:
    """A file that differs from its receipt."""

    path: str
    why: str
    stage: str
    batch: str = "all"
    digest: str = ""
    """The digest that the file should have."""


_INDEX = Damage(FILE, _CHANGED, "index")


@dataclass(kw_only=True)
class Verified:
    """The number of files checked, and the damaged ones."""

    damaged: list[Damage] = field(default_factory=list)
    n_files: Counter[str] = field(default_factory=Counter)
    """Number of intact files, by the stage that wrote them."""
    n_without_digest: int = 0
    """Number of receipts from older versions, which contain no digests."""
    n_not_recorded: Counter[str] = field(default_factory=Counter)
    """Number of files that no receipt names, by folder."""

    def add(self, damage: Damage) -> None:
        """Add a damaged file, once."""
        if damage not in self.damaged:
            self.damaged.append(damage)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "damaged": [asdict(damage) for damage in self.damaged],
            "n_files": dict(sorted(self.n_files.items())),
            "n_without_digest": self.n_without_digest,
            "n_not_recorded": dict(sorted(self.n_not_recorded.items())),
        }


def verify(work: Project) -> dict[str, Any]:
    """Check every file that a receipt names, and return the counts and the damaged files.

    Raises:
        StorageError: the object store that holds the root cannot be reached.
    """
    return _verified(work).to_json()


def _verified(work: Project) -> Verified:
    """Read everything that receipts vouch for, the receipts, the index and the ledger.

    Raises:
        StorageError: the object store that holds the root cannot be reached.
    """
    found = Verified()
    if not work.index.is_sound():
        found.damaged.append(_INDEX)
        work.index.forget()
    seen = {FILE}
    for receipt in _receipts(work, found, seen):
        for name, digest in _written(work, receipt).items():
            seen.add(name)
            is_whole = _judge(found, name, file_digest(work.place_of(name)), digest, receipt)
            if is_copied(name):
                _judge_copy(work, found, name, digest, is_whole=is_whole)
        if receipt.stage == "publish":
            _verify_shards(work, found, seen, receipt)
    _verify_ledger(work, found, seen)
    for name in set(files_below(work.root.path)) - seen:
        found.n_not_recorded[name.partition("/")[0]] += 1
    return found


def is_copied(name: str) -> bool:
    """Return whether a file can only be restored from its copy in the index."""
    return name.rpartition("/")[0] in COPIED


def _receipts(work: Project, found: Verified, seen: set[str]) -> Iterator[Receipt]:
    """Yield every receipt; of one that is damaged, its copy."""
    for stage in folders_in(work.root.path / "receipts"):
        work.receipts.figures(stage=stage)  # brings the copies to what the files are
    for path in files_below(work.root.path / "receipts"):
        stage, _, file = path.partition("/")
        name, batch = f"receipts/{path}", file.removesuffix(".json")
        seen.add(name)
        text = work.place_of(name).read_bytes()
        copy = work.index.copy(f"receipts/{stage}", file)
        is_whole, has_digest = is_intact(text), bool(digest_in(text))
        if copy is not None and (not is_intact(copy) or (is_whole and has_digest and copy != text)):
            found.add(_INDEX)
        if not is_whole:
            found.damaged.append(Damage(name, _CHANGED, stage, batch))
            text = copy or b""
        elif has_digest:
            found.n_files["receipts"] += 1
            if copy != text:
                work.receipts.copy(stage, file, text)
        else:
            found.n_without_digest += 1
        if (receipt := receipt_in(text)) is not None:
            yield receipt


def _written(work: Project, receipt: Receipt) -> dict[str, str]:
    """Return digests of all files that a receipt vouches for, by path below the root."""
    tables = {
        work.root.name_of(name, receipt.batch): digest for name, digest in receipt.outputs.items()
    }
    return {name: d for name, d in (tables | receipt.files).items() if d != "-"}


def _judge(found: Verified, name: str, digest: str, wanted: str, receipt: Receipt) -> bool:
    if digest == wanted:
        found.n_files[receipt.stage] += 1
        return True
    why = _GONE if digest == "-" else _CHANGED
    found.damaged.append(Damage(name, why, receipt.stage, receipt.batch, wanted))
    return False


def _judge_copy(work: Project, found: Verified, name: str, digest: str, *, is_whole: bool) -> None:
    folder, _, file = name.rpartition("/")
    copy = work.index.copy(folder, file)
    if copy is not None and bytes_digest(copy) != digest:
        found.add(_INDEX)
        copy = None
    if copy is None and is_whole:
        work.index.put(folder, [(file, work.place_of(name).read_bytes())])


def _verify_shards(work: Project, found: Verified, seen: set[str], receipt: Receipt) -> None:
    """Look at the files of the dataset that are named by the hash of their content."""
    for manifest in published_manifests(work, receipt).values():
        for path in _shards(manifest):
            seen.add(path)
            place = work.place_of(path)
            data = place.read_bytes() if place.exists() else None
            wanted = place.stem
            digest = "-" if data is None else hashlib.sha256(data).hexdigest()[: len(wanted)]
            _judge(found, path, digest, wanted, receipt)


def _shards(manifest: Mapping[str, Any]) -> Iterator[str]:
    version = manifest.get("layout", 1)
    for config, splits in manifest["files"].items():
        for split, names in splits.items():
            folder = batch_dir(config, split, manifest["trace_batch"], version=version)
            yield from (f"dataset/{folder}/{name}" for name in names)


def _verify_ledger(work: Project, found: Verified, seen: set[str]) -> None:
    url = work.settings.ledger_url()
    if not has_ledger(url) or "://" in url:
        return
    with suppress(ValueError):
        name = Path(url).relative_to(str(work.root.path)).as_posix()
        seen |= {name, f"{name}-wal", f"{name}-shm"}
    try:
        with closing(sqlite3.connect(f"file:{quote(url)}?mode=ro", uri=True)) as ledger:
            is_sound = ledger.execute("pragma integrity_check").fetchall() == [("ok",)]
    except sqlite3.DatabaseError:
        is_sound = False
    if not is_sound:
        found.damaged.append(Damage(url, _CHANGED, "ledger"))


def repair(work: Project) -> dict[str, Any]:
    """Rebuild the files that `verify` finds damaged. Asks no teacher and pays nothing.

    Receipts and manifests come from their copies in the index, tables from the kept bytes of
    sessions and the ledger, and the dataset from the tables. If a rebuilt file doesn't match its
    receipt, the old file stays. Returns the repaired files and the remaining damage.

    Raises:
        StorageError: the object store that holds the root cannot be reached.
    """
    before = _verified(work)
    if _INDEX in before.damaged:
        work.index.forget()
    reasons: dict[str, str] = {}
    for damage in before.damaged:
        if damage.path.startswith("receipts/") or is_copied(damage.path):
            _restore(work, damage)
        elif damage.path.startswith("sources/"):
            _keep_again(work, damage)
    for stage, batch, wanted in _to_make(before):
        reasons |= _make_again(work, wanted, partial(_make, work, stage, batch, wanted))
    after = _verified(work)
    left = {damage.path: damage for damage in after.damaged}
    return {
        "repaired": sorted({damage.path for damage in before.damaged} - left.keys()),
        "left": {path: reasons.get(path) or _why_left(damage) for path, damage in left.items()},
        "n_without_digest": after.n_without_digest,
    }


def _to_make(found: Verified) -> Iterator[tuple[str, str, list[Damage]]]:
    """Return the damaged files that stages make, by stage and batch, in the order of the stages."""
    for stage in (stage.name for stage in chain.STAGES):
        of_stage = [d for d in found.damaged if d.stage == stage and d.digest and not _is_kept(d)]
        for batch in sorted({each.batch for each in of_stage}):
            yield stage, batch, [each for each in of_stage if each.batch == batch]


def _make(work: Project, name: str, batch: str, wanted: Sequence[Damage], folder: Path) -> None:
    """Do the stage again below a folder."""
    stage = chain.stage_named(name)
    receipt = work.receipts.read(name, batch)
    if stage.make_again is not None and receipt is not None:
        stage.make_again(work, receipt, [damage.path for damage in wanted], folder)
    elif stage.is_by_batch:
        do_aside(stage, work, batch, folder)


def _keep_again(work: Project, damage: Damage) -> None:
    """Keep bytes of a session again in place of a damaged copy, if its log is still there."""
    piece, folder = work.place_of(damage.path), work.kept_folder()
    if folder is None or not isinstance(piece, Path):
        return
    damaged = piece.with_suffix(".damaged")
    if piece.exists():
        piece.replace(damaged)
    keep(read_manifest(damage.batch, work.root.path), folder)
    if piece.exists():
        damaged.unlink(missing_ok=True)
    elif damaged.exists():
        damaged.replace(piece)


def _is_kept(damage: Damage) -> bool:
    """Return whether a file is no stage's work, but what it stands on."""
    return damage.path.startswith(("receipts/", "sources/")) or is_copied(damage.path)


def _restore(work: Project, damage: Damage) -> None:
    folder, _, file = damage.path.rpartition("/")
    copy = work.index.copy(folder, file)
    if copy and (bytes_digest(copy) == damage.digest if damage.digest else is_intact(copy)):
        _put(work, damage.path, copy)


def _put(work: Project, name: str, data: bytes) -> None:
    with written_whole(work.place_of(name)) as file:
        file.write(data)
    logger.info("%s: restored exactly", name)


def _make_again(
    work: Project, wanted: Sequence[Damage], make: Callable[[Path], None]
) -> dict[str, str]:
    """Have files made in a folder of their own, and take those that are as they should be."""
    with TemporaryDirectory(prefix="repair-") as name:
        aside = Path(name)
        try:
            make(aside)
        except (ReplayPipelineError, OSError, ValueError) as error:
            return {damage.path: f"it cannot be made again: {error}" for damage in wanted}
        reasons = {}
        for damage in wanted:
            made = aside / damage.path
            data = made.read_bytes() if made.exists() else b""
            digests = bytes_digest(data), hashlib.sha256(data).hexdigest()[: len(damage.digest)]
            if damage.digest in digests:
                _put(work, damage.path, data)
            else:
                reasons[damage.path] = _OTHERWISE.format(stage=damage.stage)
        return reasons


def _why_left(damage: Damage) -> str:
    if damage.stage == "ledger":
        return "the ledger is damaged, and nothing else has its answers: bring back a backup of it"
    if damage.path.startswith("sources/"):
        return "the bytes that were kept of a session, and the log itself is gone or has changed"
    if damage.path.startswith("model/"):
        return "a model is not made again byte by byte: `replay-pipeline train` trains another"
    return "there is no copy of it; `replay-pipeline run` does its stage again"

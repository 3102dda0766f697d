"""Receipts: JSON files next to the tables that record the inputs and results of each stage."""

import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import msgspec

from replay_pipeline.errors import StorageError
from replay_pipeline.storage.garbage_collection import without_collector
from replay_pipeline.storage.root_index import FILE, RootIndex
from replay_pipeline.storage.store import Place, folders_in, written_whole

logger = logging.getLogger(__name__)

T = TypeVar("T")

_Counts = dict[str, int]
_Report = dict[str, Any]


class _Figures(TypedDict, total=False):
    """Those figures of a report that are added up, or decide what is done next."""

    n_sessions: int
    n_turns: int
    n_states: int
    n_sent: int
    n_answers: int
    n_failed: int
    n_consensus: int
    n_agreement: int
    n_pairs: int
    n_kept: int
    n_dropped: int
    skipped: _Counts
    outcomes: _Counts
    dropped: _Counts
    errors: _Counts


class _Replayed(_Figures):
    is_complete: bool
    spent_usd: float
    newly_spent_usd: float
    unknown_usd: float


ALL = "all"
"""The batch name of stages that work on all batches at once."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The record of one stage for one batch, or for `all` if it publishes or trains."""

    stage: str
    batch: str
    fingerprint: str
    """Hash of all inputs of the stage."""
    report: dict[str, Any]
    seconds: float
    versions: dict[str, str] = field(default_factory=dict)
    """Digest of each part of the code that decides the output. Empty in receipts of 0.1.0."""
    code_version: str = ""
    """Digest of that code and the deciding settings. Empty if some are unknown."""
    settings: dict[str, Any] | None = None
    """The settings that decide the output, by name. `None` in receipts without them."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Digest of each table and other input that was read."""
    outputs: dict[str, str] = field(default_factory=dict)
    """Digest of each table that was written."""
    files: dict[str, str] = field(default_factory=dict)
    """Digest of each other file that was read or written, by its path below the root."""
    data: str = ""
    """Hash of the parts of its files that later stages read, if they read only parts."""
    digest: str = ""
    """Hash of the receipt's own text with this field empty. Receipts up to 0.2.0 have none."""
    is_reused: bool = False
    """Whether nothing had changed, so that the stage did no work this time."""
    at: str = ""
    """Time of writing, in UTC."""

    @property
    def data_version(self) -> str:
        """Return a version that changes with the bytes of the stage's tables or files."""
        written = {"data": self.data} if self.data else self.outputs or self.files
        # No later stage is done again for what only `sessions` says, such as where a project lay.
        written = {name: digest for name, digest in written.items() if name != "sessions"}
        text = json.dumps(written or self.fingerprint, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Receipts:
    """The receipts under one data root.

    Args:
        root: the data root.
        index: holds copies of the receipts. By default it is in the root, or in memory for a root
            on an object store.
    """

    def __init__(self, root: Place, index: RootIndex | None = None) -> None:
        self._root = root / "receipts"
        default = root / FILE if isinstance(root, Path) else None
        self._index = index or RootIndex(root, default)

    def read(self, stage: str, batch: str) -> Receipt | None:
        """Return the last receipt, or None if there is none that can be read.

        Raises:
            StorageError: the object store that holds it cannot be reached.
        """
        try:
            return receipt_in(self.path(stage, batch).read_bytes())
        except StorageError:
            raise
        except OSError:
            return None

    def write(self, receipt: Receipt) -> Receipt:
        """Replace the last receipt by `receipt`."""
        return self.amend(replace(receipt, at=datetime.now(UTC).isoformat()))

    def amend(self, receipt: Receipt) -> Receipt:
        """Replace the last receipt by `receipt`, and keep its date."""
        receipt = replace(receipt, digest="")
        digest = hashlib.blake2b(_text_of(receipt), digest_size=16).hexdigest()
        receipt = replace(receipt, digest=digest)
        path, text = self.path(receipt.stage, receipt.batch), _text_of(receipt)
        with written_whole(path) as file:
            file.write(text)
        self.copy(receipt.stage, path.name, text)
        return receipt

    def copy(self, stage: str, file: str, text: bytes) -> None:
        """Copy a receipt into the index."""
        self._index.put(f"receipts/{stage}", [(file, text)], slim=_figures_of)

    def stamps(self, stage: str | None = None) -> dict[tuple[str, str], str]:
        """Return a stamp for each receipt (of `stage`), to tell later which ones are new."""
        return {
            (folder.removeprefix("receipts/"), name.removesuffix(".json")): stamp
            for folder in self._brought(stage)
            for name, stamp, _ in self._index.figures(folder)
        }

    def all(
        self, *, since: Mapping[tuple[str, str], str] | None = None, stage: str | None = None
    ) -> list[Receipt]:
        """Return every receipt. Those that haven't changed since the stamps `since` are marked as reused."""
        found = []
        for key, stamp, text in self._copies(stage):
            if (receipt := receipt_in(text)) is not None:
                is_reused = since is not None and since.get(key) == stamp
                found.append(replace(receipt, is_reused=is_reused))
        return found

    def figures(
        self, *, since: Mapping[tuple[str, str], str] | None = None, stage: str | None = None
    ) -> Iterator[Receipt]:
        """Yield the receipts of `all`, without the long parts of their reports."""
        for folder in self._brought(stage):
            kind = folder.removeprefix("receipts/")
            rows = [row for row in self._index.figures(folder) if row[2]]
            for (name, stamp, _), receipt in zip(rows, _each_of(rows, Receipt), strict=True):
                known = since.get((kind, name.removesuffix(".json"))) if since else None
                yield replace(receipt, is_reused=True) if known == stamp else receipt

    def written(self, stage: str | None = None) -> Iterator["Written"]:
        """Yield the code and tables behind each receipt, without its report."""
        return self._parts(stage, Written)

    def reports(self, stage: str, *, names: Collection[str] | None = None) -> dict[str, _Report]:
        """Return the reports of a stage by batch, without their long parts, or only the fields `names`."""
        if names is None:
            return {each.batch: each.report for each in self._parts(stage, _Reported)}
        part = msgspec.defstruct("Part", [(name, Any, msgspec.UNSET) for name in names])
        chosen: Any = msgspec.defstruct("Chosen", [("batch", str), ("report", part)])
        return {
            each.batch: {
                name: value
                for name in names
                if (value := getattr(each.report, name)) is not msgspec.UNSET
            }
            for each in self._parts(stage, chosen)
        }

    def _parts(self, stage: str | None, kind: type[T]) -> Iterator[T]:
        for folder in self._brought(stage):
            yield from _each_of([row for row in self._index.figures(folder) if row[2]], kind)

    def path(self, stage: str, batch: str) -> Place:
        """Return the path of a receipt."""
        return self._root / stage / f"{batch}.json"

    def _copies(self, stage: str | None) -> Iterator[tuple[tuple[str, str], str, bytes]]:
        for folder in self._brought(stage):
            for name, stamp, text in self._index.copies(folder):
                key = folder.removeprefix("receipts/"), name.removesuffix(".json")
                yield key, stamp, text

    def _brought(self, stage: str | None) -> Iterator[str]:
        for each in [stage] if stage else folders_in(self._root):
            folder = f"receipts/{each}"
            self._index.bring(folder, is_intact=is_intact, slim=_figures_of)
            yield folder


class Written(msgspec.Struct):
    """The part of a receipt that names its inputs, its outputs, and their dates."""

    stage: str
    batch: str
    versions: dict[str, str] = {}
    settings: dict[str, Any] | None = None
    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}
    at: str = ""


class _Reported(msgspec.Struct):
    batch: str
    report: _Report


def _each_of(rows: Sequence[tuple[str, str, bytes]], kind: type[T]) -> Iterator[T]:
    """Read the slim parts of many receipts, many at once: one by one takes three times as long."""
    for start in range(0, len(rows), _READ_AT_ONCE):
        text = b"[" + b",".join(row[2] for row in rows[start : start + _READ_AT_ONCE]) + b"]"
        with without_collector():
            found = msgspec.json.decode(text, type=list[kind])
        yield from found


_READ_AT_ONCE = 1_000

_LONG = frozenset({
    "agreement", "control", "latency_s", "matrix", "natural_left_out", "seconds_by_operator", "teachers",
    "thresholds", "tokens", "usage", "batches", "files_removed", "files_unchanged", "files_written",
    "curves",
})  # fmt: skip
"""Parts of reports that are looked at for one batch at a time."""


def _figures_of(text: bytes) -> bytes:
    """Return a receipt without what is long; nothing for one that cannot be read."""
    receipt = receipt_in(text)
    if receipt is None:
        return b""
    report = {name: value for name, value in receipt.report.items() if name not in _LONG}
    if receipt.stage in ("publish", "train"):
        receipt = replace(receipt, inputs={})
    slim = replace(receipt, report=report, files={}, is_reused=False)
    return msgspec.json.encode(slim)


def digest_in(text: bytes) -> str | None:
    """Return the digest in a receipt, which may be empty, or None if this isn't a receipt."""
    try:
        return msgspec.json.decode(text, type=_Digested).digest
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class _Digested(msgspec.Struct):
    digest: str = ""


def is_intact(text: bytes) -> bool:
    """Return whether every file that a receipt names is unchanged."""
    digest = digest_in(text)
    if not digest:
        return digest is not None
    plain = text.replace(_digest_line(digest), _digest_line(""), 1)
    return hashlib.blake2b(plain, digest_size=16).hexdigest() == digest


def _digest_line(digest: str) -> bytes:
    return f'"digest": "{digest}"'.encode()


def _text_of(receipt: Receipt) -> bytes:
    return json.dumps(asdict(receipt), indent=1, sort_keys=True).encode()


def receipt_in(text: bytes) -> Receipt | None:
    """Read a receipt, or return `None` for a damaged one, so that its stage runs again."""
    if not is_intact(text):
        logger.warning("a receipt is damaged, so its stage counts as not done")
        return None
    try:
        receipt = msgspec.json.decode(text, type=Receipt)
        if "budget_usd" in receipt.report:  # as 0.1.0 called it
            receipt.report["max_total_usd"] = receipt.report.pop("budget_usd")
        msgspec.convert(receipt.report, _Replayed if receipt.stage == "replay" else _Figures)
        return replace(receipt, is_reused=True)
    except msgspec.DecodeError as error:
        logger.warning("a receipt can't be read, so its stage counts as not done: %s", error)
        return None

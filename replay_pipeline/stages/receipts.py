"""Receipts: what each stage was given and did, kept as JSON beside the tables."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any, TypedDict

import msgspec

from replay_pipeline.errors import StorageError
from replay_pipeline.storage.store import Place, read_files, stamps_below, written_whole

logger = logging.getLogger(__name__)

_Counts = dict[str, int]


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


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What one stage did for one batch (or, publishing and training, for `all`)."""

    stage: str
    batch: str
    fingerprint: str
    """Hash of everything the stage was given."""
    report: dict[str, Any]
    seconds: float
    versions: dict[str, str] = field(default_factory=dict)
    """Digest of each part of the code that decided what was written; empty in receipts of 0.1.0."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Digest of each table of the batch that was read."""
    outputs: dict[str, str] = field(default_factory=dict)
    """Digest of each table of the batch that was written."""
    is_reused: bool = False
    """Whether nothing had changed, so that the stage did nothing this time."""
    at: str = ""
    """When it was written, in UTC."""


class Receipts:
    """The receipts under one data root."""

    def __init__(self, root: Place) -> None:
        self._root = root / "receipts"

    def read(self, stage: str, batch: str) -> Receipt | None:
        """Give the last receipt, or `None`. An unreadable one counts as none.

        Raises:
            StorageError: the object store that holds it cannot be reached.
        """
        try:
            return _read(self._path(stage, batch).read_bytes())
        except StorageError:
            raise
        except OSError:
            return None

    def write(self, receipt: Receipt) -> Receipt:
        """Keep `receipt` in place of the last one."""
        receipt = replace(receipt, at=datetime.now(UTC).isoformat())
        with written_whole(self._path(receipt.stage, receipt.batch)) as file:
            file.write(json.dumps(asdict(receipt), indent=1, sort_keys=True).encode())
        return receipt

    def stamps(self, stage: str | None = None) -> dict[tuple[str, str], str]:
        """Tell what tells a receipt (of `stage`) from the one before it, to see later which are new."""
        root = self._root if stage is None else self._root / stage
        found = {PurePosixPath(name): stamp for name, stamp in stamps_below(root).items()}
        return {
            (path.parent.name or stage or "", path.stem): stamp
            for path, stamp in found.items()
            if path.suffix == ".json" and not path.name.startswith(".")
        }

    def all(
        self, *, since: Mapping[tuple[str, str], str] | None = None, stage: str | None = None
    ) -> list[Receipt]:
        """Give every receipt; those not written after the stamps `since` are marked as reused."""
        stamps = self.stamps(stage)
        texts = read_files(self._root, [f"{kind}/{batch}.json" for kind, batch in stamps])
        found = []
        for (key, stamp), text in zip(stamps.items(), texts, strict=True):
            if text is not None and (receipt := _read(text)) is not None:
                is_reused = since is not None and since.get(key) == stamp
                found.append(replace(receipt, is_reused=is_reused))
        return found

    def _path(self, stage: str, batch: str) -> Place:
        return self._root / stage / f"{batch}.json"


def _read(text: bytes) -> Receipt | None:
    """Read a receipt; `None` for what is none, so that its stage is done again."""
    try:
        receipt = msgspec.json.decode(text, type=Receipt)
        if "budget_usd" in receipt.report:  # as 0.1.0 called it
            receipt.report["max_total_usd"] = receipt.report.pop("budget_usd")
        msgspec.convert(receipt.report, _Replayed if receipt.stage == "replay" else _Figures)
        return replace(receipt, is_reused=True)
    except msgspec.DecodeError as error:
        logger.warning("a receipt is not read, so its stage counts as not done: %s", error)
        return None

"""Receipts: one JSON file for each stage and batch, which says what was made of what."""

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from replay_pipeline.errors import StorageError
from replay_pipeline.settings import Settings
from replay_pipeline.storage.store import (
    Place,
    check_reachable,
    folders_in,
    json_files,
    names_of_json,
    written_whole,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
K = TypeVar("K")

ALL = "all"
"""The batch name of stages that work on all batches at once."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """Everything that decides the output of a stage."""

    version: int
    """`Stage.version` of the code that does the work."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Values by the full names of the settings."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Digest of each table and other input."""

    @property
    def code_version(self) -> str:
        """Return a digest of the version and the settings, for Dagster."""
        return hash_texts([json.dumps([self.version, self.settings], sort_keys=True)])


@dataclass(frozen=True, kw_only=True)
class Receipt(Given):
    """The record of one stage for one batch, or for `all` if it publishes or trains."""

    stage: str
    batch: str
    report: dict[str, Any]
    seconds: float
    outputs: dict[str, str] = field(default_factory=dict)
    """Digest of each table that was written, or of the dataset."""
    at: str = ""
    """Time of writing, in UTC."""
    is_reused: bool = False
    """Whether nothing had changed, so that the stage did no work this time. It isn't stored."""

    @property
    def data_version(self) -> str:
        """Return a digest that changes with what the stage wrote, for Dagster."""
        # No later stage is done again for what only `sessions` says, such as where a project lay.
        written = {name: digest for name, digest in self.outputs.items() if name != "sessions"}
        return hash_texts([json.dumps(written or self.at, sort_keys=True)])


def now() -> str:
    """Return this moment as receipts have it: an ISO time in UTC."""
    return datetime.now(UTC).isoformat()


def hash_texts(parts: Iterable[str]) -> str:
    """Return a hash of texts in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


class Receipts:
    """The receipts under one data root."""

    def __init__(self, root: Place) -> None:
        self._root = root / "receipts"
        self._has_warned = False

    def path(self, stage: str, batch: str) -> Place:
        """Return the path of a receipt."""
        return self._root / stage / f"{batch}.json"

    def read(self, stage: str, batch: str) -> Receipt | None:
        """Return the last receipt, or None if there is none that can be read.

        Raises:
            StorageError: the object store that holds it cannot be reached.
        """
        try:
            text = self.path(stage, batch).read_bytes()
        except StorageError:
            raise
        except OSError:
            return None
        receipt = self._decoded(text, f"{stage}/{batch}.json")
        return receipt and replace(receipt, is_reused=True)

    def write(self, receipt: Receipt, *, at: str | None = None) -> Receipt:
        """Replace the last receipt. `at` is the time of the work, by default now."""
        receipt = replace(receipt, at=at or now())
        stored = {name: value for name, value in asdict(receipt).items() if name != "is_reused"}
        with written_whole(self.path(receipt.stage, receipt.batch)) as file:
            file.write(json.dumps(stored, indent=1, sort_keys=True).encode())
        return receipt

    def note(
        self, stage: str, batch: str, report: dict[str, Any], *, started: float | None = None
    ) -> Receipt:
        """Write the receipt of work outside the chain. `started` is what `perf_counter` was."""
        seconds = 0.0 if started is None else round(time.perf_counter() - started, 3)
        return self.write(
            Receipt(stage=stage, batch=batch, version=1, report=report, seconds=seconds)
        )

    def all(self, *, since: str = "", stage: str | None = None) -> Iterator[Receipt]:
        """Yield every receipt (of `stage`). Those written before the time `since` are marked as reused."""
        for each in [stage] if stage else folders_in(self._root):
            for name, text in json_files(self._root, each):
                if (receipt := self._decoded(text, f"{each}/{name}")) is not None:
                    yield replace(receipt, is_reused=receipt.at < since)

    def reports(
        self, stage: str, *, names: Collection[str] | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return the reports of a stage by batch, or only the fields `names` of them."""
        return {
            each.batch: each.report
            if names is None
            else {name: each.report[name] for name in names if name in each.report}
            for each in self.all(stage=stage)
        }

    def _decoded(self, text: bytes, name: str) -> Receipt | None:
        """Read a receipt; one that can't be read counts as none, so that its stage runs again."""
        try:
            return msgspec.json.decode(text, type=Receipt)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s/%s: no receipt of this version (%s), so its stage counts as not done: "
                    "`replay-pipeline run` does it again, and the ledger keeps what is paid for",
                    self._root, name, error,
                )  # fmt: skip
            return None


def total(receipts: Iterable[Receipt], key: str) -> float:
    """Return the sum of a figure over receipts."""
    return sum(receipt.report.get(key) or 0 for receipt in receipts)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return items by a key of theirs, in the order in which each key came first."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def shares_near(found: Iterable[Mapping[str, Any] | None]) -> dict[str, tuple[int, float]]:
    """Return how many states with a recorded usage each client has, and of how many the prefix is within 10 % of it."""
    sums: dict[str, tuple[int, float]] = {}
    for client, row in (item for each in found for item in (each or {}).items()):
        n, n_near = sums.get(client, (0, 0.0))
        n_more = row["n_states"]
        sums[client] = n + n_more, n_near + n_more * row["share_within_10_percent"]
    return sums


def added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return counts added up by name, sorted by name."""
    found: Counter[str] = Counter()
    for each in counts:
        found.update(each)
    return dict(sorted(found.items()))


FOLDER = "folder"
"""Key in the report of `publish`: the place of a dataset outside the data root."""


class Overview:
    """The batches of a data root, with their receipts.

    Raises:
        StorageError: the object store with the data root can't be reached.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        check_reachable(settings.data_dir)
        self.receipts = Receipts(settings.data_dir)
        self._keys: list[str] | None = None

    def batches(self) -> list[str]:
        """Return the keys of all batches with a manifest, in order.

        The list is cached. `find_batches` and a new `Pipeline` refresh it.
        """
        if self._keys is None:
            self._keys = names_of_json(self.settings.data_dir / "batches")
        return self._keys

    def forget(self) -> None:
        """Look again at what batches there are."""
        self._keys = None

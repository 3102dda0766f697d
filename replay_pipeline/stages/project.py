"""A data root with its settings, as the stages use it: batches, tables, prompts, digests, teachers.

The stages change it. Views for people are in `replay_pipeline.stages.views.summary`.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from replay_pipeline.errors import ConfigError
from replay_pipeline.harness import HarnessStore
from replay_pipeline.ingesters import LazyStates, TraceBatch, Traces, manifest_from
from replay_pipeline.replay import AskingOptions
from replay_pipeline.settings import Settings
from replay_pipeline.stages.receipts import ALL, FOLDER, Overview, Receipt, Receipts, hash_texts
from replay_pipeline.stages.shown import harnesses_of
from replay_pipeline.storage.arrays import array_of
from replay_pipeline.storage.folds import Fold, Kept
from replay_pipeline.storage.pair_rows import PromptsOf, pairs_of
from replay_pipeline.storage.schemas import TABLES, WRITTEN_BY
from replay_pipeline.storage.store import Place, as_path
from replay_pipeline.storage.tables import DataRoot
from replay_pipeline.testing import TeacherServer, rehearsed_answers
from replay_pipeline.testing.sample import ANSWERS_FILE
from replay_pipeline.types import DPOPair, Progress, TeacherSpec, TraceState, conversation_of

T = TypeVar("T")

_blake2b = partial(hashlib.blake2b, digest_size=16)

OnProgress = Callable[[Progress], None]

_TOOL_COLUMNS = [(field.name, field.type) for field in TABLES["tools"]]
_ToolRow = tuple[str, str | None, str]
"""Name, release series and definition of a tool."""


class Project(Overview):
    """One data root with its settings: the tables that stages read and write.

    Args:
        settings: the settings of the stages.
        on_progress: called with the progress of long work.

    Raises:
        StorageError: the object store with the data root can't be reached.
    """

    def __init__(self, settings: Settings, *, on_progress: OnProgress | None = None) -> None:
        super().__init__(settings)
        self.settings = _with_dataset_folder(settings, self.receipts)
        self.root = DataRoot(settings.data_dir)
        self.on_progress = on_progress or (lambda _: None)
        self.folds: dict[str, Fold[Any]] = {}
        self._once: dict[str, Any] = {}
        self.outputs: dict[str, dict[tuple[str, str], tuple[str, str]]] = {}
        self.seen_tools = self.fold(
            "tools", dict[_ToolRow, int], _with_tools, encode=_encoded_tools, decode=_decoded_tools
        )
        self.moved_sessions = self.fold(
            "sessions",
            dict[str, str],
            _with_moved_sessions,
            encode=msgspec.json.encode,
            decode=msgspec.json.Decoder(dict[str, str]).decode,
        )
        self.tools_seen = Fold(
            self.batches,
            start=str,
            add=lambda value, key: hash_texts(
                [value, *named_digests(self.known_digests(key, ["tools"]))]
            ),
        )
        self.seen_pairs = self.folds["dpo_pairs"] = Fold(
            self.batches,
            start=str,
            add=lambda value, key: hash_texts(
                [value, key, *named_digests(self.known_digests(key, self.tables_of_pairs(key)))]
            ),
        )

    def place_of(self, name: str) -> Place:
        """Return the path of a file that a receipt names."""
        top, _, rest = name.partition("/")
        if top == "dataset":
            return _newest(self.settings.dataset_dir()) / rest
        if top == "model":
            return self.settings.model_dir() / rest
        if top == "sources" and (folder := self.kept_folder()):
            return folder / rest
        return self.root.path / name

    def dataset_copy(self) -> Path:
        """Return the working copy of a dataset on an object store, or the dataset's own folder."""
        place = self.settings.dataset_dir()
        return place if isinstance(place, Path) else self.settings.local_dir() / "dataset"

    def manifests(self) -> list[TraceBatch]:
        """Return every batch that has a manifest, in order.

        Raises:
            IngestError: a manifest is damaged.
        """
        folder = self.root.path / "batches"
        return [
            manifest_from(text, f"{folder}/{name}") for name, text in self.index.files("batches")
        ]

    def kept_folder(self) -> Path | None:
        """Return the folder for the bytes of sessions, or None if they aren't kept."""
        if not self.settings.ingest.keeps_bytes:
            return None
        # Unredacted logs never go to an object store.
        with suppress(ConfigError):
            return self.settings.local_dir() / "sources"
        return None

    @cached_property
    def owners(self) -> "Owners":
        """Return the batch that owns each state: the last one that read it."""
        return Owners(self)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return the result of `make`, which runs only once for all batches."""
        if name not in self._once:
            self._once[name] = make()
        return self._once[name]

    def watch(self, on_progress: OnProgress) -> None:
        """Report the progress of long work to `on_progress` from now on."""
        self.on_progress = on_progress

    def tell_part(self, part: str, **more: Any) -> OnProgress:
        """Return a callback that reports a batch's progress as a part of its stage."""
        return lambda progress: self.on_progress(replace(progress, part=part, **more))

    @contextmanager
    def teachers(self, batches: Iterable[str] = ()) -> Iterator[tuple[TeacherSpec, ...]]:
        """Keep the teachers ready while they are used. Recorded or made-up teachers get a server for that time.

        Args:
            batches: the batches whose states they are asked at. A rehearsal makes up answers for
                these.
        """
        if self.settings.played is None:
            yield self.settings.replay.teachers
            return
        answers = ANSWERS_FILE
        if self.settings.played == "rehearsal":
            columns = [
                "state_id",
                "session_id",
                "turn_idx",
                "action_text",
                "action_tool_calls_json",
            ]
            tables = [self.root.read("states", key, columns=columns) for key in batches]
            answers = rehearsed_answers(row for table in tables for row in table.to_pylist())
        with TeacherServer(answers) as server:
            yield server.served(self.settings.teachers())

    def states(self, batches: Iterable[str], *, is_neutral: bool = False) -> Sequence[TraceState]:
        """Return the states of these batches. Each is built on access."""
        keys = list(batches)
        sizes = [self.root.n_rows("states", key) for key in keys]
        return LazyStates(
            sizes,
            lambda number: self.traces(keys[number], is_neutral=is_neutral),
            window=self.settings.ingest.window,
        )

    def traces(self, batch: str, *, is_neutral: bool = False) -> Traces:
        """Open the sessions of a batch. In the neutral form, the texts of clients come separately from the prompts."""
        tables = {name: self.root.read(name, batch) for name in ("sessions", "turns", "states")}
        # Reading takes twice what the tables hold, and Arrow would keep it for the next time.
        pa.default_memory_pool().release_unused()
        return Traces(
            **tables,
            tools=self.tools_until(batch),
            harnesses=self.harnesses,
            is_neutral=is_neutral,
        )

    @cached_property
    def harnesses(self) -> HarnessStore | None:
        """Return the recorded harnesses, or `None` if the settings ask for the neutral prompt."""
        return harnesses_of(self.settings)

    def prompts(self, batch: str, *, is_neutral: bool = False) -> PromptsOf:
        """Return a reader of the messages that a batch's states show. It opens the tables on first use."""
        traces: list[Traces] = []

        def prompts(state_ids: Sequence[str]) -> Iterator[TraceState]:
            if not traces:
                traces.append(self.traces(batch, is_neutral=is_neutral))
            return traces[0].materialize(state_ids, self.settings.ingest.window)

        return prompts

    def tables_of_pairs(self, batch: str) -> tuple[str, ...]:
        """Return the names of the tables with a batch's pairs: the recorded ones, and the sampled ones if any."""
        names = ("dpo_pairs", "sampled_pairs")
        return names[: 1 + self.root.has("sampled_pairs", batch)]

    def accounts(self, night: str | None = None) -> AskingOptions:
        """Return the ceilings and price lists that all paying calls share."""
        replay = self.settings.replay
        limits = {"day": replay.max_daily_usd, "night": replay.max_nightly_usd if night else None}
        return {
            "night": night,
            "limits_usd": {scope: usd for scope, usd in limits.items() if usd is not None},
            "price_folder": self.price_folder(),
        }

    def options(self, night: str | None = None) -> AskingOptions:
        """Return the options that decide the questions of a replay."""
        replay, pairs = self.settings.replay, self.settings.pairs
        return {
            **self.accounts(night),
            "max_concurrency": replay.max_concurrency,
            "gates": replay.gates,
            "agreement_threshold": pairs.agreement_threshold,
            "min_p_better": pairs.min_p_better,
            "level": pairs.level,
            "count_own_family": pairs.count_own_family,
            "accepted_terms": replay.accepted_terms,
            "retry": replay.retry,
        }

    def price_folder(self) -> Place | None:
        """Return the folder of price lists. A local server gets a new one each time."""
        return None if self.settings.played else self.root.path / "prices"

    def fold(
        self,
        table: str,
        start: Callable[[], T],
        add: Callable[[T, pa.Table], T],
        *,
        encode: Callable[[T], bytes],
        decode: Callable[[bytes], T],
    ) -> Fold[T]:
        """Fold over the batches that have `table`."""

        def add_batch(value: T, key: str) -> T:
            return add(value, self.root.read(table, key)) if self.root.has(table, key) else value

        kept = self.kept_fold(table, table, encode, decode)
        fold = self.folds[table] = Fold(self.batches, start=start, add=add_batch, kept=kept)
        return fold

    def kept_fold(
        self, name: str, table: str, encode: Callable[[T], bytes], decode: Callable[[bytes], T]
    ) -> Kept[T]:
        """Return a fold that is stored on disk, and stays valid while `table` of its batches is unchanged."""
        return Kept(
            index=self.index,
            name=name,
            version_of=lambda batch: self.known_digest(batch, table),
            encode=encode,
            decode=decode,
        )

    def write(self, name: str, batch: str, table: pa.Table | Iterable[pa.Table]) -> None:
        """Write a table of a batch, and clear its cache."""
        self.root.write(name, batch, table)
        self.outputs.get(WRITTEN_BY[name], {}).pop((batch, name), None)
        if name in self.folds:
            self.folds[name].forget(batch)

    def batches_with(self, name: str) -> list[str]:
        """Return the batches that have the table.

        Raises:
            ConfigError: no batch has it.
        """
        batches = self.root.batches(name)
        if not batches:
            raise ConfigError(
                f"{self.root.path}: no {name} yet; run `replay-pipeline {WRITTEN_BY[name]}` first"
            )
        return batches

    def tools_until(self, batch: str) -> pa.Table:
        """Return the tools of this and earlier batches, since a small batch doesn't show all tools."""
        rows = dict(self.seen_tools.before(batch))
        if self.root.has("tools", batch):
            rows = _with_tools(rows, self.root.read("tools", batch))
        found = [
            {"name": name, "agent_version": version, "tool_json": definition}
            for (name, version, definition), times in rows.items()
            for _ in range(times)
        ]
        return pa.table(
            [array_of([row.get(name) for row in found], kind) for name, kind in _TOOL_COLUMNS],
            schema=TABLES["tools"],
        )

    def tools_digest(self, batch: str) -> dict[str, str]:
        """Return a digest of the tools that a batch's states show, including tools from earlier batches."""
        if not self.root.has("tools", batch):
            return {}
        return {"tools": hash_texts(self.tools_until(batch)["tool_json"].to_pylist())}

    def digests(self, batch: str, names: Iterable[str]) -> dict[str, str]:
        """Return a digest of each table of a batch from its bytes, or `-` if it doesn't exist."""
        return {name: file_digest(self.root.part(name, batch)) for name in names}

    def known_digests(self, batch: str, names: Iterable[str]) -> dict[str, str]:
        """Return the result of `digests`, taken from receipts where they are up to date."""
        return {name: self.known_digest(batch, name) for name in names}

    def known_digest(self, batch: str, name: str) -> str:
        """Return the digest of one table, as `known_digests` does."""
        stage = WRITTEN_BY[name]
        if stage not in self.outputs:
            self.outputs[stage] = {
                (receipt.batch, table): (digest, receipt.at)
                for receipt in self.receipts.all(stage=stage)
                for table, digest in receipt.outputs.items()
            }
        known, at = self.outputs[stage].get((batch, name), ("", ""))
        # Who changes a table by hand leaves its receipt as it is: what is published must be looked at.
        if known and not _is_newer(self.root.path, self.root.name_of(name, batch), _seconds_of(at)):
            return known
        return file_digest(self.root.part(name, batch))

    def tables_of(self, batch: str, *stages: str) -> list[str]:
        """Return the names of the tables that `Receipt.data_version` covers."""
        return [
            name
            for name, stage in WRITTEN_BY.items()
            if stage in stages and name != "sessions" and self.known_digest(batch, name) != "-"
        ]


def paired(project: Project, batches: Iterable[str]) -> Iterator[DPOPair]:
    """Yield the pairs of each batch with their prompts."""
    for batch in batches:
        yield from pairs_of(project.root.read("dpo_pairs", batch), project.prompts(batch))


def _with_tools(known: dict[_ToolRow, int], tools: pa.Table) -> dict[_ToolRow, int]:
    """Add the definitions of a batch to those that are known.

    A definition counts at most twice: merging it a second time may leave out what a schema says
    beyond its shape, a third time changes nothing.
    """
    for row in tools.select(["name", "agent_version", "tool_json"]).to_pylist():
        key = (row["name"], row["agent_version"], row["tool_json"])
        known[key] = min(2, known.get(key, 0) + 1)
    return known


def _with_moved_sessions(known: dict[str, str], sessions: pa.Table) -> dict[str, str]:
    """Add the sessions of a batch that are part of a conversation which another session began."""
    rows = zip(
        sessions["session_id"].to_pylist(), sessions["conversation"].to_pylist(), strict=True
    )
    moved = {conversation_of(session): conversation for session, conversation in rows}
    return known | {
        name: conversation for name, conversation in moved.items() if name != conversation
    }


_TOOLS = list[tuple[str, str | None, str, int]]


def _encoded_tools(known: dict[_ToolRow, int]) -> bytes:
    return msgspec.json.encode([(*row, times) for row, times in known.items()])


def _decoded_tools(data: bytes) -> dict[_ToolRow, int]:
    rows = msgspec.json.decode(data, type=_TOOLS)
    return {(name, version, tool): times for name, version, tool, times in rows}


class Owners:
    """The batch that owns each state, looked up in the index."""

    def __init__(self, work: Project) -> None:
        self._work = work
        self._moved: dict[str, str] = {}
        versions = {r.batch: _version_of(r, "states") for r in work.receipts.all(stage="ingest")}

        def ids(batch: str) -> list[str]:
            if not work.root.has("states", batch):
                return []
            return work.root.read("states", batch, columns=["state_id"])[0].to_pylist()

        work.index.bring_ids(versions, ids)

    def get(self, state_id: str, default: str | None = None) -> str | None:
        """Return the batch that owns a state."""
        return self._moved.get(state_id) or self._work.index.batch_of(state_id) or default

    def update(self, owners: Mapping[str, str]) -> None:
        """Add states that were read since."""
        self._moved |= owners


def _version_of(receipt: Receipt, table: str) -> str:
    return receipt.outputs.get(table) or receipt.at


def named_digests(digests: Mapping[str, str]) -> list[str]:
    """Return each digest after its name."""
    return [f"{name}:{digest}" for name, digest in digests.items()]


def _seconds_of(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp() if moment else 0.0


def _is_newer(root: Place, name: str, at_s: float) -> bool:
    """Return whether a file of this machine was written to after a moment, in seconds, or is gone."""
    if not isinstance(root, Path):
        return False
    try:
        # For tens of thousands of files, paths would take longer than the system does.
        return os.stat(f"{root}/{name}").st_mtime > at_s  # noqa: PTH116
    except FileNotFoundError:
        return True


def file_digest(path: Place) -> str:
    """Return the hash of a file's bytes, or `-` without a file."""
    if not isinstance(path, Path):
        return bytes_digest(path.read_bytes()) if path.exists() else "-"
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, _blake2b).hexdigest()
    except FileNotFoundError:
        return "-"


def bytes_digest(data: bytes) -> str:
    """Return the hash of bytes, as `file_digest` does."""
    return _blake2b(data).hexdigest()


def _with_dataset_folder(settings: Settings, receipts: Receipts) -> Settings:
    """Return the settings with the dataset where `publish --to` put it, if they name no place."""
    last = None if settings.publish.folder else receipts.read("publish", ALL)
    if last is None or not (place := last.report.get(FOLDER)):
        return settings
    if not (folder := as_path(place)).exists():
        return settings
    publish = settings.publish.model_copy(update={"folder": folder})
    return settings.model_copy(update={"publish": publish})


def _newest(place: Place) -> Place:
    from replay_pipeline.publish import newest  # which loads what publishing needs

    return newest(place) or place

"""A data root with its settings, as the stages use it: batches, tables, prompts, digests, teachers.

The stages change it. Views for people are in `replay_pipeline.stages.views.summary`.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from replay_pipeline.actions import canonical_action
from replay_pipeline.actions.keys import purpose_of
from replay_pipeline.errors import ConfigError
from replay_pipeline.ingesters import LazyStates, TraceBatch, Traces, manifest_from
from replay_pipeline.settings import Settings
from replay_pipeline.stages.receipts import ALL, FOLDER, Overview, Receipts, hash_texts
from replay_pipeline.stages.shown import harnesses_of
from replay_pipeline.storage.arrays import array_of
from replay_pipeline.storage.folds import Fold
from replay_pipeline.storage.pair_rows import PromptsOf, pairs_of
from replay_pipeline.storage.schemas import TABLES, WRITTEN_BY
from replay_pipeline.storage.store import Place, as_path, json_files
from replay_pipeline.storage.tables import DataRoot
from replay_pipeline.testing import TeacherServer
from replay_pipeline.testing.rehearsal import STATE_COLUMNS, rehearsed_answers
from replay_pipeline.testing.sample import ANSWERS_FILE
from replay_pipeline.types import DPOPair, Progress, TeacherSpec, TraceState

T = TypeVar("T")

_blake2b = partial(hashlib.blake2b, digest_size=16)

OnProgress = Callable[[Progress], None]

_TOOL_COLUMNS = [(field.name, field.type) for field in TABLES["tools"]]
_ToolRow = tuple[str, str | None, str]
"""Name, release series and definition of a tool."""


class Project(Overview):
    """One data root with its settings: the tables that stages read and write.

    Raises:
        StorageError: the object store with the data root can't be reached.
    """

    def __init__(self, settings: Settings, *, on_progress: OnProgress | None = None) -> None:
        super().__init__(settings)
        self.settings = _with_dataset_folder(settings, self.receipts)
        self.root = DataRoot(settings.data_dir)
        self.on_progress = on_progress or (lambda _: None)
        self._folds: dict[str, Fold[Any]] = {}
        self._once: dict[str, Any] = {}
        self._outputs: dict[str, dict[tuple[str, str], tuple[str, str]]] = {}
        self._seen_tools = self.fold("tools", dict[_ToolRow, int], self._with_tools)

    def place_of(self, name: str) -> Place:
        """Return the path of a file by its name below the root; the dataset may lie elsewhere."""
        top, _, rest = name.partition("/")
        if top == "dataset":
            from replay_pipeline.publish import newest  # which loads what publishing needs

            place = self.settings.dataset_dir()
            return (newest(place) or place) / rest
        return self.root.path / name

    def manifests(self) -> list[TraceBatch]:
        """Return every batch that has a manifest, in order.

        Raises:
            IngestError: a manifest is damaged.
        """
        folder = self.root.path / "batches"
        return [
            manifest_from(text, f"{folder}/{name}")
            for name, text in json_files(self.root.path, "batches")
        ]

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return the result of `make`, which runs only once for all batches."""
        if name not in self._once:
            self._once[name] = make()
        return self._once[name]

    def tell_part(self, part: str, **more: Any) -> OnProgress:
        """Return a callback that reports a batch's progress as a part of its stage."""
        return lambda progress: self.on_progress(replace(progress, part=part, **more))

    @contextmanager
    def teachers(self, batches: Iterable[str] = ()) -> Iterator[tuple[TeacherSpec, ...]]:
        """Keep the teachers ready while they are used. Recorded or made-up teachers get a server for that time."""
        if self.settings.played is None:
            yield self.settings.replay.teachers
            return
        answers = ANSWERS_FILE
        if self.settings.played == "rehearsal":
            answers = rehearsed_answers(
                row
                for key in batches
                for row in self.root.read("states", key, columns=STATE_COLUMNS).to_pylist()
            )
        with TeacherServer(answers) as server:
            yield server.served(self.settings.teachers())

    def states(self, batches: Iterable[str], *, is_neutral: bool = False) -> LazyStates:
        """Return the states of these batches. Each is built on access."""
        keys = list(batches)
        sizes = [self.root.n_rows("states", key) for key in keys]
        return LazyStates(
            sizes,
            lambda number: self._traces(keys[number], is_neutral=is_neutral),
            window=self.settings.ingest.window,
        )

    def asked_states(self, batches: Iterable[str], *, is_neutral: bool = False) -> LazyStates:
        """Return the states that teachers are asked at; see `not_asked`."""
        keys = list(batches)
        left_out = [each for key in keys for each in self.not_asked(key)]
        states = self.states(keys, is_neutral=is_neutral)
        return states.of([number for number, each in enumerate(left_out) if each is None])

    def not_asked(self, batch: str) -> list[str | None]:
        """Return for each state of a batch why teachers are not asked there; None where they are.

        Its prompt is `incomplete`, or its action only `looks` or keeps `books`: those states are
        context of the next consequence.
        """
        replay = self.settings.replay
        columns = ["lacks", "cwd", "action_tool_calls_json"]
        rows = self.root.read("states", batch, columns=columns).to_pylist()
        return [
            "incomplete"
            if row["lacks"] and not replay.asks_incomplete
            else _purpose_of(row)
            if replay.ask_at == "consequences"
            else None
            for row in rows
        ]

    def _traces(self, batch: str, *, is_neutral: bool = False) -> Traces:
        """Open the sessions of a batch. In the neutral form, the texts of clients come separately from the prompts."""
        tables = {name: self.root.read(name, batch) for name in ("sessions", "turns", "states")}
        # Reading takes twice what the tables hold, and Arrow would keep it for the next time.
        pa.default_memory_pool().release_unused()
        return Traces(
            **tables,
            tools=self._tools_until(batch),
            harnesses=self.once("harnesses", lambda: harnesses_of(self.settings)),
            is_neutral=is_neutral,
        )

    def prompts(self, batch: str, *, is_neutral: bool = False) -> PromptsOf:
        """Return a reader of the messages that a batch's states show. It opens the tables on first use."""
        traces: list[Traces] = []

        def prompts(state_ids: Sequence[str]) -> Iterator[TraceState]:
            if not traces:
                traces.append(self._traces(batch, is_neutral=is_neutral))
            return traces[0].materialize(state_ids, self.settings.ingest.window)

        return prompts

    def fold(self, table: str, start: Callable[[], T], add: Callable[[T, str], T]) -> Fold[T]:
        """Fold over the batches, and start over when `table` of one that was added is rewritten."""
        fold = self._folds[table] = Fold(self.batches, start=start, add=add)
        return fold

    def _with_tools(self, known: dict[_ToolRow, int], batch: str) -> dict[_ToolRow, int]:
        """Add the definitions of a batch to those that are known.

        A definition counts at most twice: merging it a second time may leave out what a schema says
        beyond its shape, a third time changes nothing.
        """
        if not self.root.has("tools", batch):
            return known
        columns = self.root.read("tools", batch, columns=["name", "agent_version", "tool_json"])
        for row in columns.to_pylist():
            key = (row["name"], row["agent_version"], row["tool_json"])
            known[key] = min(2, known.get(key, 0) + 1)
        return known

    def write(self, name: str, batch: str, table: pa.Table | Iterable[pa.Table]) -> None:
        """Write a table of a batch, and clear its cache."""
        self.root.write(name, batch, table)
        self._outputs.get(WRITTEN_BY[name], {}).pop((batch, name), None)
        if name in self._folds:
            self._folds[name].forget(batch)

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

    def _tools_until(self, batch: str) -> pa.Table:
        """Return the tools of this and earlier batches, since a small batch doesn't show all tools."""
        rows = self._with_tools(dict(self._seen_tools.before(batch)), batch)
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
        return {"tools": hash_texts(self._tools_until(batch)["tool_json"].to_pylist())}

    def digests(self, batch: str, names: Iterable[str]) -> dict[str, str]:
        """Return a digest of each table of a batch from its bytes, or `-` if it doesn't exist."""
        return {name: file_digest(self.root.part(name, batch)) for name in names}

    def known_digests(self, batch: str, names: Iterable[str]) -> dict[str, str]:
        """Return the result of `digests`, taken from receipts where they are up to date."""
        return {name: self._known_digest(batch, name) for name in names}

    def _known_digest(self, batch: str, name: str) -> str:
        """Return the digest of one table, as `known_digests` does."""
        stage = WRITTEN_BY[name]
        if stage not in self._outputs:
            self._outputs[stage] = {
                (receipt.batch, table): (digest, receipt.at)
                for receipt in self.receipts.all(stage=stage)
                for table, digest in receipt.outputs.items()
            }
        known, at = self._outputs[stage].get((batch, name), ("", ""))
        at_s = datetime.fromisoformat(at).timestamp() if at else 0.0
        # Who changes a table by hand leaves its receipt as it is: what is published must be looked at.
        if known and not _is_newer(self.root.path, self.root.name_of(name, batch), at_s):
            return known
        return file_digest(self.root.part(name, batch))

    def forget(self) -> None:
        """Look again at what there is, since others may have written."""
        super().forget()
        self._outputs.clear()


def _purpose_of(row: Mapping[str, Any]) -> str | None:
    """Return why an action has no consequence."""
    calls = msgspec.json.decode(row["action_tool_calls_json"] or "[]")
    return purpose_of(canonical_action({"tool_calls": calls}, cwd=row["cwd"]))


def paired(project: Project, batches: Iterable[str]) -> Iterator[DPOPair]:
    """Yield the pairs of each batch with their prompts."""
    for batch in batches:
        yield from pairs_of(project.root.read("dpo_pairs", batch), project.prompts(batch))


def named_digests(digests: Mapping[str, str]) -> list[str]:
    """Return each digest after its name."""
    return [f"{name}:{digest}" for name, digest in digests.items()]


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
        return _blake2b(path.read_bytes()).hexdigest() if path.exists() else "-"
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, _blake2b).hexdigest()
    except FileNotFoundError:
        return "-"


def _with_dataset_folder(settings: Settings, receipts: Receipts) -> Settings:
    """Return the settings with the dataset where `publish --to` put it, if they name no place."""
    last = None if settings.publish.folder else receipts.read("publish", ALL)
    if last is None or not (place := last.report.get(FOLDER)):
        return settings
    if not (folder := as_path(place)).exists():
        return settings
    publish = settings.publish.model_copy(update={"folder": folder})
    return settings.model_copy(update={"publish": publish})

"""A data root and its settings: what lies there, what is done, what it cost, what is stale.

The stages that change it are in `replay_pipeline.stages.pipeline`.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pyarrow as pa

from replay_pipeline.errors import ConfigError
from replay_pipeline.ingesters import (
    LazyStates,
    TraceBatch,
    Traces,
    discover,
    keep,
    manifest_from,
    write_manifest,
)
from replay_pipeline.lazy import OnFirstUse
from replay_pipeline.pairs import pairs_of
from replay_pipeline.reliability import draw
from replay_pipeline.replay import (
    Estimate,
    ReplayOptions,
    check_teachers,
    estimate,
    probe_estimate,
    probe_teachers,
    spent_since,
)
from replay_pipeline.replay.rows import teacher_actions_from_table
from replay_pipeline.review import rank_pairs, show_state, write_review
from replay_pipeline.settings import Settings, key_of
from replay_pipeline.stages.doctor import examine, examine_probes
from replay_pipeline.stages.hub_sources import fetch_sessions, repository_of
from replay_pipeline.stages.overview import Overview, hash_of
from replay_pipeline.stages.receipts import Receipt, Written
from replay_pipeline.stages.staleness import UNKNOWN, find_outdated
from replay_pipeline.stages.summary import summarize, summarize_night
from replay_pipeline.stages.versions import versions_of
from replay_pipeline.storage.arrays import array_of
from replay_pipeline.storage.folds import Fold, Kept
from replay_pipeline.storage.pair_rows import PromptsOf
from replay_pipeline.storage.schemas import TABLES, WRITTEN_BY
from replay_pipeline.storage.store import Place
from replay_pipeline.storage.tables import DataRoot
from replay_pipeline.testing import TeacherServer, rehearsed_answers
from replay_pipeline.testing.sample import ANSWERS_FILE
from replay_pipeline.types import DPOPair, Progress, TeacherSpec, TraceState, conversation_of

if TYPE_CHECKING:
    from replay_pipeline.publish import versions
else:
    versions = OnFirstUse("replay_pipeline.publish.versions")

T = TypeVar("T")

_blake2b = partial(hashlib.blake2b, digest_size=16)

REVIEW_PAGE = "review.html"
_SAMPLE_PAGE = "review-sample.html"
_DRAWN_BY = ["pair_id", "p_better", "is_checked_right"]
_PAIRS_A_PAGE = 250
"""What a browser opens at once, and a person looks through at most."""

_PLANNED_ABOVE_BUDGET = 1.25
"""Estimates are rough: plan for a little more than there is, so that no money is left over."""

OnProgress = Callable[[Progress], None]

_TOOL_COLUMNS = [(field.name, field.type) for field in TABLES["tools"]]
_ToolRow = tuple[str, str | None, str]
"""Name, release series and definition of a tool."""


class Project(Overview):
    """One data root under its settings: its batches, and everything that can be looked at.

    Args:
        settings: everything the stages are told.
        on_progress: called as long work moves on.

    Raises:
        StorageError: the data root is on an object store that cannot be reached.
    """

    def __init__(self, settings: Settings, *, on_progress: OnProgress | None = None) -> None:
        super().__init__(settings)
        self.root = DataRoot(settings.data_dir)
        self._on_progress = on_progress or (lambda _: None)
        self._folds: dict[str, Fold[Any]] = {}
        self._outputs: dict[str, dict[tuple[str, str], tuple[str, str]]] = {}
        self._seen_tools = self._fold(
            "tools", dict[_ToolRow, int], _with_tools, encode=_encoded_tools, decode=_decoded_tools
        )
        self._moved_sessions = self._fold(
            "sessions",
            dict[str, str],
            _with_moved_sessions,
            encode=msgspec.json.encode,
            decode=msgspec.json.Decoder(dict[str, str]).decode,
        )
        self._tools_seen = Fold(
            self.batches,
            start=str,
            add=lambda value, key: hash_of([value, *named(self._known_digests(key, ["tools"]))]),
        )
        self._seen_pairs = self._folds["dpo_pairs"] = Fold(
            self.batches,
            start=str,
            add=lambda value, key: hash_of(
                [value, key, *named(self._known_digests(key, self._tables_of_pairs(key)))]
            ),
        )

    def place_of(self, name: str) -> Place:
        """Tell where a file lies that a receipt names."""
        top, _, rest = name.partition("/")
        if top == "dataset":
            place = self.settings.dataset_dir()
            return (versions.newest(place) or place) / rest
        if top == "model":
            return self.settings.model_dir() / rest
        if top == "sources" and (folder := self._kept_folder()):
            return folder / rest
        return self.root.path / name

    # Batches

    def find_batches(self, *, settle_s: float = 0.0) -> list[TraceBatch]:
        """Group new session bytes into batches and write their manifests. Returns the new ones.

        Files written to less than `settle_s` seconds ago are left for the next time.
        """
        options = self.settings.ingest
        new = discover(
            [fetch_sessions(source, self.settings.local_dir()) for source in options.sources]
            if any(map(repository_of, options.sources))
            else options.sources,
            known=self.manifests(),
            max_batch_bytes=options.max_batch_bytes,
            max_batch_sessions=options.max_batch_sessions,
            settle_s=settle_s,
        )
        for batch in new:
            write_manifest(batch, self.root.path)
            if folder := self._kept_folder():
                keep(batch, folder)
        self._keys = None
        return new

    def manifests(self) -> list[TraceBatch]:
        """Give every batch that has a manifest, in order.

        Raises:
            IngestError: a manifest is damaged.
        """
        self.index.bring("batches")
        folder = self.root.path / "batches"
        return [
            manifest_from(text, f"{folder}/{name}")
            for name, _, text in self.index.copies("batches")
        ]

    def fitting(self, batches: Sequence[str], *, max_total_usd: float) -> list[str]:
        """Give the first of `batches` that `max_total_usd` is likely to pay for, by what others have cost.

        Costs are taken to grow with the bytes of the sessions. At least one batch is given, and all
        as long as none was paid for. It is a plan only: what holds the ceiling is the replay.
        """
        sizes = {b.key: b.n_bytes for b in self.manifests()}
        reports = self._reports("replay")
        done = [key for key, report in reports.items() if report["is_complete"] and key in sizes]
        spent_usd = sum(reports[key]["spent_usd"] for key in done)
        n_bytes = sum(sizes[key] for key in done)
        if not (spent_usd and n_bytes):
            return list(batches)
        chosen: list[str] = []
        left_usd = max_total_usd * _PLANNED_ABOVE_BUDGET
        for key in batches:
            if chosen and left_usd <= 0:
                break
            paid_usd = reports.get(key, {}).get("spent_usd", 0.0)
            left_usd -= max(0.0, spent_usd / n_bytes * sizes.get(key, 0) - paid_usd)
            chosen.append(key)
        return chosen

    def _kept_folder(self) -> Path | None:
        """Give the folder for the bytes that were read; `None` if they are not kept."""
        if not self.settings.ingest.keeps_bytes:
            return None
        # Unredacted logs never go to an object store.
        with suppress(ConfigError):
            return self.settings.local_dir() / "sources"
        return None

    @cached_property
    def _owners(self) -> "Owners":
        """The batch that has each state: the last one that read it anew."""
        return Owners(self)

    # Looking

    def completed_batches(self) -> set[str]:
        """Batches at which every question has its answer; the others go on in the next run.

        Not those that lost states to a later batch since: they are made again, and pay nothing.
        """
        reports = self.receipts.reports("replay", names=("is_complete",))
        outdated = find_outdated(self.receipts.written(), lambda _: {})
        return {
            batch
            for batch, report in reports.items()
            if report["is_complete"] and batch not in outdated
        }

    def check_keys(self) -> None:
        """See that every teacher's key is there, before anything is asked or even priced.

        Raises:
            ConfigError: a key is missing.
        """
        if self.settings.played is None:
            for teacher in self.settings.replay.teachers:
                key_of(teacher)

    def check_teachers(self) -> list[dict[str, Any]]:
        """Give each teacher: key, endpoint, price, terms, and what is wrong with it."""
        with self._teachers() as teachers:
            checks = check_teachers(teachers, price_folder=self._price_folder())
        return [check.to_json() for check in checks]

    def estimate(self, batches: Sequence[str] | None = None) -> Estimate:
        """Say what replaying `batches` (by default all) would cost beyond what is already paid."""
        with self._teachers() as teachers:
            states = self._states(batches or self.batches())
            return estimate(states, teachers, ledger=self.settings.ledger_url(), **self._options())

    def stale(self) -> dict[str, Any]:
        """Say what the installed code would make otherwise: by batch and stage, the reasons.

        Stages that follow are done again where the rows before them come out different. `cost` is
        the estimate of the questions that have not been asked in this form; `None` where no
        question changes.

        Raises:
            PriceError: a teacher has no price, so the cost is not known.
        """
        batches = find_outdated(self.receipts.written(), self._versions)
        asked_otherwise = [
            key for key, stages in batches.items() if set(stages.get("replay", ())) - {UNKNOWN}
        ]
        cost = self.estimate(asked_otherwise).to_json() if asked_otherwise else None
        return {"batches": batches, "cost": cost}

    def show(self, state_id: str) -> str:
        """One state as text: what came before, the student's action, each teacher's answer.

        Raises:
            ConfigError: no state, or more than one, begins with `state_id`.
        """
        batches = [
            batch
            for batch in self.root.batches("states")
            if any(
                known.startswith(state_id)
                for known in self.root.read("states", batch)["state_id"].to_pylist()
            )
        ]
        answered = [batch for batch in batches if self.root.has("teacher_actions", batch)]
        paired = [batch for batch in batches if self.root.has("dpo_pairs", batch)]
        return show_state(
            state_id,
            states=self._states(batches),
            teacher_actions=[
                row
                for batch in answered
                for row in teacher_actions_from_table(self.root.read("teacher_actions", batch))
            ],
            pairs=[p for p in self._pairs(paired) if p["state_id"].startswith(state_id)],
            outcomes=[row for b in paired for row in self.root.read("outcomes", b).to_pylist()],
        )

    def review(
        self, path: Place | None = None, *, look: Path | None = None, page: int = 1
    ) -> Place:
        """Write a page that shows pairs side by side, those of the newest batches first.

        Pairs link to their sessions in `look`, the page of `replay-pipeline look`. Where there are
        more pairs than fit on a page, each page has some batches as a whole. Returns where it is.

        Raises:
            ConfigError: no batch has come as far as pairs, or there are not so many pages.
        """
        pages = self._review_pages()
        if not 1 <= page <= len(pages):
            raise ConfigError(f"there is no page {page} of pairs: the last is {len(pages)}")
        batches = pages[page - 1]
        name = REVIEW_PAGE if page == 1 else f"review-{page}.html"
        started = time.perf_counter()
        title = "Preference pairs"
        if len(pages) > 1:
            title += f", page {page} of {len(pages)}: {batches[0]} to {batches[-1]}"
        written = write_review(
            self._pairs(batches),
            path=path or self.root.path / name,
            look=look,
            outcomes=pa.concat_tables([self.root.read("outcomes", b) for b in batches]).to_pylist(),
            title=title,
        )
        if path is None:
            self.receipts.write(
                Receipt(
                    stage="review",
                    batch="all" if page == 1 else f"page-{page}",
                    fingerprint="",
                    report={},
                    seconds=round(time.perf_counter() - started, 3),
                    files={name: digest_of(written)},
                )
            )
        return written

    def review_sample(
        self, n: int, path: Place | None = None, *, look: Path | None = None
    ) -> Place:
        """Write a page with the `n` pairs whose check tells most about how many are right.

        Raises:
            ConfigError: no batch has come as far as pairs.
        """
        batches = self._batches_with("dpo_pairs")
        rows = self.root.read_all("dpo_pairs").select(_DRAWN_BY).to_pylist()
        chances = draw(
            {
                row["pair_id"]: row["p_better"] or 0.0
                for row in rows
                if row["is_checked_right"] is None
            },
            n,
        )
        return write_review(
            (pair for pair in self._pairs(batches) if pair.get("pair_id") in chances),
            path=path or self.root.path / _SAMPLE_PAGE,
            look=look,
            title=f"{len(chances)} pairs to check",
            chances=chances,
        )

    def n_review_pages(self) -> int:
        """Tell over how many pages the pairs are spread. Raises as `review` does."""
        return len(self._review_pages())

    def _review_pages(self) -> list[list[str]]:
        """Batches by page, the newest on the first; in their order on each."""
        reports = self.receipts.reports("pairs", names=["n_pairs"])
        sizes = {key: report["n_pairs"] for key, report in reports.items()}
        pages: list[list[str]] = [[]]
        n_pairs = 0
        # Receipts name the batches without a look into ten thousand folders.
        for batch in reversed(sorted(sizes) or self._batches_with("dpo_pairs")):
            n = sizes[batch] if batch in sizes else self.root.n_rows("dpo_pairs", batch)
            if n_pairs and n_pairs + n > _PAIRS_A_PAGE:
                pages.append([])
                n_pairs = 0
            pages[-1].insert(0, batch)
            n_pairs += n
        return pages

    def sample_pairs(self, batch: str, n_pairs: int) -> list[DPOPair]:
        """Give the first pairs of a batch, with their prompts."""
        rows = self.root.read("dpo_pairs", batch).slice(0, n_pairs)
        return list(pairs_of(rows, self._prompts(batch)))

    def ranked_pairs(self) -> list[Mapping[str, Any]]:
        """Give the rows of all pairs, those first that are most worth a person's look.

        Raises:
            ConfigError: no batch has come as far as pairs.
        """
        self._batches_with("dpo_pairs")
        return rank_pairs(self.root.read_all("dpo_pairs").to_pylist())

    def review_path(self, batch: str) -> Place:
        """Tell where the review page of one batch is, written together with its pairs."""
        return self.root.path / "review" / f"{batch}.html"

    def examine(self) -> list[dict[str, Any]]:
        """Check this machine and these settings. One finding each: what, whether ok, detail."""
        return examine(self.settings, self.check_teachers())

    def probe_estimate(self) -> Estimate:
        """Say what `probe` would cost. Raises as `estimate` does."""
        with self._teachers() as teachers:
            return probe_estimate(teachers, **self._options())

    def probe(self) -> list[dict[str, Any]]:
        """Ask every teacher three tiny questions. One finding each, as of `examine`."""
        with self._teachers() as teachers:
            ledger = self.settings.ledger_url()
            return examine_probes(probe_teachers(teachers, ledger=ledger, **self._options()))

    def summary(self, *, since: Mapping[tuple[str, str], str]) -> dict[str, Any]:
        """Give the figures of all stages; what was done after `since` counts as done now."""
        figures = summarize(list(self.receipts.figures(since=since)), n_teachers=self.n_teachers())
        figures["max_total_usd"] = self.settings.replay.max_total_usd
        figures["dataset"] = str(self.settings.dataset_dir())
        return figures

    def night(self, *, since: datetime, failures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Tell what was done since then, and what is still open; `failures` are runs that failed."""
        return summarize_night(
            [each for each in self.receipts.figures() if each.at >= since.isoformat()],
            since=since,
            spent_usd=spent_since(self.settings.ledger_url(), since),
            max_nightly_usd=self.settings.replay.max_nightly_usd,
            n_open=len(set(self.batches()) - self.completed_batches()),
            failures=failures,
        )

    # For the stages

    def watch(self, on_progress: OnProgress) -> None:
        """Tell `on_progress` from now on how far long work has come."""
        self._on_progress = on_progress

    def _tell_part(self, part: str, **more: Any) -> OnProgress:
        """Give what tells the progress of a batch as a part of its stage."""
        return lambda progress: self._on_progress(replace(progress, part=part, **more))

    def _versions(self, stage: str) -> dict[str, str]:
        is_gated = stage == "replay" and bool(self.settings.replay.gates)
        return versions_of(stage, is_gated=is_gated)

    @contextmanager
    def _teachers(self, batches: Iterable[str] = ()) -> Iterator[tuple[TeacherSpec, ...]]:
        """Hold the teachers ready: those that are played have a server for as long.

        Args:
            batches: those at whose states they are asked, for which answers are made up.
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

    def _states(self, batches: Iterable[str]) -> Sequence[TraceState]:
        """Give the states of these batches, each put together when it is looked at."""
        keys = list(batches)
        sizes = [self.root.n_rows("states", key) for key in keys]
        return LazyStates(
            sizes,
            lambda number: self._traces(keys[number]),
            window=self.settings.ingest.window,
        )

    def _traces(self, batch: str) -> Traces:
        tables = {name: self.root.read(name, batch) for name in ("sessions", "turns", "states")}
        # Reading takes twice what the tables hold, and Arrow would keep it for the next time.
        pa.default_memory_pool().release_unused()
        return Traces(**tables, tools=self._tools_until(batch))

    def _prompts(self, batch: str) -> PromptsOf:
        """Find what the states of a batch had shown, for its pairs; opened when first asked."""
        traces: list[Traces] = []

        def prompts(state_ids: Sequence[str]) -> Iterator[TraceState]:
            if not traces:
                traces.append(self._traces(batch))
            return traces[0].materialize(state_ids, self.settings.ingest.window)

        return prompts

    def _pairs(self, batches: Iterable[str]) -> Iterator[DPOPair]:
        """Give the pairs of batches with their prompts, one after the other."""
        for batch in batches:
            yield from pairs_of(self.root.read("dpo_pairs", batch), self._prompts(batch))

    def _tables_of_pairs(self, batch: str) -> tuple[str, ...]:
        """Name the tables with pairs of a batch: the record's, and the samples' where there are."""
        names = ("dpo_pairs", "sampled_pairs")
        return names[: 1 + self.root.has("sampled_pairs", batch)]

    def _accounts(self, night: str | None = None) -> ReplayOptions:
        """Give what everything that pays is told alike: the ceilings it shares, the price lists."""
        replay = self.settings.replay
        limits = {"day": replay.max_daily_usd, "night": replay.max_nightly_usd if night else None}
        return {
            "night": night,
            "limits_usd": {scope: usd for scope, usd in limits.items() if usd is not None},
            "price_folder": self._price_folder(),
        }

    def _options(self, night: str | None = None) -> ReplayOptions:
        """Give what decides which questions a replay asks, and how."""
        replay, pairs = self.settings.replay, self.settings.pairs
        return {
            **self._accounts(night),
            "max_concurrency": replay.max_concurrency,
            "gates": replay.gates,
            "agreement_threshold": pairs.agreement_threshold,
            "level": pairs.level,
            "count_own_family": pairs.count_own_family,
            "accepted_terms": replay.accepted_terms,
            "retry": replay.retry,
        }

    def _price_folder(self) -> Place | None:
        """Tell where price lists are kept; a server of ours has prices of its own each time."""
        return None if self.settings.played else self.root.path / "prices"

    def _fold(
        self,
        table: str,
        start: Callable[[], T],
        add: Callable[[T, pa.Table], T],
        *,
        encode: Callable[[T], bytes],
        decode: Callable[[bytes], T],
    ) -> Fold[T]:
        """Fold over the batches that `table` holds."""

        def add_batch(value: T, key: str) -> T:
            return add(value, self.root.read(table, key)) if self.root.has(table, key) else value

        kept = self._kept_fold(table, table, encode, decode)
        fold = self._folds[table] = Fold(self.batches, start=start, add=add_batch, kept=kept)
        return fold

    def _kept_fold(
        self, name: str, table: str, encode: Callable[[T], bytes], decode: Callable[[bytes], T]
    ) -> Kept[T]:
        """Say how a fold outlives the process, as long as `table` of its batches stays as it is."""
        return Kept(
            index=self.index,
            name=name,
            version_of=lambda batch: self._known_digest(batch, table),
            encode=encode,
            decode=decode,
        )

    def _write(self, name: str, batch: str, table: pa.Table | Iterable[pa.Table]) -> None:
        self.root.write(name, batch, table)
        self._outputs.get(WRITTEN_BY[name], {}).pop((batch, name), None)
        if name in self._folds:
            self._folds[name].forget(batch)

    def _batches_with(self, name: str) -> list[str]:
        batches = self.root.batches(name)
        if not batches:
            raise ConfigError(
                f"{self.root.path}: no {name} yet; run `replay-pipeline {WRITTEN_BY[name]}` first"
            )
        return batches

    def _tools_until(self, batch: str) -> pa.Table:
        """Tools seen in this batch or an earlier one: a small batch does not show them all."""
        rows = dict(self._seen_tools.before(batch))
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

    def _tool_definitions(self, batch: str) -> list[str]:
        if not self.root.has("tools", batch):
            return []
        return self._tools_until(batch)["tool_json"].to_pylist()

    def _digests(self, batch: str, names: Iterable[str]) -> dict[str, str]:
        return {name: digest_of(self.root.part(name, batch)) for name in names}

    def _known_digests(self, batch: str, names: Iterable[str]) -> dict[str, str]:
        """Give what `_digests` gives, without reading tables that have stayed as their receipt says."""
        return {name: self._known_digest(batch, name) for name in names}

    def _known_digest(self, batch: str, name: str) -> str:
        stage = WRITTEN_BY[name]
        if stage not in self._outputs:
            self._outputs[stage] = {
                (receipt.batch, table): (digest, receipt.at)
                for receipt in self.receipts.written(stage)
                for table, digest in receipt.outputs.items()
            }
        known, at = self._outputs[stage].get((batch, name), ("", ""))
        # Who changes a table by hand leaves its receipt as it is: what is published must be looked at.
        if known and not _is_newer(self.root.path, self.root.name_of(name, batch), _seconds_of(at)):
            return known
        return digest_of(self.root.part(name, batch))

    def _is_sampled(self, batch: str) -> bool:
        return self._known_digest(batch, "sampled_positives") != "-"

    def _reports(self, stage: str) -> dict[str, dict[str, Any]]:
        """Reports of a stage by batch."""
        return self.receipts.reports(stage)


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
    """The batch that each state belongs to, by one look into the index for each question."""

    def __init__(self, work: Project) -> None:
        self._work = work
        self._moved: dict[str, str] = {}
        versions = {r.batch: _version_of(r, "states") for r in work.receipts.written("ingest")}

        def ids(batch: str) -> list[str]:
            if not work.root.has("states", batch):
                return []
            return work.root.read("states", batch, columns=["state_id"])[0].to_pylist()

        work.index.bring_ids(versions, ids)

    def get(self, state_id: str, default: str | None = None) -> str | None:
        """Give the batch of a state."""
        return self._moved.get(state_id) or self._work.index.batch_of(state_id) or default

    def update(self, owners: Mapping[str, str]) -> None:
        """Take in states that were read since."""
        self._moved |= owners


def _version_of(receipt: Written, table: str) -> str:
    return receipt.outputs.get(table) or receipt.at


def named(digests: Mapping[str, str]) -> list[str]:
    """Put each digest behind its name."""
    return [f"{name}:{digest}" for name, digest in digests.items()]


def _seconds_of(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp() if moment else 0.0


def _is_newer(root: Place, name: str, at_s: float) -> bool:
    """Whether a file of this machine was written to after a moment, in seconds, or is gone."""
    if not isinstance(root, Path):
        return False
    try:
        # For tens of thousands of files, paths would take longer than the system does.
        return os.stat(f"{root}/{name}").st_mtime > at_s  # noqa: PTH116
    except FileNotFoundError:
        return True


def digest_of(path: Place) -> str:
    """Hash the bytes of a file; `-` for none."""
    if not isinstance(path, Path):
        return bytes_digest(path.read_bytes()) if path.exists() else "-"
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, _blake2b).hexdigest()
    except FileNotFoundError:
        return "-"


def bytes_digest(data: bytes) -> str:
    """Hash bytes as `digest_of` does."""
    return _blake2b(data).hexdigest()

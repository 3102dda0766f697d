"""Write a page with sessions and what the pipeline made of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, tzinfo
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa

from replay_pipeline.errors import ConfigError, IngestError
from replay_pipeline.ingesters import IngestResult, default_sources, ingest
from replay_pipeline.stages.pages.compare import Comparison
from replay_pipeline.stages.pages.costs import Row
from replay_pipeline.stages.pages.files import PageFiles, page_folder
from replay_pipeline.stages.pages.overview import SessionTotals
from replay_pipeline.stages.pages.tree import turns_shown, words_of
from replay_pipeline.types import Progress, TeacherAction

SessionRows = tuple[Row, list[Row], list[Row]]
"""A row of `sessions`, with its rows of `turns` and of `states`."""
_ROWS = 512
_ENDS = ("first_timestamp", "last_timestamp")
OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class Days:
    """The days that a page is about, and the time zone in which they begin and end.

    Raises:
        ConfigError: there is no such time zone, or the last day is before the first.
    """

    timezone: str | None = None
    """An IANA name; by default the zone of this machine."""
    since: date = date.min
    until: date = date.max

    def __post_init__(self) -> None:
        if self.since > self.until:
            raise ConfigError(f"--since {self.since} is after --until {self.until}: swap them")
        _ = self.zone

    @cached_property
    def zone(self) -> tzinfo | None:
        """Return the zone; `None` is that of this machine.

        Raises:
            ConfigError: there is no zone of this name.
        """
        try:
            return ZoneInfo(self.timezone) if self.timezone else None
        except (KeyError, OSError, ValueError) as error:
            raise ConfigError(
                f"--timezone {self.timezone}: no such time zone; write one like Europe/Berlin"
            ) from error

    @property
    def zone_name(self) -> str:
        """Return the zone in words."""
        return self.timezone or f"{datetime.now().astimezone():%Z}, this machine's time zone"

    @property
    def is_part(self) -> bool:
        """Return whether some days are left out."""
        return (self.since, self.until) != (date.min, date.max)

    def of(self, rows: SessionRows) -> SessionRows | None:
        """Return what a session has of these days, in local time; `None` if it has nothing."""
        session, turns, states = rows
        local: list[Row] = [{**turn, "timestamp": self._local(turn["timestamp"])} for turn in turns]
        ends: Row = {name: self._local(session[name]) for name in _ENDS}
        if self.is_part:
            found = [(turn["timestamp"], turn) for turn in local if turn["timestamp"]]
            kept = [(at, turn) for at, turn in found if self.since <= at.date() <= self.until]
            if not kept:
                return None
            if len(kept) < len(local):
                times = [at for at, _ in kept]
                # What its client counted is of all days.
                ends = dict(zip(_ENDS, (min(times), max(times)), strict=True)) | {
                    "client_usd_json": None
                }
            local = [turn for _, turn in kept]
            indexes = {turn["turn_idx"] for turn in local}
            states = [state for state in states if state["turn_idx"] in indexes]
        return {**session, **ends}, local, states

    def _local(self, at: datetime | None) -> datetime | None:
        return at and at.astimezone(self.zone)


ALL_DAYS = Days()


@dataclass(kw_only=True)
class Contents:
    """The content of a page besides the sessions. An empty part has no tab."""

    sessions: Iterable[SessionRows]
    days: Days = ALL_DAYS
    n_sessions: int | None = None
    answers: Callable[[Sequence[Row]], Mapping[str, Sequence[TeacherAction]]] | None = None
    """Returns the answers at some states, by state."""
    accuracy: Mapping[str, float] = field(default_factory=dict)
    """How often each family of models is right, estimated from the votes."""
    verdicts: Sequence[Mapping[str, Any]] = ()
    """The verdicts on models, newest first: `words`, the day as `at`, and the interval beside that of the agent, asked `again`."""
    agent_alike: float | None = None
    """How often the agents' own models, asked again, take the recorded action, which is the ceiling; None if unknown."""
    pairs: Iterable[Mapping[str, Any]] = ()
    """Pairs in portions. The first portion has those to mark next."""
    portion_of: Mapping[str, int] = field(default_factory=dict)
    """The portion of each state's pair."""
    dataset: Mapping[str, Any] | None = None
    training: Mapping[str, Any] | None = None
    read: Mapping[str, Any] = field(default_factory=dict)
    """What the ingestion counted: `fidelity`, `redactions`, `skipped`, `skipped_files`."""
    root: str | None = None
    """Name of the data root, if the sessions come from one."""
    is_redacted: bool = True


def look(
    paths: Sequence[Path] | None = None,
    *,
    to: Path,
    days: Days = ALL_DAYS,
    salt: str = "",
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Read sessions, and write a page that shows them. Returns the figures of its overview.

    Secrets, addresses, and user names are redacted. Nothing is sent anywhere.

    Args:
        paths: session files or folders; by default those of the agents on this machine.
        to: the page's folder.
        days: the days to show, and their time zone.
        salt: makes the placeholders of secrets unguessable.
        on_progress: called as files are read.

    Raises:
        IngestError: a path cannot be read, or there is no session.
        ConfigError: the folder holds something else.
        StorageError: the page cannot be written.
    """
    sources = list(paths or default_sources())
    if not sources:
        raise IngestError(
            "Claude Code has kept no session on this machine: name a folder or a .jsonl file"
        )
    result = ingest(sources, salt=salt, on_progress=on_progress)
    facts = result.report.to_json()
    contents = Contents(
        sessions=sessions_of(result),
        days=days,
        n_sessions=result.report.n_sessions,
        read={name: facts[name] for name in ("fidelity", "redactions", "skipped", "skipped_files")},
    )
    return write_page(contents, to=to, on_progress=on_progress)


def write_page(
    contents: Contents,
    *,
    to: Path,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Write a page. Returns the figures of its overview, with `teachers` if there are answers.

    Raises:
        ConfigError: the folder holds something else.
        StorageError: the page cannot be written.
    """
    with page_folder(to) as files:
        figures = _write_sessions(contents, files, on_progress or (lambda _: None))
        portions = []
        for number, each in enumerate(contents.pairs):
            files.add(f"pairs-{number}", each)
            ids = [item["pair"] for item in each["items"] if "pair" in item]
            portions.append({"title": each["title"], "n_pairs": len(ids), "ids": ids})
        teachers = figures.get("teachers")
        for name, value in (
            ("pairs", portions or None),
            ("dataset", contents.dataset),
            ("training", contents.training),
            ("teachers", teachers),
        ):
            if value:
                files.add(name, value)
        tabs = [
            name for name in ("teachers", "pairs", "dataset", "training") if name in files.names
        ]
        about = {"root": contents.root, "is_redacted": contents.is_redacted}
        files.add("overview", {**figures, **about, "tabs": tabs})
    return figures


def _write_sessions(
    contents: Contents, files: PageFiles, on_progress: OnProgress
) -> dict[str, Any]:
    sums, compared = SessionTotals(), Comparison()
    sessions_with: dict[str, list[int]] = {}
    shown_rows = filter(None, map(contents.days.of, contents.sessions))
    for number, (session, turns, states) in enumerate(shown_rows):
        facts = sums.add(session, turns, states)
        shown = turns_shown(turns, states)
        files.add(f"session-{number}", shown)
        for word in words_of(shown):
            sessions_with.setdefault(word, []).append(number)
        if contents.answers:
            answers = compared.add(facts, turns, states, contents.answers(states))
            if answers:
                facts["has_answers"] = True
                portion = {
                    each: contents.portion_of[each]
                    for each in answers
                    if each in contents.portion_of
                }
                files.add(f"answers-{number}", {"answers": answers, "portion": portion})
        on_progress(Progress(stage="look", n_done=number + 1, n_total=contents.n_sessions))
    if not sums.sessions and contents.days.is_part:
        raise IngestError(
            f"no session has a turn from {contents.days.since} to {contents.days.until}: choose other days"
        )
    sums.settle()
    files.add("sessions", sums.sessions)
    files.add("words", dict(sorted(sessions_with.items())))
    figures = {**sums.figures(), **contents.read, "timezone": contents.days.zone_name}
    teachers = compared.figures(contents.accuracy)
    if teachers is not None or contents.verdicts:
        figures["teachers"] = {
            **(teachers or {"teachers": [], "played": []}),
            "verdicts": contents.verdicts,
            "agent_alike": contents.agent_alike,
        }
    return figures


def sessions_of(result: IngestResult) -> Iterator[SessionRows]:
    """Yield the rows of one session at a time, without loading all of them."""
    turns = _groups(result.parts["turns"])
    states = _groups(result.parts["states"])
    return session_rows(result.sessions.to_pylist(), turns, states)


def session_rows(
    sessions: Iterable[Row],
    turns: Iterator[tuple[str, list[Row]]],
    states: Iterator[tuple[str, list[Row]]],
) -> Iterator[SessionRows]:
    """Group rows by session. All three inputs have the sessions in the same order."""
    rows_of: list[dict[str, list[Row]]] = [{}, {}]
    sources = (turns, states)
    for session in sessions:
        name = session["session_id"]
        found: list[list[Row]] = []
        for place, groups in enumerate(sources):
            kept = rows_of[place]
            while name not in kept and (group := next(groups, None)) is not None:
                kept.setdefault(group[0], []).extend(group[1])
            found.append(kept.pop(name, []))
        yield session, [turn for turn in found[0] if turn["turn_idx"] >= 0], found[1]


def _groups(tables: Iterable[pa.Table]) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of tables by session, one session after the other."""

    def rows() -> Iterator[Row]:
        for table in tables:
            for batch in table.to_batches(max_chunksize=_ROWS):
                yield from batch.to_pylist()

    for name, group in groupby(rows(), key=lambda row: row["session_id"]):
        yield name, list(group)

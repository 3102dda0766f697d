"""Write a page with sessions and what the pipeline made of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from replay_pipeline.errors import IngestError
from replay_pipeline.ingesters import IngestResult, default_sources, ingest
from replay_pipeline.pages.compare import Comparison
from replay_pipeline.pages.costs import Row
from replay_pipeline.pages.files import PageFiles, page_folder
from replay_pipeline.pages.overview import SessionTotals
from replay_pipeline.pages.tree import WordIndex, turns_shown, words_of
from replay_pipeline.types import Progress, TeacherAction

SessionRows = tuple[Row, list[Row], list[Row]]
"""A row of `sessions`, with its rows of `turns` and of `states`."""
_ROWS = 512
OnProgress = Callable[[Progress], None]


@dataclass(kw_only=True)
class Contents:
    """The content of a page besides the sessions. An empty part has no tab."""

    sessions: Iterable[SessionRows]
    n_sessions: int | None = None
    answers: Callable[[Sequence[Row]], Mapping[str, Sequence[TeacherAction]]] | None = None
    """Returns the answers at some states, by state."""
    accuracy: Mapping[str, float] = field(default_factory=dict)
    """How often each family of models is right, estimated from the votes."""
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
    salt: str = "",
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Read sessions, and write a page that shows them. Returns the figures of its overview.

    Secrets, addresses, and user names are redacted. Nothing is sent anywhere.

    Args:
        paths: session files or folders; by default those of the agents on this machine.
        to: the page's folder.
        salt: makes the placeholders of secrets unguessable.
        on_progress: called as files are read.

    Raises:
        IngestError: a path cannot be read, or there is no session.
        ConfigError: the folder holds something else.
        StorageError: the page cannot be written.
    """
    sources = list(paths or default_sources())
    if not sources:
        raise IngestError("no session found: name a folder or a .jsonl file")
    result = ingest(sources, salt=salt, on_progress=on_progress)
    facts = result.report.to_json()
    contents = Contents(
        sessions=sessions_of(result),
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
    with page_folder(to, "Sessions") as files:
        figures = _write_sessions(contents, files, on_progress or (lambda _: None))
        portions = []
        for number, each in enumerate(contents.pairs):
            files.add(f"pairs-{number}", each, is_packed=True)
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
    sums, words, compared = SessionTotals(), WordIndex(), Comparison()
    for number, (session, turns, states) in enumerate(contents.sessions):
        facts = sums.add(session, turns, states)
        shown = turns_shown(turns, states)
        files.add(f"session-{number}", shown, is_packed=True)
        words.add(number, words_of(shown))
        if contents.answers:
            answers = compared.add(facts, turns, states, contents.answers(states))
            if answers:
                facts["has_answers"] = True
                portion = {
                    each: contents.portion_of[each]
                    for each in answers
                    if each in contents.portion_of
                }
                files.add(
                    f"answers-{number}", {"answers": answers, "portion": portion}, is_packed=True
                )
        on_progress(Progress(stage="look", n_done=number + 1, n_total=contents.n_sessions))
    sums.settle()
    files.add("sessions", sums.sessions)
    for shard, found in words.shards():
        files.add(f"words-{shard}", found)
    figures = {**sums.figures(), **contents.read}
    if (teachers := compared.figures(contents.accuracy)) is not None:
        figures["teachers"] = teachers
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

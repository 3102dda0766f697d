"""Ingestion of many files: deduplication, labels, redaction, and the tables on disk."""

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any
from weakref import finalize

import pyarrow as pa

from replay_pipeline.errors import IngestError
from replay_pipeline.ingesters.agents.opencode_database import (
    databases_in,
    is_database,
    readable_sessions,
)
from replay_pipeline.ingesters.base import Ingester, ReadCounts, SessionLog, SourceSlice, Turn
from replay_pipeline.ingesters.conversations import (
    Conversations,
    InConversations,
    KnownConversation,
)
from replay_pipeline.ingesters.fidelity import OF_STATES, shares_by_client
from replay_pipeline.ingesters.increments import digests_of
from replay_pipeline.ingesters.json_lines import LONG_BYTES, in_utf_8
from replay_pipeline.ingesters.labels import Label, judge_result, label_turns
from replay_pipeline.ingesters.log_rows import (
    Cleaner,
    LogRows,
    accounts_in,
    content_of,
    counts_of,
    hints_of,
    is_same_content,
    pieces_of,
    redactable_texts,
    sha_of,
    state_id_of,
    state_ids_of,
)
from replay_pipeline.ingesters.tool_schemas import ToolLearner
from replay_pipeline.ingesters.trials import OUTPUT, is_resolved, is_told_twice
from replay_pipeline.redaction.people import user_of
from replay_pipeline.redaction.redactor import FoundValues, KnownValues, Redactor
from replay_pipeline.storage.arrays import array_of
from replay_pipeline.storage.garbage_collection import give_back_memory, without_collector
from replay_pipeline.storage.schemas import TABLES
from replay_pipeline.storage.store import written_whole
from replay_pipeline.storage.tables import write_table
from replay_pipeline.types import Progress

logger = logging.getLogger(__name__)

READERS = "replay_pipeline.ingesters"
"""The group of entry points that name readers, ours and those of other packages."""


@cache
def readers() -> tuple[Ingester, ...]:
    """Return one reader of each entry point, in the order in which they are tried on a file.

    Readers of other packages come first. Of ours, those with a narrower sniff come first.

    Raises:
        IngestError: a reader of another package can't be loaded, or there is none at all.
    """
    found: list[Ingester] = []
    for point in entry_points(group=READERS):
        try:
            found.append(point.load()())
        except Exception as error:
            raise IngestError(f"{point.value}: this reader cannot be loaded ({error})") from error
    if not found:
        raise IngestError(
            f"no reader of logs is found at the entry point `{READERS}`: install the package again"
        )
    return tuple(sorted(found, key=lambda reader: (getattr(reader, "rank", 0), reader.name)))


_HEAD_BYTES = 65_536
_TAIL_BYTES = 4_096
_PIECES_HELD = 8
"""Pieces of a long conversation after whose rows their memory is given back."""
_PART_BYTES = 4_000_000
"""Of rows that are kept in memory; what comes before is laid down on disk."""
SUFFIXES = frozenset({".jsonl", ".json", ".cast", ".ndjson", ".traj"})
"""Of files that may be sessions."""
_MOUNTS = Path("/proc/self/mounts")
_NETWORK = frozenset(
    {
        "9p",
        "afs",
        "ceph",
        "cifs",
        "fuse.glusterfs",
        "fuse.rclone",
        "fuse.sshfs",
        "nfs",
        "nfs4",
        "smb3",
    }
)
"""Kinds of file systems that another machine serves."""

IN_CONVERSATIONS = ("sessions", "turns", "states")
"""The tables with a column for the conversation."""


@dataclass(kw_only=True)
class IngestReport:
    """Counts of an ingestion."""

    files: int = 0
    bytes: int = 0
    n_sessions: int = 0
    n_turns: int = 0
    n_states: int = 0
    n_duplicate_states: int = 0
    """Decisions that were already known, because they are copies from resumed, forked, or saved sessions."""
    answers: Counter[str] = field(default_factory=Counter)
    """Answers of models `in_files`, and what became of each: `states`, or a reason why it is none."""
    rows: int = 0
    rows_used: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """Rows that don't become turns, by reason. With `rows_used` they add up to `rows`."""
    skipped_files: Counter[str] = field(default_factory=Counter)
    notes: dict[str, int] = field(default_factory=dict)
    """Repairs that lost nothing."""
    outcomes: Counter[str] = field(default_factory=Counter)
    usage: Counter[str] = field(default_factory=Counter)
    """Recorded tokens. Each API message counts once."""
    requests: Counter[str] = field(default_factory=Counter)
    """Decisions that name their request: `exact` if the log has a message for each hash, else `not_met`."""
    redactions: dict[str, int] = field(default_factory=dict)
    fidelity: dict[str, dict[str, float]] = field(default_factory=dict)
    """By agent and client version: the states with recorded usage, and the share of them whose
    rebuilt prefix has the recorded length within 10 %."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values, names in order."""
        return {
            name: dict(sorted(value.items())) if isinstance(value, dict) else value
            for name, value in vars(self).items()
        }


@dataclass(kw_only=True)
class IngestResult:
    """The tables of one ingestion, and its report."""

    parts: Mapping[str, Iterable[pa.Table]]
    """The tables by name, each in parts, so that only one part of a long session is in memory."""
    report: IngestReport
    conversation_of: Mapping[str, str] = field(default_factory=dict)
    """The conversation of each session."""
    conversations: Mapping[str, KnownConversation] = field(default_factory=dict)
    """What connects each conversation with earlier ingestions."""

    def renamed(self, names: Mapping[str, str]) -> "IngestResult":
        """Return a copy in which some conversations have the names of earlier ingestions."""
        if not names:
            return self
        of = {session: names.get(name, name) for session, name in self.conversation_of.items()}
        parts = {
            name: InConversations(parts, of) if name in IN_CONVERSATIONS else parts
            for name, parts in self.parts.items()
        }
        return replace(self, parts=parts, conversation_of=of)

    @property
    def state_ids(self) -> set[str]:
        """Return the ids of the decisions that have a row."""
        parts = self.parts["states"]
        return {state_id for part in parts for state_id in part["state_id"].to_pylist()}

    @cached_property
    def sessions(self) -> pa.Table:
        """Return one row per conversation."""
        return pa.concat_tables(self.parts["sessions"])

    @cached_property
    def turns(self) -> pa.Table:
        """Return one row per message group."""
        return pa.concat_tables(self.parts["turns"])

    @cached_property
    def states(self) -> pa.Table:
        """Return one row per decision."""
        return pa.concat_tables(self.parts["states"])

    @cached_property
    def tools(self) -> pa.Table:
        """Return one row per tool and release series."""
        return pa.concat_tables(self.parts["tools"])


def ingest(
    paths: Path | str | SourceSlice | Iterable[Path | str | SourceSlice],
    *,
    redact: bool = True,
    hash_project: bool = True,
    known_state_ids: Container[str] = frozenset(),
    known_content: Callable[[str], str | None] = lambda _: None,
    superseded_state_ids: Container[str] = frozenset(),
    ingesters: Sequence[Ingester] = (),
    salt: str = "",
    on_progress: Callable[[Progress], None] | None = None,
) -> IngestResult:
    """Read session files into tables.

    `paths` are files, folders, or slices of files. Your own `ingesters` are tried before those
    that are found by entry point. A decision that occurs in several files or in `known_state_ids` is
    taken once, by its message id and its content: `known_content` gives `content_sha` of a known
    decision. If a file has grown since it was last read, its changed decisions are taken
    again. Decisions in `superseded_state_ids` are left out, because a later read has them. Equal
    input gives equal tables.

    Raises:
        IngestError: a path does not exist or cannot be read, or nothing in `paths` is a session.
            Slices of a batch may all be something else; they are only counted.
    """
    given = [paths] if isinstance(paths, (Path, str, SourceSlice)) else list(paths)
    slices = _slices(given)
    corpus = _Corpus(
        redactor=Redactor(salt=salt) if redact else None,
        hash_project=hash_project,
        known=known_state_ids,
        known_content=known_content,
        superseded=superseded_state_ids,
        ingesters=(*ingesters, *readers()),
        is_alone=len(slices) == 1,
    )
    with without_collector(), TemporaryDirectory() as aside:
        slices += _of_databases(given, Path(aside))
        sizes = {s: (_file_bytes(s) if s.end is None else s.end) - s.start for s in slices}
        n_bytes = 0
        for source in _in_order(slices):
            with in_utf_8(source) as readable:
                corpus.take(readable)
            n_bytes += sizes[source]
            if on_progress is not None:
                total = sum(sizes.values())
                on_progress(Progress(stage="ingest", n_done=n_bytes, n_total=total, unit="bytes"))
    if slices and not corpus.n_read and not all(isinstance(item, SourceSlice) for item in given):
        raise IngestError(_nothing_read(slices, corpus))
    return corpus.result()


def _nothing_read(slices: list[SourceSlice], corpus: "_Corpus") -> str:
    reasons = ", ".join(
        f"{n} {reason}" for reason, n in sorted(corpus.report.skipped_files.items())
    )
    where = slices[0].path if len(slices) == 1 else f"{len(slices)} files"
    if corpus.report.skipped_files.keys() == {"unreadable"}:
        return f"{where}: cannot be read; check its permissions"
    return f"{where}: not a session of an agent we know ({reasons}); give session .jsonl files"


def _slices(paths: Iterable[Path | str | SourceSlice]) -> list[SourceSlice]:
    slices: list[SourceSlice] = []
    for item in paths:
        if isinstance(item, SourceSlice):
            if not item.place.is_file():
                raise IngestError(f"{item.path}: no such file; it is part of the batch")
            slices.append(item)
            continue
        path = Path(item).expanduser()
        if path.is_dir():
            found = session_files(path)
            if not found and not databases_in(path):
                raise IngestError(f"{path}: no session files (.jsonl) in this folder")
            slices.extend(SourceSlice(file) for file in found)
        elif is_database(path):
            continue
        elif path.is_file():
            slices.append(SourceSlice(path))
        elif path.exists():
            raise IngestError(f"{path}: a pipe, a socket, or a device, and not a file")
        else:
            raise IngestError(f"{path}: no such file or folder")
    return list(dict.fromkeys(slices))


def _of_databases(paths: Iterable[Path | str | SourceSlice], folder: Path) -> list[SourceSlice]:
    """Return the sessions of all databases in `paths`, written down below `folder`."""
    named = (Path(item).expanduser() for item in paths if not isinstance(item, SourceSlice))
    databases = dict.fromkeys(each for path in named for each in databases_in(path))
    return [
        source
        for number, database in enumerate(databases)
        # One that gives no session is counted as a file of another kind.
        for source in [
            SourceSlice(database / file.name, copy=file)
            for file in readable_sessions(database, folder / str(number))
        ]
        or [SourceSlice(database)]
    ]


def session_files(folder: Path) -> list[Path]:
    """Find the files under `folder` that may be sessions, sorted. Follows links to folders.

    Logs a warning for what is left out: a folder that can't be read; a folder of another machine
    that is mounted below, which may never answer; and a pipe, a socket, or a device, which may never
    end.
    """
    found: list[Path] = []
    seen: set[Path] = set()
    elsewhere = _network_folders()
    for name, folders, files in os.walk(folder, onerror=_tell_unreadable, followlinks=True):
        here = Path(name)
        for inner in [inner for inner in folders if str(here.absolute() / inner) in elsewhere]:
            logger.warning("%s: a network folder; left out, name it as a source", here / inner)
            folders.remove(inner)
        # A link to a folder above it would lead around in a circle.
        folders[:] = [inner for inner in folders if (here / inner).resolve() not in seen]
        seen.update((here / inner).resolve() for inner in folders)
        for path in (here / file for file in files):
            if _may_be_session(path) and path.is_file():
                found.append(path)
            elif _may_be_session(path) and path.exists():
                logger.warning("%s: a pipe, a socket, or a device; left out", path)
    return sorted(found)


def _network_folders() -> set[str]:
    """Return where folders of other machines are mounted, as Linux lists them; else none."""
    try:
        lines = _MOUNTS.read_text("utf-8", "replace").splitlines()
    except OSError:
        return set()
    mounts = [line.split()[1:3] for line in lines]
    return {place.replace("\\040", " ") for place, kind in mounts if kind in _NETWORK}


def _tell_unreadable(error: OSError) -> None:
    logger.warning("%s: folder cannot be read (%s); left out", error.filename, error.strerror)


def _may_be_session(path: Path) -> bool:
    is_named = path.suffix in SUFFIXES or path.name == OUTPUT
    return is_named and not (path.name.endswith(".meta.json") or path.name == "journal.jsonl")


def _file_bytes(source: SourceSlice) -> int:
    """Return the size of a file, 0 if it cannot be looked at."""
    with suppress(OSError):
        return source.place.stat().st_size
    return 0


def _in_order(slices: list[SourceSlice]) -> list[SourceSlice]:
    """Return subagents before the sessions that quote them, long files before their partial copies."""

    def key(source: SourceSlice) -> tuple[bool, int, str, int]:
        is_main = not source.path.name.startswith("agent-")
        return is_main, -_file_bytes(source), str(source.path), source.start

    return sorted(slices, key=key)


class Columns:
    """A table under construction: the rows of the current file, and batches of earlier files.

    Iterating yields the table in parts. Of a large table, only one part is in memory.
    """

    def __init__(self, name: str) -> None:
        self.schema = TABLES[name]
        self.open: dict[str, list[Any]] = {field.name: [] for field in self.schema}
        self.num_rows = 0
        self._batches: list[pa.RecordBatch] = []
        self._n_bytes = 0
        self._file: IO[bytes] | None = None
        self._ends = [0]

    def append(self, row: dict[str, Any]) -> None:
        """Add one row; absent keys are null."""
        for name, values in self.open.items():
            values.append(row.get(name))

    def extend(self, rows: Mapping[str, list[Any]]) -> None:
        """Add rows by column; no column may be missing."""
        for name, values in self.open.items():
            values += rows[name]

    def close(self) -> None:
        """Turn the open rows into a batch, which takes a fraction of their memory."""
        n_rows = len(self.open[self.schema.names[0]])
        if not n_rows:
            return
        arrays = [array_of(self.open[field.name], field.type) for field in self.schema]
        for values in self.open.values():
            values.clear()
        self.num_rows += n_rows
        self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=self.schema))
        self._n_bytes += self._batches[-1].nbytes
        if self._n_bytes > _PART_BYTES:
            if self._file is None:
                self._file = TemporaryFile()  # noqa: SIM115 (it goes with the columns)
                finalize(self, self._file.close)
            with pa.ipc.new_stream(self._file, self.schema) as writer:
                for batch in self._batches:
                    writer.write_batch(batch)
            self._ends.append(self._file.tell())
            self._batches.clear()
            self._n_bytes = 0

    def __iter__(self) -> Iterator[pa.Table]:
        self.close()
        for start in self._ends[:-1]:
            assert self._file is not None
            self._file.seek(start)
            pa.default_memory_pool().release_unused()
            yield pa.ipc.open_stream(self._file).read_all()
        if self._batches or not self.num_rows:
            yield pa.Table.from_batches(self._batches, self.schema)

    def table(self) -> pa.Table:
        """Everything, as one table."""
        return pa.concat_tables(self)


_Decided = tuple[SessionLog, list[tuple[str, Turn]], list[Turn], dict[Turn, Label]]
"""A conversation, its new decisions, the turns that they need, and what became of all decisions."""


class _Corpus:
    """Columns of the tables while files come in."""

    def __init__(
        self,
        *,
        redactor: Redactor | None,
        hash_project: bool,
        known: Container[str],
        known_content: Callable[[str], str | None],
        superseded: Container[str],
        ingesters: Sequence[Ingester],
        is_alone: bool,
    ) -> None:
        self.redactor = redactor
        self.hash_project = hash_project
        self.known = known
        self.known_content = known_content
        self.superseded = superseded
        self.ingesters = ingesters
        self.is_alone = is_alone
        self.taken: dict[str, str] = {}
        """Content of the decisions so far, by their id."""
        self.session_ids: set[str] = set()
        self.users: set[str] = set()
        self.secrets: dict[str, KnownValues] = {}
        self.sessions = Columns("sessions")
        self.turns = Columns("turns")
        self.states = Columns("states")
        self.tools = ToolLearner()
        self.conversations = Conversations()
        self.counts = ReadCounts()
        self.report = IngestReport()
        self.n_read = 0

    def take(self, source: SourceSlice) -> None:
        """Read one file; what is wrong with it is counted, not raised."""
        self.report.files += 1
        try:
            with source.place.open("rb") as file:
                head = file.read(_HEAD_BYTES)
                n_bytes = source.place.stat().st_size
                end = n_bytes if source.end is None else min(source.end, n_bytes)
                file.seek(max(0, end - _TAIL_BYTES))
                tail = file.read(min(_TAIL_BYTES, end))
        except OSError as error:
            logger.warning("%s: cannot be read (%s)", source.path, error.strerror)
            self.report.skipped_files["unreadable"] += 1
            return
        if not head.strip():
            self.report.skipped_files["empty"] += 1
            return
        reader = next((i for i in self.ingesters if i.sniff(head)), None)
        if reader is None:
            self.report.skipped_files["foreign"] += 1
            return
        if not self.is_alone and is_told_twice(source.path):
            self.report.skipped_files["told_twice"] += 1
            return
        self.n_read += 1
        self.report.bytes += end - source.start
        self._read(reader, source, end, tail)

    def _read(self, reader: Ingester, source: SourceSlice, end: int, tail: bytes) -> None:
        before: dict[str, bytes] = {}
        counted = ReadCounts()
        if source.start:
            for log in reader.read(source.place, counted, source.start):
                before |= digests_of(log, label_turns(log.turns))
        counts = ReadCounts()
        logs: Iterable[SessionLog] = reader.read(source.place, counts, end)
        decided = ((log, *self._decided(log, source, before)) for log in logs)
        if end > LONG_BYTES:
            # Read once for its people and once more for its rows, it is never in memory as a whole.
            again = reader.read(source.place, ReadCounts(), end)
            users, known = self._people(((log.turns, log.turns) for log in again), keeps=False)
            give_back_memory()
        else:
            decided = list(decided)
            turns_of = ((log.turns, needed) for log, _, needed, _ in decided)
            users, known = self._people(turns_of, keeps=True)
        sessions = self._add_logs(decided, source, users, known)
        if end > LONG_BYTES:
            give_back_memory()
        counts.subtract(counted)
        self.counts.add(counts)
        origin = {
            "source_path_sha": sha_of(str(source.path)),
            "source_size_bytes": end,
            "source_offset_bytes": end,
            "source_tail_sha": sha_of(tail),
        }
        for number, row in sorted(sessions.items()):
            its_counts = counts if number == 0 else ReadCounts()
            self.sessions.append(row | origin | counts_of(its_counts))

    def _add_logs(
        self,
        decided: Iterable[_Decided],
        source: SourceSlice,
        users: frozenset[str],
        known: FoundValues,
    ) -> dict[int, dict[str, Any]]:
        """Make the rows of conversations; gives those of `sessions`, by the number of the log."""
        sessions: dict[int, dict[str, Any]] = {}
        resolved = is_resolved(source.path)
        for number, (log, fresh, needed, labels) in enumerate(decided):
            if not needed and any(turn.is_state for turn in log.turns):
                continue
            session_id = self._unique_id(log, source, fresh)
            log.is_resolved = resolved if log.is_resolved is None else log.is_resolved
            self.conversations.part(session_id, log)
            # A subagent's file is told what its session gave away.
            main = log.parent_session_id or log.session_id
            known.values.update(self.secrets.setdefault(main, known.values))
            cleaner = Cleaner(self.redactor, users, known)
            rows = LogRows(log, session_id, needed, fresh, cleaner)
            self._add_rows(rows, labels, cleaner)
            sessions[number] = rows.session(n_states=len(fresh), hash_project=self.hash_project)
        self._close()
        return sessions

    def _close(self) -> None:
        self.turns.close()
        self.states.close()

    def _add_rows(self, rows: LogRows, labels: Mapping[Turn, Label], cleaner: Cleaner) -> None:
        """Make the rows of a conversation, piece by piece: of a long one no text is there twice."""
        for number, piece in enumerate(pieces_of(rows.kept), 1):
            cleaner.prepare(chain(redactable_texts(piece, keeps=True), hints_of(piece, labels)))
            self.turns.extend(rows.turns(piece))
            self.states.extend(rows.states(piece, labels))
            if len(piece) < len(rows.kept):
                self._close()
            for turn in piece:
                turn.let_go()
            if not number % _PIECES_HELD:
                give_back_memory()

    def _decided(
        self, log: SessionLog, source: SourceSlice, before: Mapping[str, bytes]
    ) -> tuple[list[tuple[str, Turn]], list[Turn], dict[Turn, Label]]:
        """Return the new decisions of a conversation, the turns they need, and what became of all."""
        labels = label_turns(log.turns)
        self._learn_tools(log)
        fresh = self._fresh(log, source, before, labels)
        self.report.outcomes.update(labels[turn].outcome for _, turn in fresh)
        return fresh, _needed(log, fresh), labels

    def _people(
        self, turns_of: Iterable[tuple[list[Turn], list[Turn]]], *, keeps: bool
    ) -> tuple[frozenset[str], FoundValues]:
        """Collect who is named in a file and what is secret: a subagent is told what the session knows.

        `turns_of` has for each conversation all of its turns, and those that are redacted.
        """
        if self.redactor is None:
            return frozenset(), FoundValues()
        users = set[str]()

        def told() -> Iterator[str]:
            for turns, needed in turns_of:
                users.update(filter(None, map(user_of, {turn.cwd for turn in turns})))
                yield from redactable_texts(needed, keeps=keeps)
                yield from accounts_in(needed)

        people, known = self.redactor.learn(told())
        users |= people
        self.users |= users
        return frozenset(users), known

    def _fresh(
        self,
        log: SessionLog,
        source: SourceSlice,
        before: Mapping[str, bytes],
        labels: Mapping[Turn, Label],
    ) -> list[tuple[str, Turn]]:
        """Return the states that came or changed since the slice began, and belong to nobody else.

        `before` has the digests of the states that the file had when the slice began.
        """
        states = [turn for turn in log.turns if turn.is_state]
        now = digests_of(log, labels) if before else {}
        answers = self.report.answers
        answers.update(log.left_out, in_files=len(states) + log.left_out.total())
        fresh, copied, apart, is_copy = [], [], "", False
        for state_id, turn in zip(state_ids_of(states), states, strict=True):
            content, digest = content_of(turn), before.get(state_id)
            if digest is not None and digest == now[state_id]:
                answers["read_before"] += 1
                continue
            is_again, is_renamed = digest is not None or bool(source.revision), False
            earlier = self.taken.get(state_id) or self.known_content(state_id)
            if earlier and not source.revision and not is_same_content(earlier, content):
                # Its id is that of something else: what it says tells it apart.
                apart, is_renamed = apart or content, True
                turn.message_id = f"{turn.message_id or turn.uuid}~{content}"
                state_id = state_id_of(turn)
            is_known = state_id in self.known and not is_again
            if is_known:
                copied.append(state_id)
            if is_known or state_id in self.taken or state_id in self.superseded:
                self.report.n_duplicate_states += 1
                answers["copies"] += 1
                is_copy |= not is_renamed
                continue
            self.taken[state_id] = content
            if turn.request is not None:
                self.report.requests["exact" if turn.sent is not None else "not_met"] += 1
            if turn.parent is None:
                answers["without_prompt"] += 1
            else:
                fresh.append((state_id, turn))
            if turn.usage is not None:
                usage, sums = turn.usage, self.report.usage
                sums["input_tokens"] += usage.n_input
                sums["cache_creation_input_tokens"] += usage.n_cache_creation
                sums["cache_creation_1h_input_tokens"] += usage.n_cache_creation_1h or 0
                sums["cache_read_input_tokens"] += usage.n_cache_read
                sums["output_tokens"] += usage.n_output
        if apart and not is_copy:
            _set_apart(log, apart)
        self.conversations.add(log, copied)
        log.rows = frozenset()
        return fresh

    def _unique_id(
        self, log: SessionLog, source: SourceSlice, fresh: list[tuple[str, Turn]]
    ) -> str:
        """Return the session's id; a second file under the same id gets a name by its own content."""
        session_id = log.session_id
        if source.revision:
            session_id += f"~{source.revision}"
        if session_id in self.session_ids and fresh:
            session_id += f"~{fresh[0][0][-6:]}"
        self.session_ids.add(session_id)
        return session_id

    def _learn_tools(self, log: SessionLog) -> None:
        for tool in log.tools:
            self.tools.record(tool)
        for turn in log.turns:
            if "copy" in turn.flags:
                continue
            for call in turn.calls:
                result = turn.results.get(call.id)
                if result is not None and result.is_error:
                    kind = judge_result(result)[1]
                    if kind in {"invalid_input", "no_such_tool"}:
                        continue
                self.tools.see(call.name, call.arguments, turn.version)

    def result(self) -> IngestResult:
        """Return the finished tables."""
        tools = Columns("tools")
        cleaner = Cleaner(self.redactor, frozenset(self.users))
        for row in self.tools.rows():
            tools.append({**row, "tool_json": cleaner.arguments(row["tool_json"])})
        report = self.report
        sessions = self.sessions.table()
        states = pa.concat_tables(part.select(OF_STATES) for part in self.states)
        report.n_sessions, report.n_turns = sessions.num_rows, self.turns.num_rows
        report.n_states = report.answers["states"] = states.num_rows
        if n_lost := 2 * report.answers["in_files"] - report.answers.total():
            report.answers["lost"] = n_lost
            logger.error("%d answers of models are in no table, and no reason is known", n_lost)
        report.rows, report.rows_used = self.counts.rows, self.counts.rows_used
        report.skipped, report.notes = self.counts.skipped, self.counts.notes
        if n_unmet := report.requests.get("not_met"):
            logger.warning(
                "%d decisions name a request whose messages are not all in the log; their prefixes are "
                "built from other rows",
                n_unmet,
            )
        report.redactions = self.redactor.counts if self.redactor else {}
        report.fidelity = shares_by_client(sessions, states)
        if unknown := [reason for reason in report.skipped if reason.startswith("unknown_")]:
            logger.warning(
                "rows of unknown types are left out, but the model may have seen them: %s",
                ", ".join(unknown),
            )
        conversation_of, conversations = self.conversations.result()
        parts = {"sessions": self.sessions, "turns": self.turns, "states": self.states}
        return IngestResult(
            parts={
                **{name: InConversations(each, conversation_of) for name, each in parts.items()},
                "tools": tools,
            },
            report=report,
            conversation_of=conversation_of,
            conversations=conversations,
        )


def _set_apart(log: SessionLog, content: str) -> None:
    """Rename a session and its turns, where it has only names in common with another one."""
    log.session_id += f"+{sha_of(content)[:6]}"
    log.rows = log.origins = log.follows = frozenset()
    for turn in log.turns:
        turn.uuid += f"~{content}"


def _needed(log: SessionLog, fresh: list[tuple[str, Turn]]) -> list[Turn]:
    """Return the new states and everything on their paths, in the order of the file; last what was sent."""
    needed: set[Turn] = set()
    for _, state in fresh:
        for end in (state, state.sent, state.shape):
            turn = end
            while turn is not None and turn not in needed:
                needed.add(turn)
                turn = turn.parent
    return [turn for turns in (log.turns, log.sent) for turn in turns if turn in needed]


def write_traces(result: IngestResult, out_dir: Path | str) -> None:
    """Write the four tables and `report.json` into `out_dir`.

    Raises:
        StorageError: the folder cannot be written.
    """
    out_dir = Path(out_dir)
    for name, parts in result.parts.items():
        write_table(parts, out_dir / f"{name}.parquet", name)
    with written_whole(out_dir / "report.json") as file:
        report = json.dumps(result.report.to_json(), indent=2, sort_keys=True)
        file.write(report.encode() + b"\n")

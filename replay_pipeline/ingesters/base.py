"""The records of a session, as a tree of turns, and the protocol of ingesters.

An ingester turns one file into `SessionLog`s. All later steps (labels, redaction, tables,
materialization) use only these records, so a new agent needs only a reader.

A corpus has some hundred thousand of these records. They are structs, because dataclasses take five
times as long to create. Only leaves have `gc=False`: without the collector, a long chain of turns
would be freed recursively and overflow the stack.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

import msgspec
import pyarrow as pa

from replay_pipeline.types import Outcome, Tool

NO_RESULT = "[no result]"
"""Stands for a result that the log doesn't have."""


LACKS = "lacks:"
MEDIA = ("image", "document")
"""Blocks whose content no other model gets."""
_WORTH_PACKING = 400
_CODEC = pa.Codec("zstd", compression_level=1)


class RecordedUsage(msgspec.Struct, gc=False):
    """Prompt and completion tokens that the provider recorded for one message."""

    n_input: int = 0
    n_cache_creation: int = 0
    n_cache_read: int = 0
    n_output: int = 0
    n_cache_creation_1h: int | None = None
    """Tokens that were written to the cache for one hour instead of five minutes."""
    n_web_searches: int = 0
    """Searches by the provider, which it bills apart."""
    speed: str | None = None
    """`fast` where the answer was bought at a higher price."""
    region: str | None = None
    """Where the model ran, if that was chosen."""

    @property
    def n_context(self) -> int:
        """Return tokens of the whole prompt, cached or not."""
        return self.n_input + self.n_cache_creation + self.n_cache_read


class _Packed(msgspec.Struct, gc=False, kw_only=True):
    """A record of which one text may be kept in a fraction of its memory."""

    LONG: ClassVar[str]
    """The field that holds this text."""
    packed: bytes = b""
    n_bytes: int = 0
    """Of its text, where that is packed."""

    def pack(self) -> None:
        """Pack a long text: of a long file most is never looked at at once."""
        text = getattr(self, self.LONG)
        if len(text) < _WORTH_PACKING or self.packed:
            return
        data = text.encode("utf-8", "surrogatepass")
        self.packed, self.n_bytes = _CODEC.compress(data, asbytes=True), len(data)
        delattr(self, self.LONG)

    def __getattr__(self, name: str) -> str:
        # Asked for what was deleted alone, so that a text that was never packed costs nothing.
        if name != self.LONG or not self.packed:
            raise AttributeError(name)
        data = _CODEC.decompress(self.packed, self.n_bytes, asbytes=True)
        return data.decode("utf-8", "surrogatepass")


class RecordedCall(_Packed, gc=False):
    """One tool call; `arguments` is JSON text as it was recorded."""

    LONG = "arguments"
    id: str
    name: str
    arguments: str
    strings: list[str] | None = None
    """Every string in the arguments, after the first use."""


class Result(_Packed, gc=False):
    """The answer of a tool, the user, or the harness to one call."""

    LONG = "text"
    text: str
    is_error: bool = False
    denial: str | None = None
    """`user-rejected` or `automode-blocked`, if the log says so."""
    feedback: str | None = None
    """The user's own words with a rejection."""
    verdict: tuple[Outcome, str | None] | None = None
    """Outcome and error kind, after the first use."""
    n_tokens: float | None = None
    """Estimated tokens, after the first use."""


class Turn(msgspec.Struct, eq=False):
    """One message group: a user message, or one assistant API message with all its results."""

    parent: "Turn | None"
    kind: str
    """`assistant`, `user`, `summary`, `meta`, `command`, `queued`, `attachment`, `interrupt`,
    `task_notification` or `microcompact`; `context` and `preface` are shown before what the user typed,
    `system` after it and in the system's name, `developer` in that name where it was logged; `sent` and `shape` stand outside the conversation."""
    offset: int
    """Byte offset of its first row in the file."""
    uuid: str
    segment: int = 0
    """Number of compactions before it on this file."""
    agent: str = ""
    """Empty for the main conversation, else the subagent."""
    timestamp: str | None = None
    model: str | None = None
    version: str | None = None
    cwd: str | None = None
    branch: str | None = None
    """The git branch of its folder; empty outside of a repository, if the log says so."""
    message_id: str | None = None
    stop_reason: str | None = None
    usage: RecordedUsage | None = None
    texts: list[str] = []
    thinking: list[str] = []
    calls: list[RecordedCall] = []
    results: dict[str, Result] = {}
    flags: frozenset[str] = frozenset()
    """Marks, e.g. `meta`. One that begins with `LACKS` names something that the model saw here, and
    that the log does not have."""
    cleared: Sequence[str] = ()
    """Call ids whose results the model no longer saw from here on."""
    n_tokens: float | None = None
    """Estimated tokens of its messages, once somebody has asked for them."""
    content: str | None = None
    """What tells it from another with its id, after the first use."""
    index: int = -1
    """Position among the turns of its session, in the order of the file; negative for what was sent."""
    request: str | None = None
    """The logged request that it answers."""
    sent: "Turn | None" = None
    """The last message of that request, if the log has a message for every hash."""
    shape: "Turn | None" = None
    """The system prompt and the tools of that request."""
    params_json: str | None = None
    """The other parameters of that request."""
    wire_json: str | None = None
    """For a turn that was sent: the message, or the system prompt and the tools."""

    def __repr__(self) -> str:
        return f"Turn(kind={self.kind!r}, uuid={self.uuid!r}, index={self.index})"

    @property
    def is_state(self) -> bool:
        """Return whether the agent made a decision here."""
        return self.kind == "assistant" and "copy" not in self.flags

    def copy_below(self, parent: "Turn | None", segment: int) -> "Turn":
        """Return the copy that a compaction kept. It is no new decision."""
        return Turn(
            parent=parent,
            kind=self.kind,
            offset=self.offset,
            uuid=self.uuid,
            segment=segment,
            agent=self.agent,
            timestamp=self.timestamp,
            model=self.model,
            version=self.version,
            cwd=self.cwd,
            branch=self.branch,
            texts=self.texts,
            calls=self.calls,
            results=self.results,
            flags=self.flags | {"copy"},
        )

    def let_go(self) -> None:
        """Free all texts after they have become rows."""
        self.texts, self.thinking, self.calls, self.results = [], [], [], {}
        self.wire_json = None


@dataclass(slots=True)
class SessionLog:
    """One conversation of a file: the main one, or one subagent's."""

    session_id: str
    agent: str
    """Name of the coding agent, e.g. `claude_code`."""
    turns: list[Turn]
    """In the order of the file; a parent comes before its children."""
    agent_id: str | None = None
    parent_session_id: str | None = None
    tools: list[Tool] = field(default_factory=list)
    """Tool definitions, where the log records them."""
    origins: frozenset[str] = frozenset()
    """Ids of other sessions that its rows name, because it was forked or copied from them."""
    rows: frozenset[str] = frozenset()
    """Ids of its rows besides those of its turns, if they have ids."""
    follows: frozenset[str] = frozenset()
    """Ids of rows in other logs from which it continues."""
    title: str | None = None
    """What the log itself calls it."""
    sent: list[Turn] = field(default_factory=list)
    """What was sent, by the log: a tree of messages, and shapes."""
    client_usd: dict[str, float] = field(default_factory=dict)
    """US dollars by model as the client itself counted them, calls without a row included."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Answers of models that the file has and that are no decisions here, by reason."""
    entrypoint: str | None = None
    """How its client was started, e.g. `cli` in a terminal or `sdk-cli` without a screen."""
    is_resolved: bool | None = None
    """Whether the tests of its task passed, by what lies beside it."""
    ended: str | None = None
    """How its client says that it ended, e.g. `success` or `error_max_turns`."""

    def __post_init__(self) -> None:
        # An id of a message is a hint: where several have one, their order tells them apart.
        named = Counter[str]()
        for turn in self.turns:
            if turn.is_state:
                name = turn.message_id or turn.uuid
                named[name] += 1
                if named[name] > 1:
                    turn.message_id = f"{name}#{named[name]}"

    def offers(self, names: Sequence[str]) -> None:
        """Note which tools were offered where the log has their names alone."""
        if not names:
            return
        shape = Turn(None, "shape", 0, "offered", index=-1 - len(self.sent))
        tools = [{"name": name} for name in names]
        shape.wire_json = msgspec.json.encode({"system": [], "tools": tools}).decode()
        self.sent.append(shape)
        for turn in self.turns:
            if turn.is_state and turn.shape is None:
                turn.shape = shape


@dataclass(frozen=True, slots=True)
class SourceSlice:
    """A range of bytes of one session file; `end` is `None` for the whole file.

    The file is read up to `end`. A decision belongs to the slice if it wasn't there at `start`, or
    has changed since (it was half written, not answered, or recovered later). So the last slice
    that has a decision has it as in the whole file.
    """

    path: Path
    start: int = 0
    end: int | None = None
    revision: str = ""
    """Names the content of a file that was rewritten after it had been read."""
    copy: Path | None = None
    """Where the bytes are now, if no longer at `path`."""

    @property
    def place(self) -> Path:
        """Return the path from which the bytes are read."""
        return self.copy or self.path


@dataclass(slots=True)
class ReadCounts:
    """The number of rows read, by use or by reason for skipping them."""

    rows: int = 0
    rows_used: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    """Counts of lossless repairs: glued lines, missing parents, replaced surrogates."""

    def add(self, other: "ReadCounts") -> None:
        """Add the counts of another file."""
        self.rows += other.rows
        self.rows_used += other.rows_used
        self.skipped.update(other.skipped)
        self.notes.update(other.notes)

    def subtract(self, other: "ReadCounts") -> None:
        """Subtract the counts of earlier rows, so that only new rows are counted."""
        self.rows -= other.rows
        self.rows_used -= other.rows_used
        for mine, others in ((self.skipped, other.skipped), (self.notes, other.notes)):
            mine.subtract(others)
            for reason in [reason for reason, n in mine.items() if not n]:
                del mine[reason]

    def count(self, skipped: str | None) -> None:
        """Count a row as used, or as skipped for that reason."""
        if skipped is None:
            self.rows_used += 1
        else:
            self.skipped[skipped] += 1


class Ingester(Protocol):
    """Reads the session files of one coding agent. The entry point of a package names its class."""

    name: str
    """The agent, as the column `agent` of sessions has it."""

    def sniff(self, head: bytes) -> bool:
        """Return whether a file that starts with `head` is one of this agent's."""
        ...

    def read(self, path: Path, counts: ReadCounts, end: int | None = None) -> Iterable[SessionLog]:
        """Read the conversations in `path` up to byte `end`. Never raises because of the content."""
        ...


def path_to(turn: Turn | None) -> Iterator[Turn]:
    """Yield the turns from `turn` up to its root."""
    while turn is not None:
        yield turn
        turn = turn.parent

"""What a stage is: one value that says all of a step, so that everything else follows from it.

Plan, run, staleness, `status`, `verify`, `repair`, `upgrade` and Dagster's assets read these values and
know no stage by name. `replay_pipeline.stages.chain` lists them; `replay_pipeline.stages.engine` runs them.

Importing a stage imports nothing that it works with: who only looks at a data root waits for none of it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from replay_pipeline.settings import Settings
from replay_pipeline.stages.receipts import Receipt

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from replay_pipeline.stages.audit.verdict import AuditResult
    from replay_pipeline.stages.project import Project
    from replay_pipeline.storage.tables import DataRoot
    from replay_pipeline.types import TraceState

Report = dict[str, Any]
"""What a stage counted, as plain values."""

Part = str | Callable[..., Any]
"""Code that decides rows: a part that `versions` names, or a function of one's own."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A condition on the tables of a stage."""

    name: str
    look: "Callable[[DataRoot, Sequence[str]], AuditResult]"
    """Looks at some batches; its docstring is the question."""
    is_blocking: bool = False
    """Whether a run ends where it does not hold."""


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The differences between the inputs of a stage then and now."""

    code: tuple[str, ...] = ()
    """Parts of the code, by name."""
    settings: tuple[str, ...] = ()
    """Settings with both values, such as `pairs.agreement_threshold: 2 → 3`."""
    inputs: tuple[str, ...] = ()
    """Tables and files that are read."""
    is_unknown: bool = False
    """Whether an older version left no record of what it was given."""

    def __bool__(self) -> bool:
        return bool(self.code or self.settings or self.inputs or self.is_unknown)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One batch that a stage works on."""

    project: "Project"
    batch: str
    into: "DataRoot"
    """Where tables and files are written: another place than they are read, to compare them."""
    is_aside: bool = False
    """Whether it is done to compare it with what was written: nobody is asked, no receipt is left."""
    last: Receipt | None = None
    """What was done before."""
    changes: Changes = Changes()
    """What differs since then."""
    chain: "Sequence[Stage]" = ()
    """All stages, in order."""

    def read(self, table: str) -> "pa.Table":
        """Read a table of the batch. Raises what `DataRoot.read` raises."""
        return self.project.root.read(table, self.batch)

    def write(self, table: str, rows: "pa.Table | Iterable[pa.Table]") -> None:
        """Write a table of the batch. Raises what `DataRoot.write` raises."""
        if self.is_aside:
            self.into.write(table, self.batch, rows)
        else:
            self.project.write(table, self.batch, rows)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A step of the chain."""

    name: str
    about: str
    """What it makes, in a sentence or two, for people."""
    work: Callable[[Task], Report]
    """Reads, calls one function of a room, writes, and returns its report."""
    is_by_batch: bool = True
    """Whether it works batch by batch, and not on all of them at once."""
    reads: tuple[str, ...] = ()
    """Tables of the batch that decide what comes out, with those that are written together with them:
    Dagster knows one version of all that a stage has written, and is to call the same stages stale."""
    writes: tuple[str, ...] = ()
    """Tables of the batch that it writes."""
    code: tuple[Part, ...] | Callable[[Settings], tuple[Part, ...]] = ()
    """The code that decides what comes out."""
    settings: Callable[[Settings], Mapping[str, Any]] = lambda _: {}
    """The settings that decide what comes out, by their names; a mapping stands for what is below it."""
    inputs: "Callable[[Project, str], Mapping[str, str]]" = lambda *_: {}
    """Digests of what else decides what comes out, by a name for people."""
    files: "Callable[[Project, str], list[str]]" = lambda *_: []
    """Names of what it reads or writes for good beside tables, below the root."""
    data: "Callable[[Project], str]" = lambda _: ""
    """Digest of what later stages read of its files, where those say more."""
    is_there: "Callable[[Project, Receipt], bool]" = lambda *_: True
    """Whether what it wrote beside tables is still there."""
    is_final: "Callable[[Project, Receipt], bool]" = lambda *_: True
    """Whether nothing is left to do of what it was given."""
    is_wanted: Callable[[Settings], bool] = lambda _: True
    """Whether a run has it."""
    pays: bool = False
    """Whether it spends money, so that it is never tried again by itself."""
    pool: str | None = None
    """What only one run at a time may use."""

    told: tuple[str, ...] = ()
    """The figures of its report that `status` looks at; the first stands for the batch."""
    figures: Callable[[Sequence[Receipt]], Mapping[str, Any]] = lambda _: {}
    """What the summary of a run says of it; receipts of earlier runs are marked as reused."""
    facts: "Callable[[Project, Receipt], Mapping[str, Any]]" = lambda *_: {}
    """What Dagster shows of a batch: numbers, texts, paths, and pictures in Markdown."""
    trace: "Callable[[Project, str, TraceState], Mapping[str, Any]]" = lambda *_: {}
    """What it made of one state of a batch beside the rows of its tables, for `trace`."""
    checks: Callable[[], tuple[Check, ...]] = tuple
    """What must hold of its tables, beside their schemas."""
    asset: str = ""
    """The name of its asset in Dagster; by default its own."""
    table: str = ""
    """The table whose columns its asset shows; by default the first that it writes."""
    kinds: tuple[str, ...] = ("python", "parquet")
    """What its asset is made with and of, as Dagster's badges."""
    after: tuple[str, ...] = ()
    """Stages that it follows; by default those that write what it reads."""

    unsafe: tuple[str, ...] = ()
    """Beginnings of reasons to be stale for which nothing of it may be published."""
    take_over: Callable[[Task], Report] | None = None
    """Brings what an older version wrote to the rules of today, without its sources."""
    make_again: "Callable[[Project, Receipt, Sequence[str], Path], None] | None" = None
    """Makes some of its files again below a folder, where doing it all again would not."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "asset", self.asset or self.name)
        object.__setattr__(self, "table", self.table or next(iter(self.writes), ""))

    def told_to(self, **options: Any) -> "Stage":
        """Return the same stage with further arguments for its work."""
        return replace(self, work=partial(self.work, **options))

    def parts(self, settings: Settings) -> tuple[Part, ...]:
        """Return the code that decides the output under these settings."""
        return self.code(settings) if callable(self.code) else self.code

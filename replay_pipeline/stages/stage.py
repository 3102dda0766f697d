"""The definition of a stage: one value that describes a whole step.

Planning, running, staleness, `status`, `verify`, and Dagster's assets read these values and know no
stage by name. `replay_pipeline.stages.chain` lists them;
`replay_pipeline.stages.engine` runs them.

Importing a stage imports none of the modules that do its work, so that a quick look at a data root
is fast.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from replay_pipeline.settings import Settings
from replay_pipeline.stages.receipts import Receipt

if TYPE_CHECKING:
    import pyarrow as pa

    from replay_pipeline.stages.audit.verdict import AuditResult
    from replay_pipeline.stages.project import Project
    from replay_pipeline.storage.tables import DataRoot
    from replay_pipeline.types import TraceState

Report = dict[str, Any]
"""The counts of a stage, as plain values."""

Part = str | Callable[..., Any]
"""Code that decides rows: the name of a part in `versions`, or a function."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A condition on the tables of a stage."""

    name: str
    look: "Callable[[DataRoot, Sequence[str]], AuditResult]"
    """Checks some batches. Its docstring is the question that people see."""
    is_blocking: bool = False
    """Whether a failure ends the run."""


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The differences between the inputs of a stage then and now."""

    code: tuple[str, ...] = ()
    """Parts of the code, by name."""
    settings: tuple[str, ...] = ()
    """Changed settings with both values, such as `pairs.agreement_threshold: 2 → 3`."""
    inputs: tuple[str, ...] = ()
    """Changed tables and files among the inputs."""
    is_unknown: bool = False
    """Whether an older version left no record of the inputs."""

    def __bool__(self) -> bool:
        return bool(self.code or self.settings or self.inputs or self.is_unknown)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One batch that a stage works on."""

    project: "Project"
    batch: str
    last: Receipt | None = None
    """The receipt of the last time."""
    changes: Changes = Changes()
    """The differences since then."""
    chain: "Sequence[Stage]" = ()
    """All stages, in order."""

    def read(self, table: str) -> "pa.Table":
        """Read a table of the batch. Raises the errors of `DataRoot.read`."""
        return self.project.root.read(table, self.batch)

    def write(self, table: str, rows: "pa.Table | Iterable[pa.Table]") -> None:
        """Write a table of the batch. Raises the errors of `DataRoot.write`."""
        self.project.write(table, self.batch, rows)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A step of the chain."""

    name: str
    about: str
    """A sentence or two on what the stage makes."""
    work: Callable[[Task], Report]
    """The work: reads tables, calls one library function, writes tables, and returns a report."""
    is_by_batch: bool = True
    """Whether it works batch by batch, and not on all of them at once."""
    reads: tuple[str, ...] = ()
    """Tables of the batch that decide the output, and tables that are written together with them.
    Dagster has one version for everything that a stage writes, and must find the same stages
    stale."""
    writes: tuple[str, ...] = ()
    """Tables of the batch that it writes."""
    code: tuple[Part, ...] | Callable[[Settings], tuple[Part, ...]] = ()
    """The code that decides the output."""
    settings: Callable[[Settings], Mapping[str, Any]] = lambda _: {}
    """The settings that decide the output, by name. A mapping stands for all settings below it."""
    inputs: "Callable[[Project, str], Mapping[str, str]]" = lambda *_: {}
    """Digests of all other inputs that decide the output, by a readable name."""
    files: "Callable[[Project, str], list[str]]" = lambda *_: []
    """Names of the other files that it reads or writes, below the root."""
    data: "Callable[[Project], str]" = lambda _: ""
    """Digest of the parts of its files that later stages read, if they read only parts."""
    is_there: "Callable[[Project, Receipt], bool]" = lambda *_: True
    """Whether its output besides tables still exists."""
    is_final: "Callable[[Project, Receipt], bool]" = lambda *_: True
    """Whether no work on its inputs is left."""
    is_wanted: Callable[[Settings], bool] = lambda _: True
    """Whether a run includes it."""
    pays: bool = False
    """Whether it spends money, so that it is never retried automatically."""
    pool: str | None = None
    """A resource that only one run at a time may use."""

    told: tuple[str, ...] = ()
    """The figures of its report that `status` shows. The first one represents the batch."""
    figures: Callable[[Sequence[Receipt]], Mapping[str, Any]] = lambda _: {}
    """Makes its figures for the summary of a run. Receipts of earlier runs are marked as reused."""
    facts: "Callable[[Project, Receipt], Mapping[str, Any]]" = lambda *_: {}
    """Makes what Dagster shows for a batch: numbers, texts, paths, and pictures in Markdown."""
    trace: "Callable[[Project, str, TraceState], Mapping[str, Any]]" = lambda *_: {}
    """Returns what it made for one state besides table rows, for `trace`."""
    checks: Callable[[], tuple[Check, ...]] = tuple
    """Checks of its tables, besides their schemas."""
    asset: str = ""
    """Name of its asset in Dagster. By default, its own name."""
    table: str = ""
    """The table whose columns its asset shows. By default, the first that it writes."""
    kinds: tuple[str, ...] = ("python", "parquet")
    """Dagster's badges for its asset."""
    after: tuple[str, ...] = ()
    """Stages that it follows. By default, those that write its inputs."""

    unsafe: tuple[str, ...] = ()
    """If a reason for staleness begins with one of these texts, its output can't be published."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "asset", self.asset or self.name)
        object.__setattr__(self, "table", self.table or next(iter(self.writes), ""))

    def told_to(self, **options: Any) -> "Stage":
        """Return a copy of the stage with more arguments for its work."""
        return replace(self, work=partial(self.work, **options))

    def parts(self, settings: Settings) -> tuple[Part, ...]:
        """Return the code that decides the output under these settings."""
        return self.code(settings) if callable(self.code) else self.code

"""The definition of a stage: one value that describes a whole step.

Planning, running, staleness, `status`, `verify`, and Dagster's assets read these values and know no
stage by name. `replay_pipeline.stages.chain` lists them;
`replay_pipeline.stages.engine` runs them.

Importing a stage imports none of the modules that do its work, so that a quick look at a data root
is fast.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from replay_pipeline.settings import Settings
from replay_pipeline.stages.receipts import Receipt

if TYPE_CHECKING:
    import pyarrow as pa

    from replay_pipeline.stages.audit import AuditResult
    from replay_pipeline.stages.project import Project
    from replay_pipeline.storage.tables import DataRoot
    from replay_pipeline.types import TraceState

Report = dict[str, Any]
"""The counts of a stage, as plain values."""


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

    version: str = ""
    """Both versions of the code, if they differ, such as `version 1 → 2`."""
    settings: tuple[str, ...] = ()
    """Changed settings with both values, such as `pairs.agreement_threshold: 2 → 3`."""
    inputs: tuple[str, ...] = ()
    """Changed tables and files among the inputs."""

    def __bool__(self) -> bool:
        return bool(self.version or self.settings or self.inputs)


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
    outputs: dict[str, str] = field(default_factory=dict)
    """Digests of what the stage has written."""

    def read(self, table: str) -> "pa.Table":
        """Read a table of the batch. Raises the errors of `DataRoot.read`."""
        return self.project.root.read(table, self.batch)

    def write(self, table: str, rows: "pa.Table | Iterable[pa.Table]") -> None:
        """Write a table of the batch. Raises the errors of `DataRoot.write`."""
        self.project.write(table, self.batch, rows)
        self.outputs.update(self.project.digests(self.batch, [table]))


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A step of the chain."""

    name: str
    about: str
    """A sentence or two on what the stage makes."""
    version: int
    """Raise it whenever the same inputs and settings give other rows. Then a run does the stage again.
    `tests/contracts/test_stage_versions.py` fails if you forget it."""
    work: Callable[[Task], Report]
    """The work: reads tables, calls one library function, writes tables, and returns a report."""
    reads: tuple[str, ...] = ()
    """Tables that decide the output, and tables that are written together with them. Dagster has
    one version for everything that a stage writes, and must find the same stages stale."""
    writes: tuple[str, ...] = ()
    """Tables of the batch that it writes; its asset shows the columns of the first. A stage without
    tables works on all batches at once."""
    settings: Callable[[Settings], Mapping[str, Any]] = lambda _: {}
    """The settings that decide the output, by name. A mapping stands for all settings below it."""
    inputs: "Callable[[Project, str], Mapping[str, str]]" = lambda *_: {}
    """Digests of all other inputs that decide the output, by a readable name."""
    is_done: "Callable[[Project, Receipt], bool]" = lambda *_: True
    """Whether its output besides tables still exists, and no work on its inputs is left."""
    pays: bool = False
    """Whether it spends money, so that it is never retried automatically."""

    told: str = ""
    """The figure of its report that represents a batch in `status`."""
    figures: Callable[[Sequence[Receipt]], Mapping[str, Any]] = lambda _: {}
    """Makes its figures for the summary of a run. Receipts of earlier runs are marked as reused."""
    facts: "Callable[[Project, Receipt], Mapping[str, Any]]" = lambda *_: {}
    """Makes what Dagster shows for a batch: numbers, texts, paths, and pictures in Markdown."""
    trace: "Callable[[Project, str, TraceState], Mapping[str, Any]]" = lambda *_: {}
    """Returns what it made for one state besides table rows, for `trace`."""
    checks: tuple[Check, ...] = ()
    """Checks of its tables, besides their schemas."""
    asset: str = ""
    """Name of its asset in Dagster. By default, its own name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "asset", self.asset or self.name)

    @property
    def is_by_batch(self) -> bool:
        """Return whether it works batch by batch, and not on all of them at once."""
        return bool(self.writes)

    def told_to(self, **options: Any) -> "Stage":
        """Return a copy of the stage with more arguments for its work."""
        return replace(self, work=partial(self.work, **options))

"""Show the progress of long work: a bar per stage in a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rich.progress import (
    BarColumn,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.text import Text

from replay_pipeline.cli.console import err
from replay_pipeline.types import Progress

_WORTH_TELLING = {"bytes": 5_000_000, "look": 200}
"""From how many of what plain lines tell of it."""
_EVERY_S = 10.0


@contextmanager
def progress_bars() -> Iterator[Callable[[Progress], None]]:
    """Yield a callback that draws a bar per stage.

    Without a terminal it prints a line for each tenth of the work or of the money, and at least every ten
    seconds while there is news.
    """
    bars = Bars(
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=14),
        TextColumn("{task.fields[amount]}"),
        TextColumn("{task.fields[usd]}"),
        _Rate(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )
    tasks: dict[str, TaskID] = {}
    told: dict[str, _Told] = {}
    stages: dict[str, StageProgress] = {}

    def show(progress: Progress) -> None:
        whole = stages.setdefault(progress.stage, StageProgress()).whole(progress)
        if not err.is_terminal:
            _tell_in_lines(whole, told.setdefault(whole.stage, _Told()))
            return
        if whole.stage not in tasks:
            tasks[whole.stage] = bars.add_task(whole.stage, amount="", usd="")
        bars.update(
            tasks[whole.stage], completed=whole.n_done, total=whole.n_total,
            amount=_amount(whole), usd=_dollars(whole), unit=whole.unit,
        )  # fmt: skip

    with bars:
        yield show


class _Rate(ProgressColumn):
    """How much is done in a second, by the last half minute."""

    def render(self, task: Task) -> Text:
        """Return the rate; nothing before there is one."""
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        if task.fields.get("unit") == "bytes":
            return Text(f"{speed / 1e6:.1f} MB/s")
        return Text(f"{speed:,.0f}/s" if speed >= 10 else f"{speed:.1f}/s")


@dataclass
class StageProgress:
    """One bar for a stage over all its batches. Neither the bar nor its total ever shrinks.

    If the whole stage is announced, that sets its total. Otherwise the totals of the parts add up.
    """

    n_total: int | None = None
    n_done: int = 0
    limit_usd: float | None = None
    parts: dict[str, Progress] = field(default_factory=dict)

    def whole(self, progress: Progress) -> Progress:
        """Add the progress of one part, and return the progress of the whole stage."""
        if progress.limit_usd is not None:
            self.limit_usd = progress.limit_usd
        if progress.part is None:
            self.n_total = self.n_total or progress.n_total
            self.n_done = max(self.n_done, progress.n_done)
            if not self.parts:
                return replace(progress, n_done=self._up_to(self.n_done), n_total=self.n_total)
        else:
            self.parts[progress.part] = progress
        parts = self.parts.values()
        costs = [part.cost_usd for part in parts if part.cost_usd is not None]
        self.n_done = max(self.n_done, sum(part.n_done for part in parts))
        return replace(
            progress,
            n_done=self._up_to(self.n_done),
            n_total=self.n_total or sum(part.n_total or 0 for part in parts) or None,
            cost_usd=sum(costs) if costs else None,
            limit_usd=self.limit_usd,
        )

    def _up_to(self, n_done: int) -> int:
        return n_done if self.n_total is None else min(n_done, self.n_total)


def _amount(progress: Progress) -> str:
    unit, size = (" MB", 1e6) if progress.unit == "bytes" else ("", 0)
    done, total = (
        f"{n / size:.1f}" if size else f"{n:,}" for n in (progress.n_done, progress.n_total or 0)
    )
    return f"{done} of {total}{unit}" if progress.n_total else f"{done}{unit}"


def _dollars(progress: Progress) -> str:
    if progress.cost_usd is None:
        return ""
    of = "" if progress.limit_usd is None else f" of ${progress.limit_usd:.2f}"
    return f"${progress.cost_usd:.4f}{of}"


@dataclass
class _Told:
    """What the last line of a stage told, and when."""

    tenths: tuple[int, int] = (-1, -1)
    line: str = ""
    at_s: float = float("-inf")


def _tell_in_lines(progress: Progress, told: _Told) -> None:
    """Print a line where a stage or its money has come a tenth further, or ten seconds after the last one."""
    if not (progress.n_done or progress.cost_usd is not None):
        return
    fewest = _WORTH_TELLING.get(progress.unit or progress.stage, 0)
    if (progress.n_total or fewest) < fewest:
        return  # it is over before the line could be read
    n_done, n_total, usd = progress.n_done, progress.n_total, progress.cost_usd or 0.0
    of_work = 10 * n_done // n_total if n_total else n_done // 10
    of_money = int(10 * usd / progress.limit_usd) if progress.limit_usd else 0
    line = f"{progress.stage} {_amount(progress)}"
    line += f", {_dollars(progress)}" if progress.cost_usd is not None else ""
    now = time.monotonic()
    is_late = now - told.at_s >= _EVERY_S and line != told.line
    if (of_work, of_money) != told.tenths or is_late:
        told.tenths, told.line, told.at_s = (of_work, of_money), line, now
        err.print(line, highlight=False)

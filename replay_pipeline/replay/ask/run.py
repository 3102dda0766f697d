"""The public functions that replay states through teachers, under a ceiling in dollars."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from replay_pipeline.replay.ask.asking import (
    Asking,
    AskingOptions,
    checked_ceiling,
)
from replay_pipeline.replay.ask.engine import Replay
from replay_pipeline.replay.ask.looks import known_row
from replay_pipeline.replay.buy.estimates import Estimate, Plan, what_is_left
from replay_pipeline.replay.buy.lanes import lanes_of
from replay_pipeline.replay.buy.places import Place
from replay_pipeline.replay.dialects.client import run_apart
from replay_pipeline.replay.dialects.endpoints import fetch_prices, teacher_keys
from replay_pipeline.replay.dialects.requests import RequestBuilder
from replay_pipeline.replay.dialects.sizes import Learned
from replay_pipeline.replay.money.calls import LedgerEntries
from replay_pipeline.replay.money.database import exists
from replay_pipeline.replay.money.ledger import Ledger, read_learned
from replay_pipeline.settings import DEFAULT_TEACHERS, Settings
from replay_pipeline.types import (
    Progress,
    ReplayReport,
    TeacherAction,
    TeacherSpec,
    TraceState,
)

logger = logging.getLogger(__name__)


async def replay_trace(
    states: Iterable[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    max_total_usd: float = 10.0,
    *,
    ledger: str | Path | None = None,
    **options: Unpack[AskingOptions],
) -> list[TeacherAction]:
    """Ask every teacher for its action at every state, for at most `max_total_usd`.

    Answers that are already in the ledger are returned without asking again, and count against the
    ceiling. When the ceiling is reached, the function sends no more and returns what it has.

    >>> import asyncio
    >>> from replay_pipeline.testing import TeacherServer
    >>> states = [
    ...     {
    ...         "state_id": "step-1",
    ...         "messages": [{"role": "user", "content": "A test fails. What now?"}],
    ...         "student_action": {"role": "assistant", "content": "I edit the parser."},
    ...     }
    ... ]
    >>> with TeacherServer(script={"content": "I read the test first."}) as server:
    ...     asked = replay_trace(states, server.teachers(), 0.50, ledger="ledger.sqlite")
    ...     actions = asyncio.run(asked)
    >>> [(action.teacher, action.action["content"]) for action in actions[:1]]
    [('deepseek', 'I read the test first.')]

    Args:
        states: decision points. A teacher gets those of one session in the given order. A sequence
            isn't copied, so it may build its states on demand.
        teachers: models to ask.
        max_total_usd: hard ceiling in US dollars. 0 sends nothing.
        ledger: path or database URL; by default `ledger.sqlite` under the data root.
        options: how to ask, e.g. `max_concurrency=64`; see `Asking`.

    Returns:
        One row per decided question, failed ones included, in the order of the states.

    Raises:
        ConfigError: a teacher, key, budget or option is wrong; raised before any cost.
        PriceError: a teacher's price is not known; raised before any cost.
        LedgerError: the ledger can't be opened or written.
    """
    report = await replay_states(
        states, teachers, max_total_usd=max_total_usd, ledger=ledger, **options
    )
    return report.actions


def replay_trace_sync(
    states: Iterable[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    max_total_usd: float = 10.0,
    *,
    ledger: str | Path | None = None,
    **options: Unpack[AskingOptions],
) -> list[TeacherAction]:
    """Call `replay_trace` without an event loop, or inside the loop of a notebook."""
    return replay_in_thread(
        states, teachers, max_total_usd=max_total_usd, ledger=ledger, **options
    ).actions


async def replay_states(
    states: Iterable[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    *,
    max_total_usd: float,
    ledger: str | Path | None = None,
    stop: threading.Event | None = None,
    **options: Unpack[AskingOptions],
) -> ReplayReport:
    """Replay states like `replay_trace`, and report everything done, skipped, and spent.

    To stop sending, set `stop` from any thread or cancel the awaiting task. Calls in flight are
    paid for, so their answers are awaited for up to `RetryPolicy.settle_s` and kept. The work runs
    in a thread with its own event loop.
    """
    asking, limit_nano = _checked(teachers, max_total_usd, options)
    replay = Replay(indexed(states), teachers, limit_nano, _url(ledger), asking, stop=stop)
    canceled: asyncio.CancelledError | None = None
    running = _Running(replay.run())
    outcome = asyncio.wrap_future(running.outcome)
    while not outcome.done():
        try:
            await asyncio.wait([outcome])
        except BaseException as error:
            replay.stop.set()
            if not isinstance(error, asyncio.CancelledError):
                raise
            canceled = canceled or error
    if canceled:
        outcome.exception()  # it has been looked at: what came first is what is told
        raise canceled
    return outcome.result()


def _checked(
    teachers: Sequence[TeacherSpec], max_total_usd: float, options: AskingOptions
) -> tuple[Asking, int]:
    asking = Asking.of(**options)
    return asking, checked_ceiling(teachers, max_total_usd, asking)


def _url(ledger: str | Path | None) -> str:
    return str(ledger or Settings.load().ledger_url())


class _Running:
    """Work in a thread and a loop of its own, where nothing that befalls its caller reaches it."""

    def __init__(self, work: Coroutine[Any, Any, ReplayReport]) -> None:
        self.outcome: Future[ReplayReport] = Future()
        self.outcome.set_running_or_notify_cancel()
        self.is_over = threading.Event()
        self._work = work
        threading.Thread(target=self._run, name="replay").start()

    def _run(self) -> None:
        try:
            self.outcome.set_result(asyncio.run(self._work))
        except BaseException as error:  # noqa: BLE001 (raised again by whoever waits)
            self.outcome.set_exception(error)
        finally:
            self.is_over.set()


def replay_in_thread(
    states: Iterable[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    *,
    max_total_usd: float,
    ledger: str | Path | None = None,
    tick: Callable[[Progress], None] | None = None,
    tick_s: float = 1.0,
    stop: threading.Event | None = None,
    **options: Unpack[AskingOptions],
) -> ReplayReport:
    """Run `replay_states` in its own thread, so that signals can't break it.

    The calling thread waits and calls `tick` with the latest progress. An interrupt (Ctrl-C,
    Dagster's termination, an error in `tick`) stops the sending. The function then waits until
    every call in flight is answered and booked, and raises the interrupt again. Further interrupts
    have no effect. Only a kill loses calls in flight.
    """
    asking, limit_nano = _checked(teachers, max_total_usd, options)
    latest = [Progress(stage="replay", n_done=0, cost_usd=0.0)]
    replay = Replay(
        indexed(states), teachers, limit_nano, _url(ledger), asking,
        on_progress=lambda progress: latest.__setitem__(0, progress), stop=stop,
    )  # fmt: skip
    running = _Running(replay.run())
    try:
        # An event, not `Thread.join`: an interrupted join loses track of the thread.
        while not running.is_over.wait(tick_s):
            if tick:
                tick(latest[0])
    except BaseException:
        replay.stop.set()
        _wait_however_often_told(running.is_over)
        raise
    report = running.outcome.result()
    if tick:
        tick(latest[0])
    return report


def _wait_however_often_told(done: threading.Event) -> None:
    """Wait through every further signal: a supervisor and a terminal may send the same one each."""
    while not done.is_set():
        try:
            done.wait()
        except BaseException:  # noqa: BLE001 (the first one is raised again)
            logger.warning(
                "stopping: waiting for the answers of calls in flight, which are paid for"
            )


def estimate(
    states: Iterable[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    *,
    max_total_usd: float | None = None,
    ledger: str | Path | None = None,
    **options: Unpack[AskingOptions],
) -> Estimate:
    """Return what is left to ask at `states`, per teacher: calls, dollars, pairs. Costs nothing.

    With `ledger`, answers that it already has are left out, and show how often models agree. With
    `max_total_usd`, the estimate also says what this ceiling pays for. This works with and without an event
    loop. Without a network, a stored price list of any age is used, and the estimate shows its
    date.

    Raises:
        ConfigError: a teacher or option is wrong.
        PriceError: a teacher's price is not known.
    """
    asking = Asking.of(**options)
    checked_ceiling(teachers, max_total_usd or 0.0, asking)
    keys = teacher_keys(teachers, is_required=False)
    prices = run_apart(
        fetch_prices(teachers, keys=keys, folder=asking.price_folder, takes_any_age=True)
    )
    states = indexed(states)
    places: list[Place] = []
    lanes = lanes_of(states, teachers, asking.request_options(), places)
    entries, looks = LedgerEntries(), asking.asking_on()
    learned: dict[str, Learned] = {}
    if ledger is not None and exists(ledger):
        with Ledger(ledger) as opened:
            tasks = [task for _, lane in lanes for task in lane]
            entries, _ = looks.look_up(opened, tasks)
            looks.end_known(tasks, entries)
            learned = opened.do(lambda database: read_learned(database, teachers)).result()

    builder = RequestBuilder(asking.request_options())
    plan = Plan(
        states=states,
        teachers=teachers,
        lanes=lanes,
        places=places,
        policy=asking.policy().among(len({teacher.vendor for teacher in teachers})),
        prices=prices,
        find=partial(known_row, entries=entries),
        learned=learned,
        max_looks=looks.n_most,
        looks_share=asking.looks_share,
        adaptations={t.name: builder.adaptations(t, prices[t.name]) for t in teachers},
    )
    return what_is_left(plan, ceiling_usd=max_total_usd)


def indexed(states: Iterable[TraceState]) -> Sequence[TraceState]:
    """Return the states as a sequence. A sequence is returned unchanged."""
    return states if isinstance(states, Sequence) else list(states)

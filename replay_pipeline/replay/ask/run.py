"""The public functions that replay states through teachers, under a ceiling in dollars."""

import asyncio
import gc
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Unpack

from pydantic import SecretStr

from replay_pipeline.replay.ask.asking import (
    Asking,
    AskingOptions,
    checked_ceiling,
    today,
)
from replay_pipeline.replay.ask.engine import Engine
from replay_pipeline.replay.ask.rounds import Rounds
from replay_pipeline.replay.buy.estimates import Estimate, forecast
from replay_pipeline.replay.buy.places import Place, asked_by, coverage, place_of
from replay_pipeline.replay.buy.prospects import prospect
from replay_pipeline.replay.buy.tasks import LaneQuestion, Lanes
from replay_pipeline.replay.dialects.client import Client, run_apart
from replay_pipeline.replay.dialects.endpoints import teacher_keys
from replay_pipeline.replay.dialects.prices import Price, usd
from replay_pipeline.replay.dialects.replies import LASTING_CODES
from replay_pipeline.replay.dialects.requests import Prefix, RequestBuilder
from replay_pipeline.replay.dialects.sizes import Learned
from replay_pipeline.replay.money.calls import Known, LedgerEntries, decode_row
from replay_pipeline.replay.money.database import exists
from replay_pipeline.replay.money.ledger import Ledger, add_learned, read_learned
from replay_pipeline.settings import DEFAULT_TEACHERS, Settings
from replay_pipeline.types import (
    GateReport,
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
    on_progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
    **options: Unpack[AskingOptions],
) -> ReplayReport:
    """Replay states like `replay_trace`, and report everything done, skipped, and spent.

    To stop sending, set `stop` from any thread or cancel the awaiting task. Calls in flight are
    paid for, so their answers are awaited for up to `RetryPolicy.settle_s` and kept. The work runs
    in a thread with its own event loop. `on_progress` is called in the caller's loop.
    """
    asking, limit_nano = _checked(teachers, max_total_usd, options)
    replay = _Replay(indexed(states), teachers, limit_nano, _url(ledger), asking)
    replay.stop = stop or threading.Event()
    raised: list[BaseException] = []
    if on_progress:
        replay.on_progress = _in_this_loop(on_progress, raised, replay.stop)
    running = _Running(replay.run())
    outcome = asyncio.wrap_future(running.outcome)
    while not outcome.done():
        try:
            await asyncio.wait([outcome])
        except BaseException as error:
            replay.stop.set()
            if not isinstance(error, asyncio.CancelledError):
                raise
            raised.append(error)
    if raised:
        outcome.exception()  # it has been looked at: what came first is what is told
        raise raised[0]
    return outcome.result()


def _in_this_loop(
    on_progress: Callable[[Progress], None], raised: list[BaseException], stop: threading.Event
) -> Callable[[Progress], None]:
    """Call back in the loop of whoever awaits, from another thread; its first error stops the run."""

    def tell(progress: Progress) -> None:
        if raised:
            return
        try:
            on_progress(progress)
        except Exception as error:  # noqa: BLE001 (raised when all that is paid is in)
            raised.append(error)
            stop.set()

    loop = asyncio.get_running_loop()

    def tell_there(progress: Progress) -> None:
        loop.call_soon_threadsafe(tell, progress)

    return tell_there


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
    replay = _Replay(indexed(states), teachers, limit_nano, _url(ledger), asking)
    replay.on_progress = lambda progress: latest.__setitem__(0, progress)
    replay.stop = stop or threading.Event()
    told = (lambda: tick(latest[0])) if tick else None
    return drained(replay.run(), replay.stop, tick=told, tick_s=tick_s)


def drained(
    work: Coroutine[Any, Any, ReplayReport],
    stop: threading.Event,
    *,
    tick: Callable[[], None] | None = None,
    tick_s: float = 1.0,
) -> ReplayReport:
    """Run `work` in its own thread. An interrupt sets `stop` and waits until the thread has ended."""
    running = _Running(work)
    try:
        # An event, not `Thread.join`: an interrupted join loses track of the thread.
        while not running.is_over.wait(tick_s):
            if tick:
                tick()
    except BaseException:
        stop.set()
        _wait_however_often_told(running.is_over)
        raise
    report = running.outcome.result()
    if tick:
        tick()
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
    ledger: str | Path | None = None,
    **options: Unpack[AskingOptions],
) -> Estimate:
    """Return the estimated tokens and cost of replaying `states`, per teacher. Costs nothing.

    With `ledger`, answers that it already has are left out. This works with and without an event
    loop. Without a network, a stored price list of any age is used, and the estimate shows its
    date.

    Raises:
        ConfigError: a teacher or option is wrong.
        PriceError: a teacher's price is not known.
    """
    asking = replace(Asking.of(**options), max_price_age_days=_ANY_AGE_DAYS)
    checked_ceiling(teachers, 0.0, asking)
    keys = teacher_keys(teachers, is_required=False)
    prices = run_apart(asking.fetch_prices(teachers, keys=keys))
    states = indexed(states)
    lanes = lanes_of(states, teachers, asking)
    known: Mapping[str, Known] = {}
    learned: dict[str, Learned] = {}
    if ledger is not None and exists(ledger):
        with Ledger(ledger) as opened:
            shas = [task.question.sha for _, lane in lanes for task in lane]
            known = opened.lookup(shas).decided
            learned = opened.do(lambda database: read_learned(database, teachers)).result()
    left = [
        (teacher, [task for task in lane if task.question.sha not in known])
        for teacher, lane in lanes
    ]
    builder = RequestBuilder(asking.request_options())
    adapted = {t.name: builder.adaptations(t, prices[t.name]) for t in teachers}
    rows: dict[int, list[TeacherAction]] = {}
    for task in (task for _, lane in lanes for task in lane if task.question.sha in known):
        rows.setdefault(task.state_index, []).append(decode_row(known[task.question.sha].row))
    found = forecast(
        left, prices, gates=asking.gates, learned=learned, adaptations=adapted, is_full=True
    )
    seen = prospect(states, teachers, rows, asking.policy())
    gated = replace(found.gated, prospect=seen) if found.gated else None
    return replace(found, prospect=seen, gated=gated)


_ANY_AGE_DAYS = 36_500.0


def indexed(states: Iterable[TraceState]) -> Sequence[TraceState]:
    """Return the states as a sequence. A sequence is returned unchanged."""
    return states if isinstance(states, Sequence) else list(states)


def lanes_of(
    states: Sequence[TraceState],
    teachers: Sequence[TeacherSpec],
    asking: Asking,
    places: list[Place] | None = None,
) -> list[tuple[TeacherSpec, deque[LaneQuestion]]]:
    """Group questions into lanes, one per session and teacher. A state without a session gets its own lane.

    Adds the facts that the buyer needs about each state to `places`.
    """
    builder = RequestBuilder(asking.request_options())
    lanes: dict[tuple[str, str], tuple[TeacherSpec, deque[LaneQuestion]]] = {}
    prefixes: dict[str, Prefix] = {}
    for i, state in enumerate(states):
        session = state.get("session_id") or f"\0{i}"
        if places is not None:
            places.append(place_of(state, i))
        goes_on, prefixes[session] = builder.begins_with(state, prefixes.get(session))
        for j, teacher in enumerate(teachers):
            _, lane = lanes.setdefault((session, teacher.name), (teacher, deque()))
            question = builder.question(state, teacher)
            task = LaneQuestion(i * len(teachers) + j, states, i, teacher, question)
            task.previous = lane[-1] if goes_on else None
            lane.append(task)
    return list(lanes.values())


class _Replay:
    """One run from plan to report."""

    def __init__(
        self,
        states: Sequence[TraceState],
        teachers: Sequence[TeacherSpec],
        limit_nano: int,
        ledger: str,
        asking: Asking,
    ) -> None:
        self.states = states
        self.teachers = teachers
        self.limit_nano = limit_nano
        self.ledger_url = ledger
        self.asking = asking
        self.on_progress: Callable[[Progress], None] | None = None
        self.stop = threading.Event()
        self.policy = asking.policy().among(len({teacher.vendor for teacher in teachers}))
        self.places: list[Place] = []
        self.rounds: Rounds | None = None

    async def run(self) -> ReplayReport:
        lanes = await asyncio.to_thread(
            lanes_of, self.states, self.teachers, self.asking, self.places
        )
        ledger = await asyncio.to_thread(Ledger, self.ledger_url, is_durable=self.asking.is_durable)
        try:
            return await self._run(lanes, ledger)
        finally:
            await asyncio.to_thread(ledger.close)

    async def _run(
        self, lanes: list[tuple[TeacherSpec, deque[LaneQuestion]]], ledger: Ledger
    ) -> ReplayReport:
        shas = [task.question.sha for _, lane in lanes for task in lane]
        found = await asyncio.to_thread(ledger.lookup, shas, self.asking.known_until)
        _forget_outgrown(found, lanes)
        keys, prices = await self._keys_and_prices(
            is_answered=all(sha in found.decided for sha in shas)
        )
        async with Client(
            max_connections=self.asking.max_concurrency,
            stop=self.stop,
            settle_s=self.asking.retry.settle_s,
        ) as client:
            engine = Engine(
                ledger=ledger,
                client=client,
                asking=self.asking,
                prices=prices,
                keys=keys,
                n_total=len(self.states) * len(self.teachers),
                on_progress=self.on_progress,
                stop=self.stop,
            )
            await asyncio.to_thread(self._open_scopes, engine, found)
            learned = await asyncio.wrap_future(
                ledger.do(lambda database: read_learned(database, self.teachers))
            )
            engine.answered_before = frozenset(learned)
            # What is known counts when its question is chosen, as in the run that had it asked.
            is_chosen = bool(self.policy.is_in_turn and prices)
            open_lanes = lanes if is_chosen else self._take_known(engine, lanes, found)
            expected, is_short = None, False
            if prices:
                expected = forecast(open_lanes, prices, gates=self.asking.gates, learned=learned)
                spent = usd(sum(each.cost_nano for each in found.decided.values()))
                is_short = spent + expected.expected_usd > usd(self.limit_nano)
            if self.limit_nano:
                # Nothing of the plan dies while questions are asked, so the collector, which would
                # walk through all of it again and again, leaves it alone.
                gc.freeze()
                rounds = self.rounds = self._rounds(engine, prices, found, is_chosen=is_chosen)
                try:
                    await (
                        rounds.run(open_lanes) if is_chosen or is_short else engine.run(open_lanes)
                    )
                finally:
                    gc.unfreeze()
                    new = engine.books.newly_learned
                    await asyncio.wrap_future(
                        ledger.do(lambda database: add_learned(database, self.teachers, new))
                    )
            else:
                for task in (task for _, lane in open_lanes for task in lane):
                    engine.skip(task, "budget")
        held = await asyncio.to_thread(ledger.held_by_lost, f"run:{engine.run_id}")
        return self._report(engine, expected, *held)

    async def _keys_and_prices(
        self, *, is_answered: bool
    ) -> tuple[dict[str, SecretStr | None], dict[str, Price]]:
        """Return what calls need; nothing where there will be none."""
        if is_answered or not self.limit_nano:
            return {}, {}
        keys = teacher_keys(self.teachers)
        return keys, await self.asking.fetch_prices(self.teachers, keys=keys, stop=self.stop)

    def _rounds(
        self, engine: Engine, prices: Mapping[str, Price], found: LedgerEntries, *, is_chosen: bool
    ) -> Rounds:
        return Rounds(
            engine=engine,
            asking=self.asking,
            policy=self.policy,
            states=self.states,
            teachers=self.teachers,
            places=self.places,
            prices=prices,
            limit_nano=self.limit_nano,
            found=found,
            take_known=(lambda lanes: self._take_known(engine, lanes, found))
            if is_chosen
            else None,
        )

    def _open_scopes(self, engine: Engine, found: LedgerEntries) -> None:
        names = [teacher.name for teacher in self.teachers]
        scopes = [today(), *(f"teacher:{name}" for name in names), *self.asking.scopes()]
        limits = self.asking.limits_nano(today(), names)
        engine.ledger.open_scopes(scopes, limits, by=f"run:{engine.run_id}")
        carried = 0
        if self.asking.counts_recorded:
            carried = found.paid_nano.total() - found.paid_nano[engine.run_id]
        engine.ledger.open_run(
            engine.run_id,
            self.limit_nano,
            carried_nano=carried,
            lost=[each for calls in found.lost.values() for each in calls],
        )

    def _take_known(
        self,
        engine: Engine,
        lanes: list[tuple[TeacherSpec, deque[LaneQuestion]]],
        found: LedgerEntries,
    ) -> list[tuple[TeacherSpec, deque[LaneQuestion]]]:
        open_lanes = []
        for teacher, lane in lanes:
            left: deque[LaneQuestion] = deque()
            for task in lane:
                sha = task.question.sha
                if sha in found.decided:
                    engine.know(task, found.decided[sha])
                    continue
                if sha in found.booked:
                    engine.decided[task.index] = replace(
                        decode_row(found.booked[sha]), state_id=task.state_id
                    )
                engine.lose(task, found.lost.get(sha, ()))
                left.append(task)
            if left:
                open_lanes.append((teacher, left))
        # Calls with an unknown outcome first: learning it frees the money they hold.
        return sorted(open_lanes, key=lambda lane: not any(task.lost for task in lane[1]))

    def _report(
        self,
        engine: Engine,
        expected: Estimate | None,
        unknown_nano: int,
        held_until: datetime | None,
    ) -> ReplayReport:
        actions = _each_paid_once(engine)
        asked = {index // len(self.teachers) for index in engine.decided}
        by_teacher = dict.fromkeys((teacher.name for teacher in self.teachers), 0.0)
        for action in actions:
            by_teacher[action.teacher] += action.cost_usd
        return ReplayReport(
            actions=actions,
            n_states=len(self.states),
            n_sent=engine.n_sent,
            n_cached=engine.n_cached,
            spent_usd=round(math.fsum(action.cost_usd for action in actions), 9),
            newly_spent_usd=usd(engine.books.newly_spent_nano),
            max_total_usd=usd(self.limit_nano),
            stop_reason=_stop_reason(engine),
            skipped=dict(engine.skipped),
            cost_by_teacher_usd={name: round(cost, 9) for name, cost in by_teacher.items()},
            forecast_usd=expected.expected_usd if expected else None,
            n_open=sum(_may_pass(action) for action in actions),
            unknown_usd=usd(unknown_nano),
            held_until=held_until.isoformat(timespec="seconds") if held_until else None,
            gates=self.rounds.reports()
            if self.rounds
            else tuple(GateReport(gate=name) for name in self.policy.names),
            coverage=coverage(self.places, asked),
            asked_by=asked_by(self.places, asked),
            n_overruns=engine.books.n_overruns,
            n_disputed=engine.books.n_disputed,
            stopped_teachers={
                name: failure.message
                for name, failure in engine.dispatcher.stopped_teachers.items()
            },
        )


def _forget_outgrown(found: LedgerEntries, lanes: Lanes) -> None:
    """Have questions asked again whose calls outlasted a time limit that has been raised since."""
    for teacher, lane in lanes:
        for task in lane:
            if _may_answer_now(found.decided.get(task.question.sha), teacher):
                del found.decided[task.question.sha]


def _may_answer_now(known: Known | None, teacher: TeacherSpec) -> bool:
    """Return whether a call that outlasted its time limit would have more time now."""
    if known is None or b'"no_reply"' not in known.row:
        return False
    row = decode_row(known.row)
    return row.error_code == "no_reply" and teacher.timeout_s > row.latency_s


def _each_paid_once(engine: Engine) -> list[TeacherAction]:
    """Return the decided rows in order; an answer that serves several states costs at the first."""
    paid: set[str | None] = set()
    actions = []
    for index in sorted(engine.decided):
        action = engine.decided[index]
        actions.append(replace(action, cost_usd=0.0) if action.request_sha in paid else action)
        paid.add(action.request_sha)
    return actions


def _may_pass(action: TeacherAction) -> bool:
    """Return whether the next run asks again: nothing came back, and the reason need not last."""
    has_reply = action.finish_reason is not None
    return (
        action.error_code is not None and not has_reply and (action.error_code not in LASTING_CODES)
    )


def _stop_reason(
    engine: Engine,
) -> Literal["completed", "budget", "stopped", "teacher_stopped"]:
    if engine.stop.is_set():
        return "stopped"
    if engine.skipped["budget"]:
        return "budget"
    return "teacher_stopped" if engine.dispatcher.stopped_teachers else "completed"

"""Replay states through teachers under a ceiling in dollars: the public functions."""

import asyncio
import difflib
import logging
import math
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from replay_pipeline.errors import ConfigError, PriceError, TeacherError, UntrustedError
from replay_pipeline.replay.board import Board
from replay_pipeline.replay.database import exists
from replay_pipeline.replay.engine import Engine, RetryPolicy, Task
from replay_pipeline.replay.estimates import Estimate, forecast
from replay_pipeline.replay.gates import Gates, is_error_site, parse_gates
from replay_pipeline.replay.ledger import Known, Ledger, Lost, batched_requests
from replay_pipeline.replay.openrouter import Client, run_apart
from replay_pipeline.replay.prices import Price, PriceBook, floor_nano, usd
from replay_pipeline.replay.replies import LASTING_CODES
from replay_pipeline.replay.requests import (
    DEFAULT_MAX_COMPLETION_TOKENS,
    RequestBuilder,
    RequestOptions,
    dialect_of,
)
from replay_pipeline.settings import DEFAULT_TEACHERS, Settings, key_for
from replay_pipeline.types import (
    AgreementLevel,
    Progress,
    ReplayReport,
    TeacherAction,
    TeacherSpec,
    TraceState,
)
from replay_pipeline.windows import window_messages

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking:
    """How a run asks: everything but what is asked, of whom, and the ceiling."""

    max_concurrency: int = 64
    window: str = "full"
    max_completion_tokens: int = DEFAULT_MAX_COMPLETION_TOKENS
    accepted_terms: tuple[str, ...] = ()
    partition: str | None = None
    tags: tuple[str, ...] = ()
    limits_usd: Mapping[str, float] = field(default_factory=dict)
    """Further ceilings by scope: `day`, `partition`, `teacher:NAME`, `tag:NAME`. They hold over
    all runs on the ledger."""
    gates: tuple[str, ...] = ()
    """Gating policies by name, in order; see `replay_pipeline.replay.gates`."""
    agreement_threshold: int = 2
    """Votes of distinct families that make a consensus, for gates that look at votes."""
    level: AgreementLevel = "effect"
    """How strictly two actions must be the same to be one vote, for gates that look at votes."""
    count_own_family: bool = False
    """Whether teachers of the student's own family vote, for gates that look at votes."""
    counts_recorded: bool = True
    """Whether answers that were already in the ledger count against the ceiling of this run."""
    run_id: str | None = None
    """Processes that share a run share its ceiling. By default a new run."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    price_folder: Path | None = None
    """Where price lists are kept; `None` fetches them anew for each run."""
    max_price_age_days: float = 7.0
    """An older price list is refused when it can't be fetched again."""
    is_durable: bool = True

    def gating(self) -> Gates:
        """The gates, ready for one run."""
        return parse_gates(
            self.gates,
            level=self.level,
            threshold=self.agreement_threshold,
            count_own_family=self.count_own_family,
        )

    def scopes(self) -> tuple[str, ...]:
        """What the ledger counts every call of this run under, beside run, day and teacher."""
        named = [f"partition:{self.partition}"] if self.partition else []
        return (*(f"tag:{tag}" for tag in self.tags), *named)

    def limits_nano(self, teachers: Iterable[str]) -> dict[str, int | None]:
        """The ceiling of each scope but the day, by its name in the ledger.

        Raises:
            ConfigError: a limit is for something that no call of this run counts under.
        """
        limits = dict.fromkeys([*(f"teacher:{name}" for name in teachers), *self.scopes()])
        for scope, limit_usd in self.limits_usd.items():
            name = f"partition:{self.partition}" if scope == "partition" else scope
            if name in limits:
                limits[name] = floor_nano(limit_usd)
            elif scope != "day":
                known = ", ".join(["day", "partition", *limits])
                raise ConfigError(
                    f"limit {scope}={limit_usd}: no call of this run counts under {scope!r}, so it "
                    f"would hold nothing back; known are {known}"
                )
        return limits

    def request_options(self) -> RequestOptions:
        """The part that decides the requests."""
        return RequestOptions(
            window=self.window,
            max_completion_tokens=self.max_completion_tokens,
            accepted_terms=frozenset(self.accepted_terms),
        )


async def replay_trace(
    states: Iterable[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    max_total_usd: float = 10.0,
    *,
    ledger: str | Path | None = None,
    max_concurrency: int = 64,
    **options: Any,
) -> list[TeacherAction]:
    """Ask every teacher what it would do at every state, for at most `max_total_usd`.

    Answers that are already in the ledger are returned and not asked again; they count against
    the ceiling. When the ceiling is reached nothing more is sent, and what is there is returned.

    Args:
        states: decision points; those of one session go to a teacher in the order given. A
            sequence is not copied: it may put its states together as they are asked for.
        teachers: models to ask.
        max_total_usd: hard ceiling in US dollars. 0 sends nothing.
        ledger: path or database URL; by default `ledger.sqlite` under the data root.
        max_concurrency: calls in flight at once, all teachers together.
        options: further options of `replay_states`.

    Returns:
        One row per question that was decided, failed ones included, in order of the states.

    Raises:
        ConfigError: a teacher, key, budget or option is wrong; raised before any cost.
        PriceError: a teacher's price is not known; raised before any cost.
        LedgerError: the ledger can't be opened or written.
    """
    report = await replay_states(
        states,
        teachers,
        max_total_usd=max_total_usd,
        ledger=ledger,
        max_concurrency=max_concurrency,
        **options,
    )
    return report.actions


async def replay_states(
    states: Iterable[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    *,
    max_total_usd: float,
    ledger: str | Path | None = None,
    max_concurrency: int = 64,
    on_progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
    **options: Any,
) -> ReplayReport:
    """Replay states like `replay_trace`, and say all that was done, skipped and spent.

    Setting `stop` (from any thread) or cancelling the awaiting task stops sending; calls in
    flight are paid for, so they are awaited and kept. `options` are the fields of `Asking`.
    """
    asking = _asking(max_concurrency=max_concurrency, **options)
    budget = check(teachers, max_total_usd, asking)
    replay = _Replay(
        indexed(states),
        list(teachers),
        budget,
        str(ledger or Settings.load().ledger_url()),
        asking,
    )
    replay.on_progress = on_progress
    replay.stop = stop or threading.Event()
    task = asyncio.create_task(replay.run())
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        replay.stop.set()
        await task
        raise


def replay_trace_sync(
    states: Iterable[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    max_total_usd: float = 10.0,
    **options: Any,
) -> list[TeacherAction]:
    """`replay_trace` for callers without an event loop, and inside a notebook's."""
    return replay_in_thread(states, teachers, max_total_usd=max_total_usd, **options).actions


def replay_in_thread(
    states: Iterable[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    *,
    max_total_usd: float,
    tick: Callable[[Progress], None] | None = None,
    tick_seconds: float = 1.0,
    **options: Any,
) -> ReplayReport:
    """Run `replay_states` in a thread of its own, so that signals can't break it.

    The calling thread waits and calls `tick` with the latest progress. Whatever interrupts it
    (Ctrl-C, Dagster's termination, an error in `tick`) stops the sending, waits until every call
    in flight is answered and booked, and is raised again. Further interrupts change nothing: only
    a kill loses what is in flight.
    """
    stop = options.pop("stop", None) or threading.Event()
    latest = [Progress(stage="replay", n_done=0, cost_usd=0.0)]
    work = replay_states(
        states,
        teachers,
        max_total_usd=max_total_usd,
        stop=stop,
        on_progress=lambda progress: latest.__setitem__(0, progress),
        **options,
    )
    return drained(
        work, stop, tick=(lambda: tick(latest[0])) if tick else None, tick_seconds=tick_seconds
    )


def drained(
    work: Coroutine[Any, Any, ReplayReport],
    stop: threading.Event,
    *,
    tick: Callable[[], None] | None = None,
    tick_seconds: float = 1.0,
) -> ReplayReport:
    """Run `work` in a thread of its own; an interrupt sets `stop` and waits until it has ended."""
    done = threading.Event()
    outcome: list[ReplayReport | BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001 (raised again in the calling thread)
            outcome.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="replay", daemon=True).start()
    try:
        # An event, not `Thread.join`: an interrupted join loses track of the thread.
        while not done.wait(tick_seconds):
            if tick:
                tick()
    except BaseException:
        stop.set()
        _wait_however_often_told(done)
        raise
    result = outcome[0]
    if isinstance(result, BaseException):
        raise result
    if tick:
        tick()
    return result


def _wait_however_often_told(done: threading.Event) -> None:
    """Wait through every further signal: a supervisor and a terminal may send the same one each."""
    while not done.is_set():
        try:
            done.wait()
        except BaseException:  # noqa: BLE001 (the first one is raised again)
            logger.warning("stopping: calls in flight are paid for, so their answers are awaited")


async def estimate(
    states: Iterable[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    *,
    price_folder: Path | None = None,
    ledger: str | Path | None = None,
    **options: Any,
) -> Estimate:
    """What replaying `states` would take, in tokens and dollars per teacher. Costs nothing.

    With `ledger`, answers already in it are left out.

    Raises:
        ConfigError: a teacher or option is wrong.
        PriceError: a teacher's price is not known.
    """
    asking = _asking(price_folder=price_folder, **options)
    check(teachers, 0.0, asking)
    states = indexed(states)
    prices = await fetch_prices(teachers, asking, keys=keys_of(teachers, is_required=False))
    lanes = lanes_of(states, teachers, asking)
    known: set[str] = set()
    if ledger is not None and exists(ledger):
        with Ledger(ledger) as opened:
            known = set(opened.lookup([t.question.sha for _, lane in lanes for t in lane])[0])
    left = [
        (teacher, [task for task in lane if task.question.sha not in known])
        for teacher, lane in lanes
    ]
    return forecast(left, prices, asking.window, gates=asking.gates)


def estimate_sync(
    states: Iterable[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    **options: Any,
) -> Estimate:
    """`estimate` for callers without an event loop."""
    return run_apart(estimate(states, teachers, **options))


def recorded_actions(
    ledger: str | Path,
    states: Iterable[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    **options: Any,
) -> list[TeacherAction]:
    """The answers to these questions that the ledger already holds. No network, no cost."""
    replay = replay_states(states, teachers, max_total_usd=0.0, ledger=ledger, **options)
    return run_apart(replay).actions


def check(teachers: Sequence[TeacherSpec], max_total_usd: float, asking: Asking) -> int:
    """Refuse what can be seen to be wrong before anything is sent; gives back the ceiling.

    Raises:
        ConfigError: says which teacher or option is wrong, and what to do.
    """
    if not teachers:
        raise ConfigError("no teachers: name at least one model to ask")
    names = Counter(teacher.name for teacher in teachers)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigError(f"two teachers are called {twice[0]}: give each its own name")
    if isinstance(max_total_usd, bool) or not 0 <= max_total_usd < math.inf:
        raise ConfigError(f"max_total_usd={max_total_usd}: a number of dollars >= 0 is needed")
    for scope, limit in asking.limits_usd.items():
        if not 0 <= limit < math.inf:
            raise ConfigError(f"limit {scope}={limit}: a number of dollars >= 0 is needed")
    asking.limits_nano(names)
    for name in ("max_concurrency", "max_completion_tokens"):
        if getattr(asking, name) < 1:
            raise ConfigError(f"{name}={getattr(asking, name)}: at least 1 is needed")
    window_messages([], asking.window)
    asking.gating()
    for teacher in teachers:
        accepted = {teacher.model, teacher.name, teacher.vendor} & set(asking.accepted_terms)
        if teacher.is_distillable is False and not accepted:
            raise ConfigError(
                f"teacher {teacher.name}: the terms of {teacher.model} forbid training on its "
                f"answers; leave it out, or accept that with accepted_terms={teacher.model!r}"
            )
    return floor_nano(max_total_usd)


def keys_of(
    teachers: Sequence[TeacherSpec], *, is_required: bool = True
) -> dict[str, SecretStr | None]:
    """The key of each teacher by name.

    Raises:
        ConfigError: a key that is required is not set.
        UntrustedError: a key may not be sent to its teacher's host.
    """
    keys: dict[str, SecretStr | None] = {}
    for teacher in teachers:
        try:
            keys[teacher.name] = key_for(teacher.api_key_env, teacher.base_url)
        except UntrustedError as error:
            raise UntrustedError(f"teacher {teacher.name}: {error}") from error
        except ConfigError as error:
            if is_required:
                raise ConfigError(f"teacher {teacher.name}: {error}") from error
            keys[teacher.name] = None
    return keys


async def fetch_prices(
    teachers: Sequence[TeacherSpec],
    asking: Asking,
    *,
    keys: Mapping[str, SecretStr | None],
) -> dict[str, Price]:
    """The price of each teacher by name: its own, or today's from its endpoint.

    Raises:
        ConfigError: an endpoint does not serve a model, or can't be asked.
        PriceError: a price is not known.
    """
    book = PriceBook(
        folder=asking.price_folder, max_stale=timedelta(days=asking.max_price_age_days)
    )
    listed = [t for t in teachers if t.price is None and dialect_of(t) == "openrouter"]
    async with Client(max_connections=4) as client:
        for teacher in listed:
            url = teacher.base_url
            if not book.fresh(url):
                try:
                    book.remember(url, await client.models(url, keys[teacher.name]))
                except TeacherError as error:
                    if not book.models(url):
                        raise PriceError(f"teacher {teacher.name}: no price: {error}") from error
                    logger.warning("an older price list is used: %s", error)
            _check_served(teacher, book.models(url))
    return {teacher.name: book.price(teacher) for teacher in teachers}


def _check_served(teacher: TeacherSpec, models: list[str]) -> None:
    model = teacher.model
    if model in models or model.rpartition(":")[0] in models:
        return
    close = difflib.get_close_matches(model, models, n=3, cutoff=0.4) or models[:3]
    raise ConfigError(
        f"teacher {teacher.name}: {teacher.base_url} does not serve {model}; "
        f"close to it: {', '.join(close) or 'nothing'}"
    )


def _asking(**options: Any) -> Asking:
    try:
        asking = Asking(**options)
    except TypeError as error:
        raise ConfigError(f"replay: {error}") from error
    return asking


def indexed(states: Iterable[TraceState]) -> Sequence[TraceState]:
    """States that can be asked for again by number; a sequence is taken as it is."""
    return states if isinstance(states, Sequence) else list(states)


def lanes_of(
    states: Sequence[TraceState], teachers: Sequence[TeacherSpec], asking: Asking
) -> list[tuple[TeacherSpec, deque[Task]]]:
    """One lane per session and teacher; states of no session are lanes of their own."""
    builder = RequestBuilder(asking.request_options())
    lanes: dict[tuple[str, str], tuple[TeacherSpec, deque[Task]]] = {}
    for i, state in enumerate(states):
        session = state.get("session_id") or f"\0{i}"
        for j, teacher in enumerate(teachers):
            _, lane = lanes.setdefault((session, teacher.name), (teacher, deque()))
            question = builder.question(state, teacher)
            lane.append(Task(i * len(teachers) + j, states, i, teacher, question))
    return list(lanes.values())


def _errors_first(
    lanes: list[tuple[TeacherSpec, deque[Task]]],
) -> list[tuple[TeacherSpec, deque[Task]]]:
    """Two lanes per session and teacher: its error sites, and after all of those the rest.

    The second lane reads the session's prefix anew, which costs about a quarter more: worth it
    only where there is not enough money for all.
    """
    split = [
        (teacher, deque(task for task in lane if is_error_site(task.state) == wanted))
        for wanted in (True, False)
        for teacher, lane in lanes
    ]
    return [(teacher, lane) for teacher, lane in split if lane]


class _Replay:
    """One run from plan to report."""

    def __init__(
        self,
        states: Sequence[TraceState],
        teachers: list[TeacherSpec],
        budget_nano: int,
        ledger: str,
        asking: Asking,
    ) -> None:
        self.states = states
        self.teachers = teachers
        self.budget_nano = budget_nano
        self.ledger_url = ledger
        self.asking = asking
        self.on_progress: Callable[[Progress], None] | None = None
        self.stop = threading.Event()
        self.gates = asking.gating()
        self.batched: set[str] = set()

    async def run(self) -> ReplayReport:
        lanes = await asyncio.to_thread(lanes_of, self.states, self.teachers, self.asking)
        ledger = await asyncio.to_thread(Ledger, self.ledger_url, is_durable=self.asking.is_durable)
        try:
            return await self._run(lanes, ledger)
        finally:
            await asyncio.to_thread(ledger.close)

    async def _run(
        self, lanes: list[tuple[TeacherSpec, deque[Task]]], ledger: Ledger
    ) -> ReplayReport:
        shas = [task.question.sha for _, lane in lanes for task in lane]
        known, lost = await asyncio.to_thread(ledger.lookup, shas)
        self.batched = await asyncio.wrap_future(ledger.do(batched_requests))
        keys: dict[str, SecretStr | None] = {}
        prices: dict[str, Price] = {}
        if self.budget_nano and any(sha not in known for sha in shas):
            keys = keys_of(self.teachers)
            prices = await fetch_prices(self.teachers, self.asking, keys=keys)
        async with Client(max_connections=self.asking.max_concurrency) as client:
            engine = self._engine(ledger, client, prices, keys)
            self._open_scopes(engine, known, lost)
            engine.board = self._board(lanes, prices)
            open_lanes = self._take_known(engine, lanes, known, lost)
            expected = None
            if prices:
                expected = forecast(open_lanes, prices, self.asking.window, gates=self.asking.gates)
                spent = usd(sum(each.cost_nano for each in known.values()))
                is_short = spent + expected.expected_usd > usd(self.budget_nano)
                if self.gates.is_ordered_by_errors and is_short:
                    open_lanes = _errors_first(open_lanes)
            if self.budget_nano:
                await engine.run(open_lanes)
            else:
                engine.skipped["budget"] += sum(len(lane) for _, lane in open_lanes)
        return self._report(engine, expected)

    def _engine(
        self,
        ledger: Ledger,
        client: Client,
        prices: dict[str, Price],
        keys: dict[str, SecretStr | None],
    ) -> Engine:
        asking = self.asking
        day = asking.limits_usd.get("day")
        return Engine(
            ledger=ledger,
            client=client,
            prices=prices,
            keys=keys,
            options=asking.request_options(),
            max_concurrency=asking.max_concurrency,
            extra_scopes=asking.scopes(),
            daily_limit_nano=None if day is None else floor_nano(day),
            partition=asking.partition,
            retry=asking.retry,
            n_total=len(self.states) * len(self.teachers),
            on_progress=self.on_progress,
            stop=self.stop,
            run_id=asking.run_id or uuid.uuid4().hex[:12],
        )

    def _board(
        self, lanes: list[tuple[TeacherSpec, deque[Task]]], prices: Mapping[str, Price]
    ) -> Board | None:
        """The votes, with teachers in order of what they cost; `None` without gates."""
        if not (self.gates.names and prices):
            return None
        costs = {
            (task.state_id, teacher.name): usd(
                prices[teacher.name].cost_nano(task.question.expected_prompt_tokens, 300)
            )
            for teacher, lane in lanes
            for task in lane
        }
        by_teacher = dict.fromkeys((teacher.name for teacher in self.teachers), 0.0)
        for (_, name), cost in costs.items():
            by_teacher[name] += cost
        teachers = sorted(self.teachers, key=lambda teacher: by_teacher[teacher.name])
        return Board(self.gates, teachers, lambda state_id, name: costs[state_id, name])

    def _open_scopes(
        self, engine: Engine, known: Mapping[str, Known], lost: Mapping[str, list[Lost]]
    ) -> None:
        engine.ledger.open_scopes(
            self.asking.limits_nano(teacher.name for teacher in self.teachers)
        )
        engine.ledger.open_run(
            engine.run_id,
            self.budget_nano,
            carried_nano=sum(
                k.cost_nano
                for k in known.values()
                if self.asking.counts_recorded and k.run_id != engine.run_id
            ),
            lost=[each for calls in lost.values() for each in calls],
        )

    def _take_known(
        self,
        engine: Engine,
        lanes: list[tuple[TeacherSpec, deque[Task]]],
        known: Mapping[str, Known],
        lost: Mapping[str, list[Lost]],
    ) -> list[tuple[TeacherSpec, deque[Task]]]:
        open_lanes = []
        screened = self.gates.screen_states(self.states)
        for teacher, lane in lanes:
            left: deque[Task] = deque()
            for task in lane:
                sha = task.question.sha
                if sha in known:
                    engine.know(task, known[sha])
                elif sha in self.batched:
                    engine.skipped["in_batch"] += 1
                    engine.tell(task, None)
                elif gate := screened.get(task.state_index):
                    engine.skipped[gate] += 1
                    if engine.board:
                        engine.board.saved(gate, task.state_id, teacher)
                    engine.tell(task, None)
                else:
                    task.lost = tuple(lost.get(sha, ()))
                    left.append(task)
            if left:
                open_lanes.append((teacher, left))
        # Calls with an unknown outcome first: learning it frees the money they hold.
        return sorted(open_lanes, key=lambda lane: not any(task.lost for task in lane[1]))

    def _report(self, engine: Engine, expected: Estimate | None) -> ReplayReport:
        actions = _each_paid_once(engine)
        by_teacher = dict.fromkeys((teacher.name for teacher in self.teachers), 0.0)
        for action in actions:
            by_teacher[action.teacher] += action.cost_usd
        return ReplayReport(
            actions=actions,
            n_states=len(self.states),
            n_sent=engine.n_sent,
            n_cached=engine.n_cached,
            spent_usd=round(math.fsum(action.cost_usd for action in actions), 9),
            newly_spent_usd=usd(engine.newly_spent_nano),
            budget_usd=usd(self.budget_nano),
            stop_reason=_stop_reason(engine),
            skipped=dict(engine.skipped),
            cost_by_teacher_usd={name: round(cost, 9) for name, cost in by_teacher.items()},
            forecast_usd=expected.expected_usd if expected else None,
            n_open=sum(_may_pass(action) for action in actions),
            unknown_usd=usd(engine.unknown_nano),
            gates=self.gates.reports(),
            n_overruns=engine.n_overruns,
        )


def _each_paid_once(engine: Engine) -> list[TeacherAction]:
    """The decided rows in order; an answer that serves several states costs at the first."""
    paid: set[str | None] = set()
    actions = []
    for index in sorted(engine.decided):
        action = engine.decided[index]
        actions.append(replace(action, cost_usd=0.0) if action.request_sha in paid else action)
        paid.add(action.request_sha)
    return actions


def _may_pass(action: TeacherAction) -> bool:
    """Whether the next run asks again: nothing came back, and the reason need not last."""
    has_reply = action.finish_reason is not None
    return (
        action.error_code is not None and not has_reply and (action.error_code not in LASTING_CODES)
    )


def _stop_reason(engine: Engine) -> Any:
    if engine.stop.is_set():
        return "stopped"
    return "budget" if engine.skipped["budget"] else "completed"

"""Peers that hang, cancels without end, kills, and the one clock by which a call is over."""

import asyncio
import json
import os
import signal
import sqlite3
import threading
import time
from contextlib import closing
from datetime import UTC, datetime

import anyio
import pytest

from replay_pipeline.replay import ledger_status, replay_states
from replay_pipeline.replay.money.ledger import Ledger, Unbooked
from replay_pipeline.types import RetryPolicy
from tests.replay_pipeline.replay.conftest import QUICK, make_states
from tests.replay_pipeline.replay.test_ledger import answered, call, scopes_of
from tests.replay_pipeline.replay.test_lies import ask
from tests.replay_pipeline.replay.test_odd_replies import completion, raw
from tests.replay_pipeline.replay.test_recovery import PATIENT, leave_open
from tests.support.nursery import until
from tests.support.odd_server import OddServer
from tests.support.teachers import TeacherServer

MODEL = "deepseek/deepseek-v4-pro"


def job(server, ledger, teacher=None, **more):
    teacher = teacher or server.teachers([MODEL])[0]
    return {
        "how": "async", "n": 16, "teacher": teacher.model_dump(), "ledger": str(ledger), "usd": 5,
        "concurrency": 16, "settle_s": 60.0, **more,
    }  # fmt: skip


def answered_first(server, ledger, teacher=None):
    """Let the endpoint introduce itself, so that the next run sends all at once."""
    teacher = teacher or server.teachers([MODEL])[0]
    asyncio.run(
        replay_states(
            make_states(1, prefix="before", words=7), [teacher], max_total_usd=1, ledger=ledger,
            is_durable=False,
        )
    )  # fmt: skip


# --- peers that hang


def test_a_peer_that_sends_a_blank_now_and_then_holds_no_call_for_ever(tmp_path):
    with OddServer(lambda *_: "drip") as server:
        report = ask(server.teacher(timeout_s=0.3), 2, tmp_path / "l")
    assert [row.error_code for row in report.actions] == ["outcome_unknown"] * 2
    assert "(no_reply)" in report.actions[0].error_message
    assert report.unknown_usd > 0


def test_a_peer_that_takes_no_request_was_not_paid(tmp_path, monkeypatch):
    """The body is larger than what the sockets hold, and nobody reads it."""

    class Deaf(OddServer):
        async def _talk(self, reader, writer):
            writer.transport.pause_reading()
            await asyncio.sleep(600)

    [state] = make_states(1)
    text = "word " * 1_500_000
    states = [
        {
            **state,
            "messages": [
                {"role": role, "content": text}
                for role in ("user", "assistant", "user", "assistant", "user")
            ],
        }
    ]
    once = RetryPolicy(max_attempts=1, settle_s=0)
    with Deaf(None) as server:
        teacher = server.teacher(timeout_s=1.0)
        report = ask(teacher, 1, tmp_path / "l", states=states, usd=50, retry=once)
    [row] = report.actions
    assert (row.error_code, report.unknown_usd) == ("unreachable", 0)
    assert "stopped taking the request" in row.error_message


@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_a_stop_ends_a_run_whatever_its_peers_do(tmp_path, how):
    quick = QUICK.model_copy(update={"settle_s": 0.2})
    stop = threading.Event()

    async def run(server):
        task = asyncio.create_task(
            replay_states(
                make_states(3, n_sessions=3), [server.teacher(timeout_s=3600)], max_total_usd=1,
                ledger=tmp_path / "l", retry=quick, stop=stop, is_durable=False,
            )
        )  # fmt: skip
        while len(server.bodies) < 3:  # noqa: ASYNC110 (another thread fills it)
            await asyncio.sleep(0.01)
        if how == "stop":
            stop.set()
            return (await task).stop_reason
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return "stopped"

    with OddServer(lambda *_: "drip") as server:
        assert asyncio.run(run(server)) == "stopped"
    assert ledger_status(tmp_path / "l").calls == {"unknown": 3}


def test_a_stop_ends_the_asking_for_prices(tmp_path):
    stop = threading.Event()
    with OddServer(lambda *_: "drip", lambda _: (stop.set(), "drip")[1]) as server:
        teacher = server.teacher(dialect="openrouter", price=None, timeout_s=3600)
        quick = QUICK.model_copy(update={"settle_s": 0.1})
        with pytest.raises(Exception, match="cannot be reached"):
            ask(teacher, 1, tmp_path / "l", stop=stop, retry=quick)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "number", "code"),
    [
        ("thread", signal.SIGTERM, 143),
        ("thread", signal.SIGINT, 130),
        ("async", signal.SIGINT, 130),
    ],
)
def test_a_signal_ends_the_process_whatever_its_peers_do(tmp_path, children, how, number, code):
    with OddServer(lambda *_: "drip") as server:
        teacher = server.teacher(timeout_s=3600)
        child = children.start(**job(server, tmp_path / "l", teacher, how=how, settle_s=0.3))
        until(lambda: len(server.bodies) == 3)
        os.kill(child, number)
        assert children.wait(child) == code
    assert ledger_status(tmp_path / "l").calls["unknown"] == 3


# --- cancels


def test_any_number_of_cancels_loses_nothing_that_is_paid(tmp_path):
    async def run(teacher):
        states = make_states(40, n_sessions=40)
        task = asyncio.create_task(
            replay_states(states, [teacher], max_total_usd=5, ledger=tmp_path / "l",
                          max_concurrency=16, retry=PATIENT, is_durable=False)
        )  # fmt: skip
        while server.bill().n_requests < 17:  # noqa: ASYNC110 (another process counts)
            await asyncio.sleep(0.01)
        for _ in range(20):
            task.cancel()
            await asyncio.sleep(0.005)
        with pytest.raises(asyncio.CancelledError):
            await task

    with TeacherServer(script={"content": "yes"}, latency=0.4) as server:
        [teacher] = server.teachers([MODEL])
        answered_first(server, tmp_path / "l")
        asyncio.run(run(teacher))
        bill = server.bill()
    status = ledger_status(tmp_path / "l")
    assert status.calls == {"answered": bill.n_charged}
    assert bill.n_charged >= 17
    assert round(status.spent_usd * 1e9) == bill.total_nano


def test_a_scope_that_cancels_again_and_again_loses_nothing_that_is_paid(tmp_path):
    async def run(teacher):
        with anyio.move_on_after(0.5) as scope:
            await replay_states(
                make_states(8, n_sessions=8), [teacher], max_total_usd=5, ledger=tmp_path / "l",
                max_concurrency=8, retry=PATIENT, is_durable=False,
            )  # fmt: skip
        return scope.cancelled_caught

    with TeacherServer(script={"content": "yes"}, latency=2.0) as server:
        [teacher] = server.teachers([MODEL])
        assert anyio.run(run, teacher)
        bill = server.bill()
    assert ledger_status(tmp_path / "l").calls.get("answered", 0) == bill.n_charged


@pytest.mark.slow
@pytest.mark.parametrize("n_signals", [2, 3])
def test_a_second_interrupt_loses_nothing_that_is_paid(tmp_path, children, n_signals):
    """`asyncio.run` takes the first for a cancellation, and tears its loop down at the second."""
    with TeacherServer(script={"content": "yes"}, latency=2.0) as server:
        child = children.start(**job(server, tmp_path / "l", n=3))
        until(lambda: server.bill().n_requests == 3)
        for _ in range(n_signals):
            os.kill(child, signal.SIGINT)
            time.sleep(0.2)
        assert children.wait(child) in (130, 1)
        bill = server.bill()
    status = ledger_status(tmp_path / "l")
    assert status.calls == {"answered": bill.n_charged} == {"answered": 3}


# --- when a call is over


def intervals(seen):
    """How long after the last time the same body came again, for each that did."""
    last, found = {}, []
    for body, at in seen:
        if body in last:
            found.append(at - last[body])
        last[body] = at
    return found


@pytest.mark.slow
def test_a_call_counts_as_running_from_its_last_byte_not_from_its_reservation(tmp_path, children):
    """It was refused first, and sent long after its money was reserved; then its process died."""
    seen, refused = [], set()

    def reply(_, body):
        if body not in refused:
            refused.add(body)
            return 429, {"retry-after": "2.5"}, b"{}"
        seen.append((body, time.monotonic()))
        return "stall"

    with OddServer(reply) as server:
        teacher = server.teacher(timeout_s=4.0)
        plan = job(server, tmp_path / "l", teacher, n=2, settle_s=20.0)
        child = children.start(**plan)
        until(lambda: len(seen) == 2)
        children.kill(child)
        server.reply = lambda _, body: (seen.append((body, time.monotonic())),
                                        (200, {}, raw(completion())))[1]  # fmt: skip
        assert children.run(**plan) == 0
    again = intervals(seen)
    assert len(again) == 2
    assert min(again) >= 4.0, "asked again while the first may still have been running"


def test_a_call_that_waits_for_its_turn_says_when_it_leaves(tmp_path):
    """Twelve are reserved at once, and leave one after the other."""
    due = []

    def reply(*_):
        with closing(sqlite3.connect(tmp_path / "l")) as database:
            due.append(database.execute("select max(due_at) from calls").fetchone()[0])
        return later()

    async def later():
        await asyncio.sleep(0.3)
        return 200, {}, raw(completion())

    with OddServer(reply) as server:
        teacher = server.teacher(timeout_s=1.0, max_concurrency=3)
        ask(teacher, 12, tmp_path / "l")
        sent = [datetime.fromisoformat(each) for each in due]
    assert sent[-1] > sent[0], "the ledger was told"


@pytest.mark.slow
def test_a_changed_price_is_another_request_and_no_free_answer(tmp_path, children):
    """Prices are part of the body: the router does not know its answer by another one."""
    ledger = tmp_path / "l"
    with TeacherServer(script={"content": "yes"}, latency=1.0) as server:
        [teacher] = server.teachers([MODEL])
        dear = {"prompt": 5e-6, "completion": 9e-6}
        teacher = teacher.model_copy(update={"timeout_s": 1.5, "price": dear})
        plan = job(server, ledger, teacher, n=8, settle_s=20.0)
        answered_first(server, ledger, teacher)
        child = children.start(**plan)
        until(lambda: server.bill().n_requests >= 9)
        children.kill(child)
        n_lost = ledger_status(ledger).calls["open"]
        cheaper = teacher.model_copy(update={"price": {"prompt": 4e-6, "completion": 8e-6}})
        assert children.run(**job(server, ledger, cheaper, n=8, settle_s=20.0)) == 0
        bill = server.bill()
    status = ledger_status(ledger)
    assert n_lost > 0
    assert (bill.n_charged, bill.n_replayed) == (9 + n_lost, 0)
    assert bill.total_nano <= round(status.spent_usd * 1e9), "what was paid twice is booked twice"
    assert status.calls["answered"] == 9
    assert status.unknown_usd == 0


@pytest.mark.slow
def test_the_same_request_again_is_free_after_a_kill(tmp_path, children):
    ledger = tmp_path / "l"
    with TeacherServer(script={"content": "yes"}, latency=0.5) as server:
        [teacher] = server.teachers([MODEL])
        teacher = teacher.model_copy(update={"timeout_s": 1.5})
        answered_first(server, ledger, teacher)
        plan = job(server, ledger, teacher, n=8, settle_s=20.0)
        child = children.start(**plan)
        until(lambda: server.bill().n_requests >= 9)
        children.kill(child)
        assert children.run(**plan) == 0
        bill = server.bill()
    assert (bill.n_charged, bill.n_duplicates) == (9, 0)
    assert bill.n_replayed > 0
    assert bill.total_nano == round(ledger_status(ledger).spent_usd * 1e9)


@pytest.mark.slow
def test_after_a_kill_it_is_said_when_the_next_run_goes_on(tmp_path, children):
    with OddServer(lambda *_: "stall") as server:
        teacher = server.teacher(timeout_s=600.0)
        plan = job(server, tmp_path / "l", teacher, n=3, usd=0.05)
        before = datetime.now(UTC)
        child = children.start(**plan)
        until(lambda: len(server.bodies) == 3)
        children.kill(child)
        limited = {"limits_usd": {"day": 0.031}, "usd": 0.05}
        report = ask(teacher, 10, tmp_path / "l", **limited)
        assert len(server.bodies) == 3
    assert (report.n_sent, report.stop_reason) == (0, "budget")
    status = ledger_status(tmp_path / "l")
    until_when = datetime.fromisoformat(status.held_until)
    assert 599 < (until_when - before).total_seconds() < 720
    assert abs((datetime.fromisoformat(report.held_until) - until_when).total_seconds()) <= 1
    assert report.unknown_usd == status.unknown_usd > 0


def test_two_runs_at_once_on_one_ledger_each_report_their_own_dollars(tmp_path, children):
    with TeacherServer(script={"content": "yes " * 50}, latency=0.2) as server:
        common = {"n": 90, "usd": 0.05, "concurrency": 4}
        # Whoever is first sends what both ask for; each has 30 states of its own.
        plans = [
            job(server, tmp_path / "l", **common, told=str(tmp_path / name), without=without)
            for name, without in (("one", (60, 90)), ("other", (30, 60)))
        ]
        started = [children.start(**plan) for plan in plans]
        assert [children.wait(child) for child in started] == [0, 0]
        bill = server.bill()
    told = [json.loads((tmp_path / name).read_text()) for name in ("one", "other")]
    assert all(0 < usd <= 0.05 and n >= 30 for usd, n in told), told
    assert sum(usd for usd, _ in told) == pytest.approx(bill.total_nano / 1e9)
    assert sum(n for _, n in told) == bill.n_charged == 90


# --- side files, and runs whose names begin alike


def keep_paid(ledger, n=6):
    """Answers in side files of a ledger, whose processes died."""
    for owner in (90, 91):
        with Ledger(ledger, is_durable=False) as opened:
            opened.open_scopes(["day:x"], {})
            calls = [call(f"q{owner}-{i}", 50, run_id="r") for i in range(n)]
            pairs = [
                (each, answered(opened.reserve(each).result(timeout=60), 30)) for each in calls
            ]
        Unbooked(str(ledger), owner, "me").keep(pairs)


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(3))
def test_processes_that_open_a_ledger_at_once_book_its_side_files_once(tmp_path, children, round_):
    ledger = tmp_path / "l"
    keep_paid(ledger)
    jobs = [children.start(how="open", ledger=str(ledger)) for _ in range(6)]
    assert [children.wait(pid) for pid in jobs] == [0] * 6, round_
    assert scopes_of(ledger) == {"day:x": [12 * 30, 0, 0, 0]}
    assert ledger_status(ledger).calls == {"answered": 12}
    assert list(tmp_path.glob("*unbooked*")) == []


@pytest.mark.parametrize("dead", ["n10", "xrun:n1", "n1%", "N1"])
def test_lost_calls_of_a_run_are_not_taken_for_those_of_one_whose_name_begins_alike(tmp_path, dead):
    lost = call("a", 60, run_id=dead, scopes=("day:x", f"run:{dead}"))
    leave_open(tmp_path / "l", lost)
    with Ledger(tmp_path / "l", is_durable=False) as ledger:
        [found] = ledger.lookup(["a"]).lost["a"]
        for _ in range(2):  # once, however often the run is opened
            ledger.open_run("n1", 100, lost=[found])
        assert ledger.held_by_lost("run:n1")[0] == 60
        [[scopes]] = ledger.do(lambda d: d.query("select scopes from calls")).result()
        assert scopes.split("\n") == ["day:x", f"run:{dead}", "run:n1"]

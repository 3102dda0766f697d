"""A real process is killed with SIGKILL again and again, and started again on the same ledger."""

import random
import sqlite3
import time

import pytest

from replay_pipeline.replay import estimate, ledger_status, replay_trace_sync
from tests.replay_pipeline.replay.conftest import make_states
from tests.support.looking import TOOLS, answer_looks, looking
from tests.support.nursery import until
from tests.support.teachers import TeacherServer

CONCURRENCY = 16
N_KILLS = 20
DURABLE = {"how": "async", "is_durable": True}


def n_rows(ledger, state):
    with sqlite3.connect(ledger) as database:
        [(n,)] = database.execute("select count(*) from calls where state = ?", (state,)).fetchall()
    database.close()
    return n


@pytest.mark.slow
def test_killed_twenty_times_nothing_is_lost_and_nothing_is_paid_twice(tmp_path, children):
    chance = random.Random(7)
    n = 600
    ledger = tmp_path / "ledger.sqlite"
    faults = [{"kind": "status", "status": 429, "probability": 0.02, "retry_after_s": 0.01}]
    with TeacherServer(
        script={"content": "yes"}, latency={"median_s": 0.06, "p95_s": 0.12}, faults=faults
    ) as server:
        [teacher] = server.teachers(["deepseek/deepseek-v4-pro"])
        teacher = teacher.model_copy(update={"max_concurrency": CONCURRENCY, "timeout_s": 20.0})
        job = {"n": n, "teacher": teacher.model_dump(), "ledger": str(ledger),
               "concurrency": CONCURRENCY, "usd": 50, "settle_s": 2.0, **DURABLE}  # fmt: skip
        n_kills = n_answered = n_killed_in_flight = 0
        while True:
            child = children.start(**job)
            if n_kills < N_KILLS:
                # A moment that depends on what was sent, not on how fast this machine is.
                enough = server.bill().n_requests + chance.randint(5, 25)
                until(lambda enough=enough: server.bill().n_requests >= enough)
                children.kill(child)
                n_kills += 1
            else:
                assert children.wait(child) == 0
            now_answered = n_rows(ledger, "answered")
            assert now_answered >= n_answered
            n_answered = now_answered
            n_killed_in_flight += n_rows(ledger, "open")
            if n_kills == N_KILLS and n_answered == n:
                break
        bill = server.bill()
        states = make_states(n, n_sessions=n)
        actions = replay_trace_sync(states, [teacher], 0, ledger=ledger)
    status = ledger_status(ledger)
    assert n_killed_in_flight > N_KILLS * 10
    assert len(actions) == n
    assert all(action.error_code is None for action in actions)
    assert bill.n_duplicates == 0
    assert bill.n_charged == n
    assert bill.total_nano == round(status.spent_usd * 1e9)
    # Only calls in flight were sent again; each was free, from the response cache, or the first.
    n_sent = sum(status.calls.values())
    assert n_sent - n <= n_killed_in_flight
    assert bill.n_requests - bill.faults.get("status", 0) <= n_sent
    assert status.calls["answered"] == n


def run_once(children, job, *, kill_after=None, bill=None):
    """One run, killed once the server has had some more requests, unless it ends before."""
    child = children.start(**job)
    if kill_after is None:
        children.wait(child)
        return False
    enough = bill().n_requests + kill_after
    until(lambda: children.has_ended(child) or bill().n_requests >= enough)
    was_killed = not children.has_ended(child)
    children.kill(child)
    return was_killed


@pytest.mark.slow
@pytest.mark.parametrize(("settle_s", "n_reservations"), [(2.0, 2), (0.05, 3)])
def test_kills_do_not_hold_the_money_of_a_small_ceiling_for_ever(
    tmp_path, children, settle_s, n_reservations
):
    """A ceiling worth a few reservations, of which kills would have held each for ever.

    With the shorter `settle_s` a run ends before the calls that it lost can be over.
    """
    chance = random.Random(settle_s)
    with TeacherServer(script={"content": "yes " * 200}, latency=0.15) as server:
        [teacher] = server.teachers(["deepseek/deepseek-v4-pro"])
        teacher = teacher.model_copy(
            update={"timeout_s": 1.0, "params": {"max_completion_tokens": 1000}}
        )
        [state] = make_states(1, prefix="first")
        reserved_usd = estimate([state], [teacher]).bound_usd
        [row] = replay_trace_sync([state], [teacher], 1, ledger=tmp_path / "first")
        ceiling_usd = n_reservations * reserved_usd
        n_payable = int((ceiling_usd - reserved_usd) / row.cost_usd) + 1
        before = server.bill()
        n = n_payable + 10
        ledger = tmp_path / "ledger.sqlite"
        job = {"n": n, "teacher": teacher.model_dump(), "ledger": str(ledger), "usd": ceiling_usd,
               "concurrency": 8, "settle_s": settle_s, **DURABLE}  # fmt: skip
        was_killed = [
            run_once(children, job, kill_after=chance.randint(1, 6), bill=server.bill)
            for _ in range(3)
        ]
        states = make_states(n, n_sessions=n)
        for _ in range(4):
            run_once(children, job)
            time.sleep(teacher.timeout_s)  # what a run left may be over for the next
        actions = replay_trace_sync(states, [teacher], 0, ledger=ledger)
        bill, status = server.bill(), ledger_status(ledger)
    n_charged = bill.n_charged - before.n_charged
    spent_nano = bill.total_nano - before.total_nano
    assert spent_nano <= ceiling_usd * 1e9
    assert bill.n_duplicates == 0
    assert len([action for action in actions if action.error_code is None]) == n_charged
    assert n_charged >= 0.95 * n_payable
    assert round(status.spent_usd * 1e9) == spent_nano
    assert (status.held_usd, status.unknown_usd) == (0, 0)
    assert was_killed[0]  # a later run may end by itself: what the first held is still held


@pytest.mark.slow
def test_kills_within_continuations_pay_no_step_twice_and_nothing_over_the_ceiling(
    tmp_path, children
):
    """Four ledgers, killed four times each while teachers look up to three times before they act."""
    chance = random.Random(67)
    model, n, n_kills = "deepseek/deepseek-v4-pro", 40, 0
    states = [{**state, "tools": TOOLS} for state in make_states(n, n_sessions=n)]
    n_looks = {state["state_id"]: number % 4 for number, state in enumerate(states)}
    for place, (ceiling_usd, share) in enumerate(((0.02, 9), (1.0, 9), (0.02, 9), (20.0, 0.3))):
        ledger = tmp_path / f"{place}.sqlite"
        dear = (
            {model: (30.0, 60.0)} if share < 1 else None
        )  # of so few first steps, cheap looks have no share
        with TeacherServer(looking(n_looks, model, n_looks), latency=0.03, prices=dear) as server:
            [teacher] = server.teachers([model])
            teacher = teacher.model_copy(update={"timeout_s": 1.0})
            job = {"n": n, "teacher": teacher.model_dump(), "ledger": str(ledger),
                   "usd": ceiling_usd, "concurrency": 8, "settle_s": 2.0, "looks": share,
                   **DURABLE}  # fmt: skip
            for _ in range(4):
                kill_after = chance.randint(2, 12)
                n_kills += run_once(children, job, kill_after=kill_after, bill=server.bill)
            for _ in range(3):
                run_once(children, job)
            looks = {"looks": answer_looks, "looks_share": share}
            actions = replay_trace_sync(states, [teacher], 0, ledger=ledger, **looks)
            bill = server.bill()
        status = ledger_status(ledger)
        assert bill.total_nano <= ceiling_usd * 1e9
        assert bill.n_duplicates == 0
        assert round(status.spent_usd * 1e9) == bill.total_nano
        ended = [action for action in actions if action.error_code is None]
        assert all(len(action.looks) == n_looks[action.state_id] for action in ended)
        if share < 1:
            first_usd = sum((a.looks[0] if a.looks else a).cost_usd for a in actions)
            assert bill.total_nano <= (1 + share) * first_usd * 1e9
            assert {a.error_code for a in actions} == {None, "still_looking"}
            assert len(actions) == n
        elif ceiling_usd == 1.0:
            assert len(ended) == n
            assert bill.n_charged == n + sum(n_looks.values())
        else:
            assert 0 < len(ended) < n
            assert {a.error_code for a in actions} <= {None, "unfinished"}
    assert n_kills >= 12

"""The ledger under random interleavings, threads, processes and crashes."""

import random
import re
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_pipeline.errors import ConfigError, LedgerError, MissingDependencyError
from replay_pipeline.replay import counted_usd, ledger_status, spent_since
from replay_pipeline.replay.money import database as databases
from replay_pipeline.replay.money.calls import (
    InDoubt,
    Known,
    LedgerEntries,
    LostCall,
    NewCall,
    Refused,
    Reserved,
    Settlement,
)
from replay_pipeline.replay.money.database import SCHEMA_VERSION, connect, exists
from replay_pipeline.replay.money.ledger import Ledger, Scopes, Unbooked
from tests.support.told import told_by

ROOT = Path(__file__).parents[3]


def call(sha, amount, *, scopes=("day:x",), run_id="r", **more):
    return NewCall(
        request_sha=str(sha), state_id=str(sha), teacher="t", model="m", run_id=run_id,
        scopes=scopes, reserved_nano=amount, **more,
    )  # fmt: skip


def answered(reserved, cost, **more):
    return Settlement(
        call_id=reserved.call_id, state="answered", cost_nano=cost, row=b"null", **more
    )


def scopes_of(path):
    with sqlite3.connect(path) as database:
        rows = database.execute("select name, spent, held, unknown, overrun from scopes").fetchall()
    database.close()
    return {name: numbers for name, *numbers in rows}


class Watched(Ledger):
    """Checks the limits inside every single transaction, before it is committed."""

    limits: ClassVar[dict[str, int]] = {}

    def _reserve_all(self, scopes, *rest):
        super()._reserve_all(scopes, *rest)
        for name, scope in scopes.known.items():
            used = scope.spent + scope.held + scope.unknown - scope.overrun
            assert used <= self.limits[name]


def split(waiting):
    """Part the calls that are reserved by now from those that wait; each future is asked once.

    Asked twice, one that is decided in between would be in neither part, and hold its money.
    """
    by_done = {is_done: [] for is_done in (True, False)}
    for future in waiting:
        by_done[future.done()].append(future)
    results = [future.result() for future in by_done[True]]
    return [result for result in results if isinstance(result, Reserved)], by_done[False]


def trial(ledger, seed):
    """One random run: reservations, settlements and failures in any order."""
    chance = random.Random(seed)
    day, teacher = f"day:{seed}", f"teacher:{seed}"
    limits = {day: chance.randrange(0, 3000), teacher: chance.randrange(0, 3000)}
    ledger.limits.update(limits)
    ledger.open_scopes((), limits)
    overrun_share = chance.choice([0.0, 0.0, 0.3])
    open_calls, waiting, truth = [], [], 0
    for n in range(chance.randrange(5, 60)):
        if chance.random() < 0.6:
            scopes = chance.choice([(day,), (day, teacher), (teacher,)])
            amount = chance.randrange(1, 400)
            waiting.append(ledger.reserve(call(f"{seed}-{n}", amount, scopes=scopes)))
        ready, waiting = split(waiting)
        open_calls += ready
        if open_calls and chance.random() < 0.5:
            reserved = open_calls.pop(chance.randrange(len(open_calls)))
            most = reserved.reserved_nano * (2 if chance.random() < overrun_share else 1)
            cost = chance.randrange(0, most + 1)
            truth += cost
            ledger.settle(answered(reserved, cost))
    while open_calls or waiting:
        for reserved in open_calls:
            truth += reserved.reserved_nano // 2
            ledger.settle(answered(reserved, reserved.reserved_nano // 2))
        assert wait(waiting, timeout=60, return_when=FIRST_COMPLETED).done or not waiting
        open_calls, waiting = split(waiting)
    return truth


def check_trials(path, seeds):
    with Watched(path, is_durable=False) as ledger:
        truths = {seed: trial(ledger, seed) for seed in seeds}
        limits = ledger.limits
    with sqlite3.connect(path) as database:
        rows = database.execute(
            "select substr(request_sha, 1, instr(request_sha, '-') - 1), sum(cost) from calls group by 1"
        )
        booked = {int(seed): cost for seed, cost in rows}
    database.close()
    assert {seed: booked.get(seed, 0) for seed in seeds} == truths
    for name, (spent, held, unknown, overrun) in scopes_of(path).items():
        assert (held, unknown) == (0, 0)
        assert spent - overrun <= limits[name]


@pytest.mark.slow
def test_no_limit_is_passed_in_a_thousand_random_interleavings(tmp_path):
    check_trials(tmp_path / "l", range(1000))


def test_no_limit_is_passed_in_some_random_interleavings(tmp_path):
    check_trials(tmp_path / "l", range(1000, 1030))


@settings(max_examples=25, deadline=None)
@given(amounts=st.lists(st.integers(1, 50), min_size=1, max_size=40), limit=st.integers(0, 600))
def test_a_limit_is_used_up_while_work_remains(tmp_path_factory, amounts, limit):
    path = tmp_path_factory.mktemp("ledger") / "l"
    with Ledger(path, is_durable=False) as ledger:
        ledger.open_scopes((), {"day:x": limit})
        futures = [ledger.reserve(call(i, amount)) for i, amount in enumerate(amounts)]
        refused = 0
        for future in futures:
            result = future.result(timeout=60)
            if isinstance(result, Reserved):
                ledger.settle(answered(result, result.reserved_nano)).result()
            else:
                refused += 1
    spent = scopes_of(path)["day:x"][0]
    assert spent <= limit
    assert refused == 0 or spent > limit - 50


def test_reservations_wait_in_order_and_are_refused_only_when_they_can_never_fit(tmp_path):
    with Ledger(tmp_path / "l", is_durable=False) as ledger:
        ledger.open_scopes((), {"day:x": 100})
        first = ledger.reserve(call(1, 80)).result(timeout=60)
        second = ledger.reserve(call(2, 60))
        third = ledger.reserve(call(3, 10))
        never = ledger.reserve(call(4, 101)).result(timeout=60)
        assert never == Refused(scope="day:x")
        assert not second.done()
        assert not third.done()  # first come, first served: a small call does not overtake
        ledger.settle(answered(first, 20)).result(timeout=60)
        assert isinstance(second.result(timeout=60), Reserved)
        assert isinstance(third.result(timeout=60), Reserved)
        ledger.settle(answered(second.result(), 60))
        ledger.settle(answered(third.result(), 10)).result(timeout=60)
        assert ledger.reserve(call(5, 11)).result(timeout=60) == Refused(scope="day:x")


def test_the_same_request_in_flight_is_waited_for_and_then_known(tmp_path):
    with Ledger(tmp_path / "l", is_durable=False) as one, Ledger(tmp_path / "l") as other:
        one.open_scopes((), {"day:x": 100})
        first = one.reserve(call("same", 10)).result(timeout=60)
        twin = one.reserve(call("same", 10))
        elsewhere = other.reserve(call("same", 10))
        assert not twin.done()
        one.settle(answered(first, 7)).result(timeout=60)
        for future in (twin, elsewhere):
            known = future.result(timeout=60)
            assert isinstance(known, Known)
            assert known.cost_nano == 7
    assert scopes_of(tmp_path / "l")["day:x"] == [7, 0, 0, 0]


def test_the_database_itself_refuses_to_pass_a_limit(tmp_path):
    with Ledger(tmp_path / "l", is_durable=False) as ledger:
        ledger.open_scopes((), {"day:x": 100})
    database = connect(tmp_path / "l")
    with pytest.raises(LedgerError, match="refused a booking"):
        database.query("update scopes set held = held + 101 where name = 'day:x'")
    database.close()


def test_a_limit_can_be_lowered_below_what_is_spent_and_then_nothing_more_fits(tmp_path):
    with Ledger(tmp_path / "l", is_durable=False) as ledger:
        ledger.open_scopes((), {"day:x": 100})
        reserved = ledger.reserve(call(1, 60)).result(timeout=60)
        ledger.open_scopes((), {"day:x": 10})
        ledger.settle(answered(reserved, 50)).result(timeout=60)
        assert ledger.reserve(call(2, 1)).result(timeout=60) == Refused(scope="day:x")
        ledger.open_scopes((), {"day:x": 52})
        assert isinstance(ledger.reserve(call(3, 2)).result(timeout=60), Reserved)


# --- what is on disk


def rows_of(path, table, order="1"):
    with closing(sqlite3.connect(path)) as database:
        database.row_factory = sqlite3.Row
        found = database.execute(f"select * from {table} order by {order}").fetchall()
    return [dict(row) for row in found]


def change(path, sql, *parameters):
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(sql, parameters)


def quick(path, limits=(("day:x", 100),)):
    ledger = Ledger(path, is_durable=False)
    ledger.open_scopes((), dict(limits))
    return ledger


def held(ledger, *arguments, **more):
    reserved = ledger.reserve(call(*arguments, **more)).result(timeout=60)
    assert isinstance(reserved, Reserved)
    return reserved


def moment(text):
    """A moment as it is written: in UTC, to the millisecond."""
    assert re.fullmatch(r"[-0-9]{10}T[:0-9]{8}\.[0-9]{3}\+00:00", text)
    return datetime.fromisoformat(text)


OWNED = 1 << 32
"""The first owner of a ledger numbers its calls from here."""


def test_a_call_is_written_down_before_it_leaves_and_in_full_when_it_is_settled(tmp_path):
    path = tmp_path / "l"
    start = datetime.now(UTC) - timedelta(milliseconds=1)
    both = ("day:x", "tag:y")
    with quick(path, [("day:x", 100), ("tag:y", None)]) as ledger:
        new = NewCall(
            request_sha="sha", state_id="s", teacher="t", model="m", run_id="r", scopes=both,
            reserved_nano=30, timeout_s=90.0, partition="p",
        )  # fmt: skip
        reserved = ledger.reserve(new).result(timeout=60)
        assert (reserved.call_id, reserved.reserved_nano) == (OWNED + 1, 30)
        [written] = rows_of(path, "calls")
        settlement = Settlement(
            call_id=reserved.call_id, state="failed", cost_nano=31, n_attempts=3, is_lasting=True,
            error_code="odd", row=b"row", response=b"response", generation_id="gen",
        )  # fmt: skip
        ledger.settle(settlement).result(timeout=60)
        exact = held(ledger, "exact", 20, scopes=("day:x",))
        assert exact.call_id == OWNED + 2
        ledger.settle(answered(exact, 20)).result(timeout=60)
    intent_at, sent_at = moment(written.pop("intent_at")), moment(written.pop("sent_at"))
    assert start <= intent_at <= datetime.now(UTC)
    assert sent_at - intent_at == timedelta(seconds=5), "it leaves within the slack, or says so"
    assert moment(written.pop("due_at")) - sent_at == timedelta(seconds=90)
    assert written.pop("settled_at") is None
    assert written == {
        "id": OWNED + 1, "request_sha": "sha", "state_id": "s", "teacher": "t", "model": "m",
        "run_id": "r", "trace_batch": "p", "scopes": "day:x\ntag:y", "owner": 1, "state": "open",
        "reserved": 30, "cost": 0, "n_attempts": 0, "is_lasting": 0, "is_overrun": 0,
        "error_code": None, "generation_id": None, "row": None, "response": None,
        "body_sha": None, "disputed": None,
    }  # fmt: skip
    settled, other = rows_of(path, "calls")
    assert intent_at <= moment(settled.pop("settled_at")) <= datetime.now(UTC)
    outcome = {
        "state": "failed", "cost": 31, "n_attempts": 3, "is_lasting": 1, "is_overrun": 1,
        "error_code": "odd", "generation_id": "gen", "row": b"row", "response": b"response",
    }  # fmt: skip
    assert {name: settled[name] for name in written} == written | outcome
    assert (other["cost"], other["is_overrun"], other["is_lasting"]) == (20, 0, 0)
    assert scopes_of(path) == {"day:x": [51, 0, 0, 1], "tag:y": [31, 0, 0, 1]}
    assert ledger_status(path).errors == {"odd": 1}
    [owner] = rows_of(path, "owners")
    assert start <= moment(owner.pop("opened_at")) <= datetime.now(UTC)
    assert owner == {"id": 1, "host": socket.gethostname()}


def test_a_call_that_was_not_sent_is_forgotten_and_its_money_is_free_again(tmp_path):
    with quick(tmp_path / "l") as ledger:
        reserved = held(ledger, "a", 100)
        waiting = ledger.reserve(call("b", 100))
        ledger.settle(Settlement(call_id=reserved.call_id, state="withdrawn")).result(timeout=60)
        again = waiting.result(timeout=60)
        assert (again.call_id, again.reserved_nano) == (OWNED + 2, 100)
        assert [row["request_sha"] for row in rows_of(tmp_path / "l", "calls")] == ["b"]
        assert scopes_of(tmp_path / "l")["day:x"] == [0, 100, 0, 0]


def test_a_call_without_a_known_outcome_counts_in_full_until_there_is_one(tmp_path):
    path = tmp_path / "l"
    with quick(path) as ledger:
        reserved = held(ledger, "a", 30)
        lost = Settlement(
            call_id=reserved.call_id, state="unknown", error_code="no_reply", generation_id="gen"
        )
        ledger.settle(lost).result(timeout=60)
        assert scopes_of(path)["day:x"] == [0, 0, 30, 0]
        assert ledger.held_by_lost("day:x")[0] == 30
        [row] = rows_of(path, "calls")
        assert (row["state"], row["error_code"], row["generation_id"]) == (
            "unknown",
            "no_reply",
            "gen",
        )
        ledger.settle(answered(reserved, 35)).result(timeout=60)
        assert scopes_of(path)["day:x"] == [35, 0, 0, 5]
        # Another process has found it out too: that is one answer, and is booked once.
        ledger.settle(answered(reserved, 35)).result(timeout=60)
        assert scopes_of(path)["day:x"] == [35, 0, 0, 5]


def test_a_call_that_is_lost_twice_is_cleared_by_one_answer(tmp_path):
    path = tmp_path / "l"
    with quick(path) as ledger:
        first = held(ledger, "a", 10)
        ledger.settle(Settlement(call_id=first.call_id, state="unknown")).result(timeout=60)
        second = held(ledger, "a", 20, lost=(first.call_id,))
        ledger.settle(Settlement(call_id=second.call_id, state="unknown")).result(timeout=60)
        told = ledger.reserve(call("a", 30, lost=(first.call_id,))).result(timeout=60)
        assert isinstance(told, InDoubt)
        assert [each.call_id for each in told.lost] == [first.call_id, second.call_id]
        both = (first.call_id, second.call_id)
        third = held(ledger, "a", 30, lost=both)
        assert scopes_of(path)["day:x"] == [0, 30, 30, 0]
        start = datetime.now(UTC) - timedelta(milliseconds=1)
        ledger.settle(answered(third, 5, recovers=both)).result(timeout=60)
        ledger.settle(answered(held(ledger, "b", 1), 1, recovers=both)).result(timeout=60)
    assert scopes_of(path)["day:x"] == [6, 0, 0, 0]
    for row in rows_of(path, "calls")[:2]:
        assert start <= moment(row["settled_at"]) <= datetime.now(UTC)
        assert (row["state"], row["cost"], row["n_attempts"]) == ("recovered", 0, 1)
        assert (row["is_lasting"], row["is_overrun"]) == (0, 0)


def settled_at_once(ledger, *settlements):
    """Have the ledger book all of them in one transaction."""
    is_ready = threading.Event()
    ledger.do(lambda _: is_ready.wait(60))
    futures = [ledger.settle(each) for each in settlements]
    is_ready.set()
    return [future.result(timeout=60) for future in futures]


@pytest.mark.parametrize("how", ["one after the other", "at once"])
def test_a_call_is_booked_once_however_often_it_is_settled(tmp_path, how):
    path = tmp_path / "l"
    with quick(path) as ledger:
        reserved, other = held(ledger, "a", 30), held(ledger, "b", 1)
        lost = Settlement(call_id=reserved.call_id, state="unknown")
        told = [lost, answered(reserved, 5), answered(reserved, 5), lost, answered(other, 1)]
        for group in [told] if how == "at once" else [[one] for one in told]:
            settled_at_once(ledger, *group)
        assert scopes_of(path)["day:x"] == [6, 0, 0, 0]
    assert [(row["state"], row["cost"]) for row in rows_of(path, "calls")] == [
        ("answered", 5), ("answered", 1),
    ]  # fmt: skip


def test_a_lost_call_that_two_answers_clear_at_once_is_released_once(tmp_path):
    path = tmp_path / "l"
    with quick(path) as ledger:
        first = held(ledger, "a", 10)
        ledger.settle(Settlement(call_id=first.call_id, state="unknown")).result(timeout=60)
        lost = (first.call_id,)
        answers = [held(ledger, "a", 20, lost=lost), held(ledger, "b", 20)]
        settled_at_once(ledger, *(answered(one, 5, recovers=lost) for one in answers))
        assert scopes_of(path)["day:x"] == [10, 0, 0, 0]


def test_what_was_taken_over_is_written_down_as_recovered(tmp_path):
    path = tmp_path / "l"
    with quick(path, [("day:x", 100), ("tag:y", None)]) as ledger:
        both = ("day:x", "tag:y")
        first = held(ledger, "a", 60, scopes=both)
        ledger.settle(Settlement(call_id=first.call_id, state="unknown")).result(timeout=60)
        lost = (first.call_id,)
        # It takes over where the lost call counted, and needs the rest where it did not.
        again = held(ledger, "a", 100, scopes=("day:x",), lost=lost, takes_over=True)
        assert scopes_of(path) == {"day:x": [0, 100, 0, 0], "tag:y": [0, 0, 0, 0]}
        assert [row["state"] for row in rows_of(path, "calls")] == ["recovered", "open"]
        ledger.settle(answered(again, 1)).result(timeout=60)
    assert scopes_of(path) == {"day:x": [1, 0, 0, 0], "tag:y": [0, 0, 0, 0]}


def test_a_ledger_tells_all_that_it_knows_of_some_requests(tmp_path):
    path = tmp_path / "l"
    outcomes = {
        "answered": Settlement(call_id=0, state="answered", cost_nano=7, row=b'"row"'),
        "lasting": Settlement(call_id=0, state="failed", cost_nano=3, is_lasting=True),
        "paid": Settlement(call_id=0, state="failed", cost_nano=2, row=b'"paid"'),
        "free": Settlement(call_id=0, state="failed", row=b'"free"'),
        "bare": Settlement(call_id=0, state="failed", cost_nano=1),
        "lost": Settlement(call_id=0, state="unknown", error_code="odd", generation_id="gen"),
        "unasked": Settlement(call_id=0, state="unknown"),
    }
    with quick(path, [("day:x", None), ("tag:y", None)]) as ledger:
        for sha, settlement in outcomes.items():
            run_id = "r2" if sha == "paid" else "r1"
            scopes = ("day:x", "tag:y")
            reserved = held(ledger, sha, 10, run_id=run_id, scopes=scopes, timeout_s=60)
            change(path, "update calls set state_id = 's' where id = ?", reserved.call_id)
            fields = {name: getattr(settlement, name) for name in settlement.__slots__}
            booked = Settlement(**{**fields, "call_id": reserved.call_id})
            ledger.settle(booked).result(timeout=60)
        held(ledger, "open", 10)
        n = 1200  # more than one question can hold
        found = ledger.lookup(
            [*outcomes][:-1] + ["open", "answered"] + [f"no{i}" for i in range(n)]
        )
        late = ledger.lookup([f"no{i}" for i in range(n)] + ["lost", "answered"])
    [lost] = (row for row in rows_of(path, "calls") if row["request_sha"] == "lost")
    sent_at = moment(lost["sent_at"])
    the_lost = LostCall(
        call_id=OWNED + 6, request_sha="lost", state_id="s", teacher="t", model="m", run_id="r1",
        scopes=("day:x", "tag:y"), reserved_nano=10, sent_at=sent_at,
        due_at=sent_at + timedelta(seconds=60), error_code="odd", generation_id="gen",
    )  # fmt: skip
    the_answer = Known(request_sha="answered", run_id="r1", cost_nano=7, row=b'"row"')
    assert found == LedgerEntries(
        decided={
            "answered": the_answer,
            "lasting": Known(request_sha="lasting", run_id="r1", cost_nano=3, row=b"null"),
        },
        lost={"lost": (the_lost,)},
        booked={"paid": b'"paid"'},
        paid_nano=Counter({"r1": 7 + 3 + 1, "r2": 2}),
    )
    assert (late.decided, late.lost) == ({"answered": the_answer}, {"lost": (the_lost,)})


def test_a_request_that_was_answered_is_told_with_its_answer(tmp_path):
    with quick(tmp_path / "l") as ledger:
        ledger.settle(answered(held(ledger, "a", 10, run_id="first"), 4)).result(timeout=60)
        known = ledger.reserve(call("a", 10, run_id="second")).result(timeout=60)
        assert known == Known(request_sha="a", run_id="first", cost_nano=4, row=b"null")
        failed = held(ledger, "b", 10)
        ledger.settle(Settlement(call_id=failed.call_id, state="failed")).result(timeout=60)
        assert isinstance(held(ledger, "b", 10), Reserved), "what failed may be asked again"


# --- scopes and limits


def test_a_call_waits_for_its_own_scopes_only(tmp_path):
    with quick(tmp_path / "l", [("a", 100), ("b", 100), ("c", 100)]) as ledger:
        first = held(ledger, 1, 80, scopes=("a",))
        behind = ledger.reserve(call(2, 60, scopes=("b", "a")))
        assert isinstance(held(ledger, 3, 40, scopes=("b",)), Reserved), (
            "only of `a` is too little left"
        )
        next_in_line = ledger.reserve(call(4, 10, scopes=("c", "a")))
        assert isinstance(held(ledger, 5, 10, scopes=("c",)), Reserved)
        never = call(6, 101, scopes=("c", "a"))
        assert ledger.reserve(never).result(timeout=60) == Refused(scope="c")
        assert not behind.done()
        assert not next_in_line.done()
        ledger.settle(answered(first, 30)).result(timeout=60)
        assert isinstance(behind.result(timeout=60), Reserved)
        assert isinstance(next_in_line.result(timeout=60), Reserved)


def test_a_limit_may_be_used_up_to_the_last_nano_dollar(tmp_path):
    with quick(tmp_path / "l") as ledger:
        first = held(ledger, 1, 40)
        lost = held(ledger, 2, 30)
        ledger.settle(Settlement(call_id=lost.call_id, state="unknown")).result(timeout=60)
        assert ledger.reserve(call(3, 71)).result(timeout=60) == Refused(scope="day:x")
        assert not (waiting := ledger.reserve(call(4, 31))).done()
        ledger.settle(answered(first, 39)).result(timeout=60)
        assert isinstance(waiting.result(timeout=60), Reserved)
        assert scopes_of(tmp_path / "l")["day:x"] == [39, 31, 30, 0]


def test_a_limit_that_is_lowered_below_what_is_in_use_breaks_no_check(tmp_path):
    path = tmp_path / "l"
    with Ledger(path, is_durable=False) as ledger:
        ledger.open_scopes(["new", "day:x"], {"day:x": 100})
        ledger.open_scopes(["day:x"], {})
        ledger.open_scopes((), {"day:x": 100})
        held(ledger, 1, 10)
        unknown, dear = held(ledger, 2, 20), held(ledger, 3, 5)
        ledger.settle(Settlement(call_id=unknown.call_id, state="unknown"))
        ledger.settle(answered(dear, 7)).result(timeout=60)
        ledger.open_scopes((), {"day:x": 3})
        [day, new] = rows_of(path, "scopes")
        # What is in use when a limit is lowered must not break the check: 7 - 2 + 10 + 20.
        numbers = {"carried_nano": 0, "spent": 7, "held": 10, "unknown": 20, "overrun": 2}
        assert day == {"name": "day:x", "limit_nano": 3, "ceiling_nano": 35, **numbers}
        assert new == {
            "name": "new", "limit_nano": None, "ceiling_nano": None, "carried_nano": 0, "spent": 0,
            "held": 0, "unknown": 0, "overrun": 0,
        }  # fmt: skip
        ledger.open_scopes((), {"day:x": None})
        day, _ = rows_of(path, "scopes")
        assert (day["limit_nano"], day["ceiling_nano"]) == (None, None)


def test_a_run_counts_what_earlier_runs_paid_and_lost_for_its_requests(tmp_path):
    path = tmp_path / "l"
    with quick(path) as ledger:
        for sha, run_id, amount in (("a", "r1", 10), ("b", "r2", 20), ("c", "r1", 40)):
            reserved = held(ledger, sha, amount, run_id=run_id)
            ledger.settle(Settlement(call_id=reserved.call_id, state="unknown")).result(timeout=60)
        found = ledger.lookup(["a", "b"])
        lost = [each for several in found.lost.values() for each in several]
        for _ in range(2):  # another process of the same run counts them no second time
            ledger.open_run("r2", 100, carried_nano=30, lost=lost)
        scopes = {row.pop("name"): row for row in rows_of(path, "scopes")}
        assert scopes["run:r2"] == {
            "limit_nano": 70, "ceiling_nano": 70, "carried_nano": 30, "spent": 0, "held": 0,
            "unknown": 10, "overrun": 0,
        }  # fmt: skip
        named = {row["request_sha"]: row["scopes"] for row in rows_of(path, "calls")}
        assert named == {"a": "day:x\nrun:r2", "b": "day:x", "c": "day:x"}
        again = held(ledger, "a", 12, lost=(found.lost["a"][0].call_id,), takes_over=True)
        ledger.settle(answered(again, 1)).result(timeout=60)
        assert scopes_of(path)["run:r2"] == [0, 0, 0, 0]
        ledger.open_run("r3", 20, carried_nano=30)
        [*_, row] = rows_of(path, "scopes")
        assert (row["name"], row["limit_nano"], row["ceiling_nano"]) == ("run:r3", 0, 0)


def test_lost_calls_are_counted_under_a_run_whatever_it_may_spend(tmp_path):
    path = tmp_path / "l"
    with quick(path) as ledger:
        reserved = held(ledger, "a", 50, run_id="r1")
        ledger.settle(Settlement(call_id=reserved.call_id, state="unknown")).result(timeout=60)
        ledger.open_run("r2", 5, lost=ledger.lookup(["a"]).lost["a"])
        [_, run] = rows_of(path, "scopes")
        assert (run["limit_nano"], run["ceiling_nano"], run["unknown"]) == (5, 55, 50)


def test_a_run_that_gave_up_is_refused_and_others_are_not(tmp_path):
    with quick(tmp_path / "l") as ledger:
        held(ledger, 1, 100)
        waiting = {run_id: ledger.reserve(call(run_id, 10, run_id=run_id)) for run_id in "ab"}
        ledger.give_up("a")
        assert waiting["a"].result(timeout=60) == Refused(scope="stopped")
        later = ledger.reserve(call("later", 1, run_id="a")).result(timeout=60)
        assert later == Refused(scope="stopped")
        assert not waiting["b"].done()


def test_a_scope_that_was_not_opened_is_named_and_what_is_paid_is_booked_all_the_same(tmp_path):
    path, gate = tmp_path / "l", threading.Event()
    with quick(path) as ledger:
        reserved = held(ledger, 1, 10)
        ledger.do(lambda _: gate.wait(60))  # what is asked meanwhile is one transaction
        strange = ledger.reserve(call(2, 10, scopes=("no", "day:x", "never")))
        settled = ledger.settle(answered(reserved, 3))
        gate.set()
        assert settled.result(timeout=60) is None
        assert told_by(LedgerError, strange.result, timeout=60) == f"{path}: no scope never, no"
        assert isinstance(held(ledger, 3, 90), Reserved)
        assert scopes_of(path)["day:x"] == [3, 90, 0, 0]


# --- opening, closing, and what goes wrong


def test_an_action_is_done_whole_or_not_at_all_and_its_error_is_raised(tmp_path):
    with quick(tmp_path / "l") as ledger:

        def half(database):
            database.query("delete from scopes")
            raise ValueError("half done")

        with pytest.raises(ValueError, match="half done"):
            ledger.do(half).result(timeout=60)
        names = ledger.do(lambda database: database.query("select name from scopes"))
        assert names.result(timeout=60) == [("day:x",)]


@pytest.mark.parametrize(("options", "synchronous"), [({}, 2), ({"is_durable": False}, 1)])
def test_a_ledger_waits_for_the_disk_unless_it_is_told_not_to(tmp_path, options, synchronous):
    with Ledger(tmp_path / "l", **options) as ledger:
        assert ledger.url == str(tmp_path / "l")
        [(found,)] = ledger.do(lambda database: database.query("pragma synchronous")).result()
        assert found == synchronous


def test_a_ledger_that_is_closed_twice_has_done_all_that_was_asked(tmp_path, caplog):
    path, gate = tmp_path / "l", threading.Event()
    before = threading.enumerate()
    ledger = quick(path)
    [thread] = {*threading.enumerate()} - {*before}
    first, second = held(ledger, 1, 10), held(ledger, 2, 20)
    assert thread.name == "ledger"
    assert thread.daemon, "a ledger that is not closed must keep no process alive"
    ledger.do(lambda _: gate.wait(60))
    settled, waiting = ledger.settle(answered(first, 4)), ledger.reserve(call(3, 90))
    threading.Timer(0.02, gate.set).start()
    ledger.close()
    ledger.close()
    assert settled.result(timeout=0) is None
    assert told_by(LedgerError, waiting.result, timeout=0) == f"{path}: the ledger was closed"
    assert scopes_of(path)["day:x"] == [4, 0, 20, 0]
    states = {row["id"]: row["state"] for row in rows_of(path, "calls")}
    assert states == {first.call_id: "answered", second.call_id: "unknown"}
    assert caplog.messages == [
        f"{path}: 1 calls of a process that died have an unknown outcome; they count at their full "
        "reservation until they are asked again"
    ]
    assert not list(tmp_path.glob("*owner*"))


def test_calls_of_the_dead_are_lost_and_those_of_the_living_are_not(tmp_path, caplog):
    path = tmp_path / "l"
    both = ("day:x", "tag:y")
    with quick(path, [("day:x", 100), ("tag:y", None)]) as living:
        held(living, "living", 1)
        for n, scopes in enumerate((both, both, ("day:x",)), start=1):
            reserved = held(living, f"dead{n}", 10 * n, scopes=scopes)
            # As if another process had sent it that was killed since.
            change(path, "update calls set owner = 77 where id = ?", reserved.call_id)
        with Ledger(path, is_durable=False) as other:
            assert other.owner == 2
            assert scopes_of(path) == {"day:x": [0, 1, 60, 0], "tag:y": [0, 0, 30, 0]}
            states = {row["request_sha"]: row["state"] for row in rows_of(path, "calls")}
        assert states == {
            "living": "open", "dead1": "unknown", "dead2": "unknown", "dead3": "unknown",
        }  # fmt: skip
        assert [message.partition(" have ")[0] for message in caplog.messages] == [
            f"{path}: 3 calls of a process that died"
        ]


def test_a_call_whose_process_dies_while_others_wait_for_it_becomes_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("replay_pipeline.replay.money.ledger._POLL_S", 0.001)
    path = tmp_path / "l"
    with quick(path) as ledger, Ledger(path, is_durable=False) as other:
        sent = held(other, "a", 30)
        waiting = ledger.reserve(call("a", 30))
        change(path, "update calls set owner = 77 where id = ?", sent.call_id)
        told = waiting.result(timeout=60)
        assert [each.call_id for each in told.lost] == [sent.call_id]
        assert scopes_of(path)["day:x"] == [0, 0, 30, 0]


def keep_beside(path, *pairs, owner=99):
    """Leave answers as a process does that could not book them."""
    return Unbooked(str(path), owner, "me").keep(pairs)


def test_kept_answers_are_booked_once_however_often_they_are_found(tmp_path, caplog):
    path = tmp_path / "l"
    with quick(path) as ledger:
        first, second = held(ledger, "a", 10), held(ledger, "b", 20)
    pairs = [(call("a", 10), answered(first, 4)), (call("b", 20), answered(second, 25))]
    caplog.clear()
    for _ in range(2):
        place = keep_beside(path, *pairs)
        Ledger(path, is_durable=False).close()
        assert scopes_of(path) == {"day:x": [29, 0, 0, 5]}
        assert not place.exists()
    rows = rows_of(path, "calls")
    assert [(row["id"], row["state"], row["cost"]) for row in rows] == [
        (OWNED + 1, "answered", 4), (OWNED + 2, "answered", 25),
    ]  # fmt: skip
    assert caplog.messages == [f"{path}: booked 2 answers of {place}"] * 2


def test_kept_answers_of_another_ledger_stay_where_they_are(tmp_path, caplog):
    path = tmp_path / "l"
    Ledger(path, is_durable=False).close()
    place = keep_beside(path, (call("z", 5), answered(Reserved(call_id=7, reserved_nano=5), 3)))
    Ledger(path, is_durable=False).close()
    assert place.exists()
    assert caplog.messages == [f"{place}: holds answers of another ledger, and stays as it is"]


def test_an_answer_that_was_kept_twice_in_one_place_is_booked_once(tmp_path):
    path = tmp_path / "l"
    with quick(path) as ledger:
        reserved = held(ledger, "a", 10)
    keep_beside(path, *[(call("a", 10), answered(reserved, 4))] * 2)
    Ledger(path, is_durable=False).close()
    assert scopes_of(path) == {"day:x": [4, 0, 0, 0]}


def test_an_answer_that_cannot_be_booked_says_where_it_waits(tmp_path, monkeypatch):
    path = tmp_path / "l"
    with quick(path) as ledger:
        first, other = held(ledger, "a", 10), held(ledger, "b", 20)
        # Another process has changed what only this one may change.
        change(path, "update calls set state = 'failed' where id = ?", first.call_id)
        told = told_by(LedgerError, ledger.settle(answered(first, 4)).result, timeout=60)
        place = f"{path}-unbooked-1.jsonl"
        assert told == (
            f"{path}: call {first.call_id} is not open; 1 answers wait in {place} and are booked by "
            "the next run"
        )
        ledger.settle(answered(other, 20)).result(timeout=60)
        nobodys = Settlement(call_id=3, state="answered")
        assert ledger.settle(nobodys).result(timeout=60) is None
    [(found, pairs)] = Unbooked(str(path), 9, "me").left_behind(lambda _: False)
    assert (str(found), pairs) == (place, [(call("a", 10), answered(first, 4))])


# --- the database


@pytest.mark.parametrize("prefix", ["", "sqlite:///"])
def test_a_ledger_is_a_private_file_at_a_path_or_its_url(tmp_path, prefix):
    path = tmp_path / "some" / "folder" / "l"
    assert not exists(f"{prefix}{path}")
    with closing(connect(f"{prefix}{path}")) as database:
        assert database.name == str(path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert database.query("pragma journal_mode") == [("wal",)]
    assert exists(f"{prefix}{path}")


def test_a_server_is_taken_to_have_a_ledger():
    assert exists("postgresql://me@host/db")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("mysql://me:secret@host/db", "mysql://me@host/db"),
        ("mysql://me:sec@ret:too@host/db", "mysql://me@host/db"),
        ("mysql://me:sec://ret@host/db", "mysql://me@host/db"),
        ("mysql://host/db", "mysql://host/db"),
    ],
)
def test_a_database_of_another_kind_is_refused_without_its_password(url, shown):
    assert told_by(ConfigError, connect, url) == (
        f"ledger {shown} must be a path, sqlite:///path, or postgresql://..."
    )


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_a_server_that_is_not_there_is_named_without_its_password(monkeypatch, scheme):
    psycopg = pytest.importorskip("psycopg")
    asked = []

    def nobody(url, **options):
        asked.append((url, options))
        raise psycopg.OperationalError("nobody answers")

    monkeypatch.setattr(psycopg, "connect", nobody)
    plain = scheme.removesuffix("+psycopg")
    told = told_by(LedgerError, connect, f"{scheme}://me:a+psycopg@host/db")
    assert told == f"{plain}://me@host/db: cannot be opened (nobody answers)"
    assert asked == [(f"{plain}://me:a+psycopg@host/db", {"autocommit": True})]


def test_a_server_needs_its_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    assert told_by(MissingDependencyError, connect, "postgresql://host/db") == (
        "a PostgreSQL ledger needs psycopg: pip install 'replay-pipeline[postgres]'"
    )


def test_a_file_that_is_no_ledger_is_named_with_what_can_be_done(tmp_path):
    path = tmp_path / "l"
    path.write_text("this is no database, " * 100)
    for is_read_only in (False, True):
        assert told_by(LedgerError, connect, path, is_read_only=is_read_only) == (
            f"{path}: not a ledger that can be opened (file is not a database); check the path, "
            "its permissions and the free space"
        )
    (tmp_path / "folder").mkdir()
    told = told_by(LedgerError, connect, tmp_path / "folder")
    assert "Is a directory" in told


def test_looking_at_a_ledger_makes_none_and_writes_nothing(tmp_path):
    path = tmp_path / "a b#c"
    told = told_by(LedgerError, connect, path, is_read_only=True)
    assert told.startswith(f"{path}: not a ledger that can be opened (unable to open database file")
    assert list(tmp_path.iterdir()) == []
    connect(path).close()
    with closing(connect(path, is_read_only=True)) as database:
        assert database.query("select value from ledger") == [(SCHEMA_VERSION,)]
        told = told_by(LedgerError, database.query, "delete from ledger")
    assert told == (
        f"{path}: cannot be read or written (attempt to write a readonly database); check free "
        "space and permissions"
    )


def test_what_is_spent_is_told_since_a_time_and_what_counts_under_a_scope(tmp_path):
    path, before = tmp_path / "l", datetime.now(UTC)
    assert (spent_since(path, before), counted_usd(path, "day:x")) == (0.0, 0.0)
    assert list(tmp_path.iterdir()) == []
    with quick(path) as ledger:
        paid, lost = held(ledger, "a", 40), held(ledger, "b", 25)
        ledger.settle(answered(paid, 30)).result(timeout=60)
        ledger.settle(Settlement(call_id=lost.call_id, state="unknown")).result(timeout=60)
        held(ledger, "c", 5)
        assert counted_usd(path, "day:x") == pytest.approx(60e-9)
    assert spent_since(path, before) == pytest.approx(30e-9)
    assert spent_since(path, datetime.now(UTC)) == 0.0
    assert counted_usd(path, "day:y") == 0.0


class ReadOnlyDisk(sqlite3.Connection):
    """SQLite can make no index of a log there, and so reads only what it is told won't change."""

    def __init__(self, url, *, uri, **options):
        assert uri, "not every SQLite takes an address for one unasked"
        super().__init__(url, uri=uri, **options)
        self.is_refused = "immutable=1" not in url

    def execute(self, *arguments):
        if self.is_refused:
            raise sqlite3.OperationalError("unable to open database file")
        return super().execute(*arguments)


def test_a_ledger_on_a_read_only_disk_is_read_unless_a_log_was_left_behind(tmp_path, monkeypatch):
    path, log = tmp_path / "l", tmp_path / "l-wal"
    connect(path).close()
    monkeypatch.setattr(databases.sqlite3, "connect", ReadOnlyDisk)
    for is_left in (False, True):
        if is_left:
            log.touch()  # an empty one has nothing that would be missed
        with closing(connect(path, is_read_only=True)) as database:
            assert database.query("select value from ledger") == [(SCHEMA_VERSION,)]
        assert ledger_status(path).calls == {}
        assert counted_usd(path, "day:x") == 0.0
    log.write_bytes(b"what was written last")
    told = told_by(LedgerError, connect, path, is_read_only=True)
    assert "unable to open database file" in told


@pytest.mark.parametrize("is_read_only", [False, True])
def test_a_ledger_waits_a_minute_for_others_and_may_be_asked_by_any_thread(tmp_path, is_read_only):
    connect(tmp_path / "l").close()
    with closing(connect(tmp_path / "l", is_read_only=is_read_only)) as database:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(database.query, "pragma busy_timeout")
        assert asked.result() == [(60_000,)]


def test_a_ledger_of_another_version_is_left_as_it_is(tmp_path):
    path = tmp_path / "l"
    for version, advice in (("9", ""), ("1", "; the next replay brings it up to date")):
        with closing(connect(path)) as database:
            database.query("update ledger set value = ?", (version,))
        told = told_by(LedgerError, connect, path, is_read_only=True)
        assert (
            told
            == f"{path}: the ledger has version {version}, but this program uses version {SCHEMA_VERSION}{advice}"
        )
        if version == "9":
            assert told_by(LedgerError, connect, path) == told
            with closing(sqlite3.connect(path)) as database, database:
                database.execute("update ledger set value = ?", (SCHEMA_VERSION,))


def test_a_row_that_the_database_refuses_is_no_fault_of_the_disk(tmp_path):
    with closing(connect(tmp_path / "l")) as database:
        database.run_many("insert into ledger values(?, ?)", [("a", "1"), ("b", "2")])
        told = told_by(LedgerError, database.query, "insert into ledger values(?, ?)", ("a", "3"))
        assert told == (
            f"{tmp_path}/l: the ledger refused a booking (UNIQUE constraint failed: ledger.key)"
        )
        assert database.query(
            "select key, value from ledger where value > ? order by 1", ("1",)
        ) == [
            ("b", "2"),
            ("schema_version", SCHEMA_VERSION),
        ]


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_nothing_is_booked_into_a_file_that_nobody_will_find_again(tmp_path, how):
    with closing(connect(tmp_path / "l")) as database:
        (tmp_path / "l").rename(tmp_path / "gone")
        if how == "replaced":
            (tmp_path / "l").write_bytes(b"")
        told = told_by(LedgerError, database.transaction().__enter__)
    assert told == f"{tmp_path}/l: the ledger was deleted or replaced while it was open"


def test_an_owner_lives_for_as_long_as_it_holds_its_lock(tmp_path):
    path, lock = tmp_path / "l", tmp_path / "l-owner-5"
    with closing(connect(path)) as theirs:
        mine = connect(path)
        assert mine.claim(5)
        assert lock.stat().st_mode & 0o777 == 0o600
        assert not theirs.claim(5)
        assert (theirs.is_alive(5), theirs.is_alive(6)) == (True, False)
        mine.close()
        assert not lock.exists()
        lock.touch()  # its process was killed
        assert not theirs.is_alive(5)
        assert not lock.exists()
        assert theirs.claim(5)
        assert theirs.query("select 1") == [(1,)]
    theirs.close()
    assert not lock.exists()


CHILD = """
import os, random, sys
from collections import deque
from concurrent.futures import wait
sys.path.insert(0, sys.argv[1])
from replay_pipeline.replay.money.calls import *
from replay_pipeline.replay.money.ledger import *
path, seed, kill_at = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
chance = random.Random(seed)
with Ledger(path, is_durable=False) as ledger:
    ledger.open_scopes((), {"day:x": 200_000, "teacher:a": 150_000})
    futures = deque()
    for i in range(250):
        futures.append(ledger.reserve(NewCall(
            request_sha=f"{seed}-{i}", state_id="s", teacher="t", model="m", run_id="r",
            scopes=("day:x", "teacher:a"), reserved_nano=chance.randrange(500, 1000))))
        if i == kill_at:
            wait(futures)
            os._exit(9)
        if len(futures) < 8:
            continue
        result = futures.popleft().result(timeout=30)
        if isinstance(result, Reserved):
            cost = chance.randrange(0, result.reserved_nano + 1)
            ledger.settle(Settlement(call_id=result.call_id, state="answered", cost_nano=cost,
                                     row=b"null"))
    for future in futures:
        result = future.result(timeout=30)
        if isinstance(result, Reserved):
            ledger.settle(Settlement(call_id=result.call_id, state="failed"))
"""


@pytest.mark.slow
def test_several_processes_share_one_limit_and_use_it_up(database_url):
    """Processes, one of which dies with money held; the limit of all is never passed."""

    def start(seed, kill_at=-1):
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, str(ROOT), database_url, str(seed), str(kill_at)]
        )

    assert start(1, kill_at=20).wait(timeout=120) == 9
    children = [start(seed) for seed in (2, 3, 4)]
    assert [child.wait(timeout=120) for child in children] == [0, 0, 0]
    with Ledger(database_url, is_durable=False):
        pass  # opening it adopts what the dead process left
    database = connect(database_url)
    scopes = {
        row[0]: row[1:]
        for row in database.query("select name, spent, held, unknown, overrun from scopes")
    }
    [(booked, n_open)] = database.query(
        "select sum(case state when 'answered' then cost when 'unknown' then reserved else 0 end), "
        "sum(case when state = 'open' then 1 else 0 end) from calls"
    )
    database.close()
    spent, held, unknown, overrun = scopes["teacher:a"]
    assert (held, overrun, n_open) == (0, 0, 0)
    assert unknown > 0
    assert spent + unknown == booked == sum(scopes["day:x"])
    assert 150_000 >= spent + unknown > 0.99 * 150_000


@pytest.mark.slow
def test_one_process_at_a_time_is_an_owner_and_all_others_see_whether_it_lives(database_url):
    with closing(connect(database_url)) as theirs:
        with closing(connect(database_url)) as mine:
            assert mine.claim(5)
            assert not theirs.claim(5)
            assert (theirs.is_alive(5), theirs.is_alive(6)) == (True, False)
            assert theirs.claim(6), "looking whether an owner lives leaves its place free"
        # A server lets go of a lock when it gets to see that the connection has ended.
        deadline = time.monotonic() + 30
        while theirs.is_alive(5):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.slow
def test_the_ledger_speaks_postgresql_too(postgres_url):
    with Ledger(postgres_url) as one, Ledger(postgres_url) as other:
        one.open_scopes((), {"day:x": 100, "tag:50%": None})
        first = one.reserve(call("same", 10, scopes=("day:x", "tag:50%"))).result(timeout=60)
        twin = other.reserve(call("same", 10, scopes=("day:x",)))
        assert not twin.done()
        one.settle(answered(first, 12, response=b"\x00raw")).result(timeout=60)
        assert isinstance(twin.result(timeout=60), Known)
        held = other.reserve(call("open", 50, scopes=("day:x",))).result(timeout=60)
        assert isinstance(held, Reserved)
    status = ledger_status(postgres_url)
    assert status.calls == {"answered": 1, "unknown": 1}
    [day, _] = status.scopes
    assert (day.spent_usd, day.overrun_usd, day.unknown_usd) == (12e-9, 2e-9, 50e-9)
    assert "secret" not in status.ledger


@pytest.mark.slow
def test_a_database_server_says_refuses_and_undoes_what_a_file_does(postgres_url):
    with closing(connect(postgres_url)) as database:
        name = database.name
        assert database.query("show lock_timeout") == [("1min",)]
        assert database.query("select ?::text || '%' like '5%'", ("5",)) == [(True,)]
        database.run_many("insert into ledger values(?, ?)", [("a%", "1"), ("b", "2")])
        assert database.query("update ledger set value = '3' where key like 'a%'") == []
        assert database.query("select value from ledger where key = ?", ("a%",)) == [("3",)]

        def half():
            with database.transaction():
                database.query("delete from ledger")
                raise ValueError("half done")

        assert told_by(ValueError, half) == "half done"
        told = told_by(LedgerError, database.query, "select nothing")
        assert told.startswith(
            f'{name}: cannot be read or written (column "nothing" does not exist'
        )
        told = told_by(
            LedgerError, database.run_many, "insert into ledger values(?, ?)", [("b", "4")]
        )
        assert told.startswith(f"{name}: cannot be read or written (duplicate key value")
        database.query("update ledger set value = '9' where key = 'schema_version'")
    told = told_by(LedgerError, connect, postgres_url)
    assert (
        told == f"{name}: the ledger has version 9, but this program uses version {SCHEMA_VERSION}"
    )


@pytest.mark.slow
def test_no_other_process_changes_a_scope_that_is_being_reserved_under(postgres_url, monkeypatch):
    free, save = [], Scopes.save

    def look_and_save(scopes):
        free.extend(theirs.query("select name from scopes for update skip locked"))
        save(scopes)

    with closing(connect(postgres_url)) as theirs, Ledger(postgres_url) as ledger:
        monkeypatch.setattr(Scopes, "save", look_and_save)
        ledger.open_scopes(["day:x", "tag:y"], {})
        held(ledger, "a", 30)
    assert free == [("tag:y",)]

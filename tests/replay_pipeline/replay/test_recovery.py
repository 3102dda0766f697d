"""What a crash, a full disk, a lost file or an older version leaves behind is found again."""

import asyncio
import shutil
import sqlite3
from contextlib import closing
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from replay_pipeline.errors import LedgerError
from replay_pipeline.replay import ledger_status, lost_calls, replay_states, replay_trace_sync
from replay_pipeline.replay.dialects.prices import Price
from replay_pipeline.replay.dialects.replies import Answer
from replay_pipeline.replay.dialects.sizes import Size
from replay_pipeline.replay.money.bills import replayed_bound
from replay_pipeline.replay.money.calls import (
    InDoubt,
    LostCall,
    NewCall,
    Refused,
    Reserved,
    Settlement,
    decode_row,
    settled_lost,
)
from replay_pipeline.replay.money.database import SCHEMA_VERSION, connect
from replay_pipeline.replay.money.ledger import Ledger, Unbooked
from replay_pipeline.types import RetryPolicy, TeacherAction
from tests.replay_pipeline.replay.conftest import QUICK, make_states
from tests.replay_pipeline.replay.test_ledger import answered, call, scopes_of
from tests.replay_pipeline.replay.test_odd_replies import completion, raw
from tests.support.odd_server import OddServer
from tests.support.teachers import TeacherServer

VERSION_1 = Path(__file__).parents[2] / "data" / "ledgers" / "version_1.sqlite"
MODEL = "deepseek/deepseek-v4-pro"


PATIENT = QUICK.model_copy(update={"settle_s": 30.0})
"""Waits for calls in flight when the run is stopped."""


def ask(states, teachers, ledger, *, usd=1.0, **options):
    return asyncio.run(
        replay_states(
            states, teachers, max_total_usd=usd, ledger=ledger,
            **{"retry": QUICK, "is_durable": False, **options},
        )
    )  # fmt: skip


def leave_open(path, *calls):
    """A ledger whose process died with these calls in flight."""
    with Ledger(path, is_durable=False) as ledger:
        ledger.open_scopes({name for each in calls for name in each.scopes}, {})
        assert all(isinstance(ledger.reserve(each).result(timeout=60), Reserved) for each in calls)


# --- lost calls


def test_asking_a_lost_call_again_takes_its_reservation_over(tmp_path):
    leave_open(tmp_path / "l", call("a", 60), call("b", 40))
    with Ledger(tmp_path / "l", is_durable=False) as ledger:
        ledger.open_scopes((), {"day:x": 100})
        [lost] = ledger.reserve(call("a", 60)).result(timeout=60).lost
        beside = call("a", 60, lost=(lost.call_id,))
        assert ledger.reserve(beside).result(timeout=60) == Refused(scope="day:x")
        instead = call("a", 60, lost=(lost.call_id,), takes_over=True)
        again = ledger.reserve(instead).result(timeout=60)
        assert scopes_of(tmp_path / "l")["day:x"] == [0, 60, 40, 0]
        ledger.settle(answered(again, 6)).result(timeout=60)
    assert scopes_of(tmp_path / "l")["day:x"] == [6, 0, 40, 0]


def test_two_processes_cannot_take_the_same_reservation_over(tmp_path):
    leave_open(tmp_path / "l", call("a", 60))
    with Ledger(tmp_path / "l", is_durable=False) as one, Ledger(tmp_path / "l") as other:
        one.open_scopes((), {"day:x": 100})
        [lost] = one.reserve(call("a", 60)).result(timeout=60).lost
        again = call("a", 60, lost=(lost.call_id,), takes_over=True)
        first = one.reserve(again).result(timeout=60)
        second = other.reserve(again)
        assert not second.done()
        one.settle(answered(first, 6)).result(timeout=60)
        assert second.result(timeout=60).cost_nano == 6
    assert scopes_of(tmp_path / "l")["day:x"] == [6, 0, 0, 0]


def test_a_call_lost_while_others_wait_for_it_is_not_sent_again_unseen(tmp_path):
    with Ledger(tmp_path / "l", is_durable=False) as other:
        other.open_scopes((), {"day:x": 100})
        with Ledger(tmp_path / "l", is_durable=False) as dying:
            dying.reserve(call("a", 30)).result(timeout=60)
            waiting = other.reserve(call("a", 30))
        assert isinstance(waiting.result(timeout=60), InDoubt)


def test_lost_calls_have_a_row_and_hold_their_money_in_the_report(tmp_path):
    with TeacherServer(script={"content": "yes"}, faults=[{"kind": "stall"}]) as server:
        [teacher] = server.teachers([MODEL])
        slow = teacher.model_copy(update={"timeout_s": 0.2})
        first = ask(make_states(2), [slow], tmp_path / "l")
        # Nothing is asked: no money, or told to stop. What was paid is shown all the same.
        later = ask(make_states(2), [slow], tmp_path / "l", usd=0)
    assert [row.error_code for row in first.actions] == ["outcome_unknown"] * 2
    assert [row.error_code for row in later.actions] == ["outcome_unknown"] * 2
    assert later.skipped == {}
    assert first.unknown_usd == later.unknown_usd == ledger_status(tmp_path / "l").unknown_usd > 0


def test_a_call_that_may_still_run_is_left_to_the_next_run(tmp_path):
    """A slow answer is on its way: asked again before its time limit, it would be paid twice."""
    states = make_states(1)
    with TeacherServer(script={"content": "yes"}) as server:
        [teacher] = server.teachers([MODEL])
        ask(states, [teacher], tmp_path / "other")
        [row] = replay_trace_sync(states, [teacher], 0, ledger=tmp_path / "other")
        lost = NewCall(
            request_sha=row.request_sha, state_id="s0", teacher=teacher.name, model=MODEL,
            run_id="died", scopes=("day:x",), reserved_nano=9_000_000, timeout_s=600,
        )  # fmt: skip
        leave_open(tmp_path / "l", lost)
        report = ask(states, [teacher], tmp_path / "l")
        assert report.n_sent == 0
        assert report.actions[0].error_code == "outcome_unknown"
        assert server.bill().n_requests == 1


def test_an_endpoint_that_keeps_no_answers_is_booked_in_full_and_then_asked_anew(tmp_path):
    with OddServer(
        lambda number, _: None if number == 0 else (200, {}, raw(completion()))
    ) as server:
        teacher = server.teacher(timeout_s=0.05)
        first = ask(make_states(1), [teacher], tmp_path / "l")
        assert first.unknown_usd > 0
        patient = RetryPolicy(settle_s=5.0)
        report = ask(make_states(1), [teacher], tmp_path / "l", retry=patient)
    [row] = report.actions
    assert (row.error_code, row.cost_usd) == (None, 0.0002)
    status = ledger_status(tmp_path / "l")
    assert status.unknown_usd == report.unknown_usd == 0
    assert status.spent_usd == pytest.approx(first.unknown_usd + 0.0002)


def test_a_router_without_its_cache_is_found_out_and_the_lost_call_booked(tmp_path):
    """Told to keep answers, it says nothing of them: the lost call may have been charged too."""
    with OddServer(lambda *_: (200, {}, raw(completion()))) as server:
        teacher = server.teacher(dialect="openrouter", timeout_s=0.05)
        report = ask(make_states(1), [teacher], tmp_path / "first")
        lost = NewCall(
            request_sha=report.actions[0].request_sha, state_id="s0", teacher="t", model="a/b",
            run_id="died", scopes=("day:x",), reserved_nano=3_000_000, timeout_s=0,
        )  # fmt: skip
        leave_open(tmp_path / "l", lost)
        again = ask(make_states(1), [teacher], tmp_path / "l")
    assert round(again.actions[0].cost_usd * 1e9) == 3_000_000 + 200_000


def test_an_answer_from_the_routers_cache_cost_at_most_what_its_size_or_its_limit_tells():
    price = Price(prompt=0, completion=1_000_000, cache_read=0, cache_write=0, reasoning=0)
    thinks = replace(price, supported_parameters=("reasoning",))
    answer = Answer(action={"role": "assistant", "content": "yes"})
    n_bytes = len(str(answer.action))
    for given, at, n_limit, n_tokens in (
        (answer, price, 1_000, n_bytes + 1),
        (answer, price, 9, 9),
        (Answer(), price, 1_000, 1),
        (answer, thinks, 1_000, 1_000),
    ):
        bound = replayed_bound(given, Size(n_bytes=100), price=at, n_limit=n_limit)
        assert bound == at.bound_nano(Size(n_bytes=100).bound_tokens, n_tokens)


BOOKED_IN_FULL = "no reply came back; it is booked at the most it can have cost"
SENT, DUE = "2026-01-02T03:04:05.678+00:00", "2026-01-02T03:14:05.678+00:00"


def lose(path, *calls, due_at=DUE):
    """A ledger with lost calls, each given with how it was lost and its name at the endpoint."""
    leave_open(path, *(each for each, _, _ in calls))
    with closing(sqlite3.connect(path)) as database, database:
        for each, code, generation_id in calls:
            database.execute(
                "update calls set sent_at = ?, due_at = ?, error_code = ?, generation_id = ? "
                "where request_sha = ?",
                (SENT, due_at, code, generation_id, each.request_sha),
            )


def test_each_lost_call_is_listed_with_all_that_is_known_and_nothing_changes(tmp_path):
    path = tmp_path / "l"
    lose(
        path,
        (call("dead", 10), None, None),
        (call("forgotten", 20), "no_reply", "gen-forgotten"),
        (call("b", 40), "truncated_reply", "gen-b"),
    )
    lost = {
        "teacher": "t", "model": "m", "sent_at": "2026-01-02T03:04:05+00:00",
        "due_at": "2026-01-02T03:14:05+00:00", "what": "over: the next run asks it again",
    }  # fmt: skip
    expected = [
        {"state_id": "dead", "reserved_usd": 1e-8, "why": "its process died"},
        {"state_id": "forgotten", "reserved_usd": 2e-8, "why": "no_reply"},
        {"state_id": "b", "reserved_usd": 4e-8, "why": "truncated_reply"},
    ]
    assert [asdict(each) for each in lost_calls(path)] == [lost | each for each in expected]
    assert scopes_of(path)["day:x"] == [0, 0, 70, 0]
    leave_open(tmp_path / "late", call("a", 10))
    assert [each.what for each in lost_calls(tmp_path / "late")] == ["may still be running"]


@pytest.mark.parametrize(
    ("code", "told", "waited_s", "message", "is_lasting"),
    [
        ("no_reply", "no_reply", 600.0, "no reply within 600 s: raise the teacher's timeout_s", True),
        ("connection_lost", "connection_lost", 0.0, BOOKED_IN_FULL, False),
        (None, "outcome_unknown", 0.0, BOOKED_IN_FULL, False),
    ],
)  # fmt: skip
def test_a_lost_call_is_booked_with_all_that_is_known_of_it(
    code, told, waited_s, message, is_lasting
):
    sent_at = datetime(2026, 1, 2, tzinfo=UTC)
    lost = LostCall(
        call_id=7, request_sha="sha", state_id="s", teacher="t", model="m", run_id="r",
        scopes=("day:x",), reserved_nano=50, sent_at=sent_at, generation_id="gen-1",
        due_at=sent_at + timedelta(seconds=600), error_code=code,
    )  # fmt: skip
    settled = settled_lost(lost, 40)
    assert decode_row(settled.row) == TeacherAction(
        state_id="s", teacher="t", model="m", cost_usd=4e-8, latency_s=waited_s, request_sha="sha",
        generation_id="gen-1", error_code=told, error_message=message,
    )  # fmt: skip
    assert settled == Settlement(
        call_id=7, state="failed", cost_nano=40, is_lasting=is_lasting, error_code=told,
        row=settled.row, generation_id="gen-1",
    )  # fmt: skip


def test_looking_makes_no_ledger_where_there_is_none(tmp_path):
    with pytest.raises(LedgerError) as told:
        lost_calls(tmp_path / "l")
    assert str(told.value) == (
        f"{tmp_path}/l: no ledger here yet; it is created by the first replay"
    )
    assert list(tmp_path.iterdir()) == []


# --- what can't be booked


def test_answers_that_cannot_be_booked_are_kept_and_booked_by_the_next_run(tmp_path, monkeypatch):
    states = make_states(40, n_sessions=40)
    with TeacherServer(script={"content": "yes"}, latency=0.1) as server:
        [teacher] = server.teachers([MODEL])
        transact = Ledger._transact

        def full_disk(self, settling):
            if any(each.settlement.state == "answered" for each in settling):
                raise LedgerError("database or disk is full")
            transact(self, settling)

        monkeypatch.setattr(Ledger, "_transact", full_disk)
        with pytest.raises(LedgerError, match=r"answers wait in .*unbooked-1.jsonl"):
            ask(states, [teacher], tmp_path / "l", max_concurrency=8, retry=PATIENT)
        monkeypatch.undo()
        n_charged = server.bill().n_charged
        assert 3 <= n_charged < 40, "it stops sending at once"
        kept = replay_trace_sync(states, [teacher], 0, ledger=tmp_path / "l")
        assert [row.error_code for row in kept].count(None) == n_charged
        assert ledger_status(tmp_path / "l").spent_usd == server.bill().total_nano / 1e9
        assert server.bill().n_charged == n_charged
    assert list(tmp_path.glob("*unbooked*")) == []


def test_where_the_folder_takes_nothing_answers_are_kept_under_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "file").write_text("no folder")
    unbooked = Unbooked(str(tmp_path / "file" / "ledger.sqlite"), 7, "me")
    path = unbooked.keep([(call("a", 5), answered(Reserved(call_id=1, reserved_nano=5), 3))])
    assert path.is_relative_to(tmp_path / "home")
    [(found, [(kept, settlement)])] = list(unbooked.left_behind(lambda _: False))
    assert (found, kept.request_sha, settlement.cost_nano) == (path, "a", 3)


def test_where_no_place_takes_an_answer_each_is_named_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    unbooked = Unbooked(str(tmp_path / "file" / "ledger.sqlite"), 7, "me")
    with pytest.raises(LedgerError) as told:
        unbooked.keep([(call("a", 5), answered(Reserved(call_id=1, reserved_nano=5), 3))])
    beside, at_home = str(told.value).split("; ")
    assert beside.startswith(f"{tmp_path}/file/ledger.sqlite-unbooked-7.jsonl: ")
    assert at_home.startswith(f"{tmp_path}/file/.cache/replay-pipeline/me-unbooked-7.jsonl: ")
    assert all("[Errno " in each for each in (beside, at_home))


def kept_pair(n):
    return call(f"s{n}", 5), answered(Reserved(call_id=n, reserved_nano=5), n)


def test_answers_are_kept_beside_the_ledger_and_added_to_those_of_before(tmp_path):
    unbooked = Unbooked(str(tmp_path / "folder" / "ledger.sqlite"), 7, "me")
    place = tmp_path / "folder" / "ledger.sqlite-unbooked-7.jsonl"
    assert unbooked.keep([kept_pair(1), kept_pair(2)]) == place
    with place.open("ab") as file:
        file.write(b'\n[{"request_sha":"cut sh')  # the disk was full
    assert unbooked.keep([kept_pair(3)]) == place
    [found] = unbooked.left_behind(lambda owner: owner == 7)
    assert found == (place, [kept_pair(1), kept_pair(2), kept_pair(3)])


def test_answers_kept_under_the_home_follow_a_ledger_that_is_moved(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    old, new = tmp_path / "old.sqlite", tmp_path / "new.sqlite"
    leave_open(old, call("a", 5))
    with closing(sqlite3.connect(old)) as database:
        query = "select value from ledger where key = 'identity'"
        [identity] = database.execute(query).fetchone()
        [call_id] = database.execute("select id from calls").fetchone()
    paid = answered(Reserved(call_id=call_id, reserved_nano=5), 1)
    path = Unbooked("postgresql://where/no/file/is", 7, identity).keep([(call("a", 5), paid)])
    old.rename(new)
    Ledger(tmp_path / "other.sqlite", is_durable=False).close()
    assert path.exists(), "it is no other ledger's"
    Ledger(new, is_durable=False).close()
    assert not path.exists()
    assert ledger_status(new).spent_usd == pytest.approx(1e-9)


def test_answers_that_a_living_process_keeps_are_left_to_it(tmp_path):
    ledger = str(tmp_path / "l[1].sqlite")
    for owner in (1, 2, 3):
        Unbooked(ledger, owner, "me").keep([kept_pair(owner)])
    Unbooked(str(tmp_path / "l1.sqlite"), 4, "me").keep([kept_pair(4)])
    found = list(Unbooked(ledger, 9, "me").left_behind(lambda owner: owner == 1))
    assert [(path.name, pairs) for path, pairs in found] == [
        (f"l[1].sqlite-unbooked-{owner}.jsonl", [kept_pair(owner)]) for owner in (2, 3)
    ]


# --- limits and overruns


def test_a_limit_stays_until_it_is_changed_or_lifted(tmp_path):
    with TeacherServer(script={"content": "yes " * 300}) as server:
        [teacher] = server.teachers([MODEL])

        def run(n, **limits):
            return ask(
                make_states(20, n_sessions=20, prefix=f"r{n}-"), [teacher], tmp_path / "l",
                limits_usd=limits,
            )  # fmt: skip

        scope = f"teacher:{teacher.name}"
        assert run(1, **{scope: 0.006, "day": 3.0}).stop_reason == "budget"
        assert run(2).n_sent == 0, "a run that does not name the limit does not lift it"
        assert run(3, **{scope: None}).stop_reason == "completed"


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_bills_above_the_bound_raise_reservations_by_their_factor_once(tmp_path, factor, caplog):
    """The factor must not compound over the calls in flight."""
    states = make_states(120, n_sessions=120)
    with TeacherServer(script={"content": "yes " * 9}, faults=[{"kind": "overcharge"}]) as server:
        [teacher] = server.teachers([MODEL])
        teacher = teacher.model_copy(update={"params": {"max_completion_tokens": 16}})
        plain = ask(states[:1], [teacher], tmp_path / "plain", usd=1).spent_usd / 2
        with sqlite3.connect(tmp_path / "plain") as database:
            [(bound,)] = database.execute("select reserved from calls").fetchall()
        database.close()
        server.set_faults([{"kind": "overcharge", "factor": factor * bound / 1e9 / plain}])
        report = ask(states, [teacher], tmp_path / "l", usd=50, max_concurrency=32)
    assert "more than its bound" in caplog.text
    with sqlite3.connect(tmp_path / "l") as database:
        [(most,)] = database.execute("select max(reserved) from calls").fetchall()
    database.close()
    assert most <= bound * factor * 1.1
    assert len([row for row in report.actions if row.error_code is None]) == 120


# --- earlier versions


def test_a_ledger_of_version_1_is_brought_up_to_date_and_what_it_stored_unreadable_is_asked_again(
    tmp_path,
):
    path = tmp_path / "ledger.sqlite"
    shutil.copy(VERSION_1, path)
    sent = "2026-11-22T10:19:28.810+00:00"
    with closing(sqlite3.connect(path)) as old, old:
        old.execute(
            "insert into calls(id, request_sha, state_id, teacher, model, run_id, scopes, owner, "
            "state, reserved, intent_at) values(0, 'e', 's', 't', 'm', 'r', 'day:2026-11-01', 2, "
            "'open', 1, ?)",
            (sent,),
        )
        old.execute("update scopes set held = 1 where name = 'day:2026-11-01'")
    connect(path).close()
    with closing(sqlite3.connect(path)) as new:
        due = dict(new.execute("select id, due_at from calls where due_at is not null").fetchall())
    # It was ten minutes at most that a call of version 1 took.
    over = datetime(2026, 11, 22, 10, 29, 28, 810_000, tzinfo=UTC)
    assert {datetime.fromisoformat(at) for at in due.values()} == {over}
    assert set(due) == {0, (2 << 32) + 1}
    states = [
        {
            "state_id": f"s{i}",
            "session_id": f"session-{i}",
            "messages": [{"role": "user", "content": f"task {i}"}],
            "student_action": {"role": "assistant", "content": "ls"},
        }
        for i in range(4)
    ]
    with TeacherServer(script={"content": "yes"}) as server:
        [teacher] = server.teachers([MODEL])
        assert len(replay_trace_sync(states, [teacher], 0, ledger=path)) == 1
        status = ledger_status(path)
        # Three answers of four hold a number where a text belongs. They stay paid.
        assert (status.spent_usd, status.calls) == (
            8.024e-05,
            {"answered": 1, "failed": 3, "unknown": 2},
        )
        assert {each.why for each in lost_calls(path)} == {"its process died"}
        again = replay_trace_sync(states, [teacher], 0.04, ledger=path)
        assert [row.error_code for row in again] == [None] * 4
        assert server.bill().n_charged == 3
    [(version,)] = connect(path).query("select value from ledger where key = 'schema_version'")
    assert version == SCHEMA_VERSION

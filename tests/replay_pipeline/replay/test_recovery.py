"""What a crash, a full disk, a lost file or an older version leaves behind is found again."""

import asyncio
import shutil
import sqlite3
from pathlib import Path

import pytest

from replay_pipeline.errors import LedgerError, TeacherTimeoutError
from replay_pipeline.replay import (
    RetryPolicy,
    ledger_status,
    reconcile,
    replay_batch,
    replay_states,
    replay_trace_sync,
)
from replay_pipeline.replay.calls import InDoubt, NewCall, Refused, Reserved, Settlement
from replay_pipeline.replay.database import connect
from replay_pipeline.replay.ledger import Ledger
from replay_pipeline.replay.openrouter import Client
from replay_pipeline.replay.unbooked import Unbooked
from replay_pipeline.testing import TeacherServer
from tests.replay_pipeline.replay.conftest import QUICK, make_states
from tests.replay_pipeline.replay.test_ledger import answered, call, scopes_of
from tests.replay_pipeline.replay.test_odd_replies import completion, raw
from tests.support.odd_server import OddServer

VERSION_1 = Path(__file__).parents[2] / "data" / "ledgers" / "version_1.sqlite"
MODEL = "deepseek/deepseek-v4-pro"


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
        ledger.open_scopes({name for each in calls for name in each.scopes}, {}, by="test")
        assert all(isinstance(ledger.reserve(each).result(timeout=60), Reserved) for each in calls)


# --- lost calls


def test_asking_a_lost_call_again_takes_its_reservation_over(tmp_path):
    leave_open(tmp_path / "l", call("a", 60), call("b", 40))
    with Ledger(tmp_path / "l", is_durable=False) as ledger:
        ledger.open_scopes((), {"day:x": 100}, by="test")
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
        one.open_scopes((), {"day:x": 100}, by="test")
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
        other.open_scopes((), {"day:x": 100}, by="test")
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


def test_reconcile_shows_lost_calls_and_settles_those_that_are_over(tmp_path):
    early = NewCall(
        request_sha="a", state_id="s1", teacher="t", model="m", run_id="r", scopes=("day:x",),
        reserved_nano=10, timeout_s=0,
    )  # fmt: skip
    late = NewCall(
        request_sha="b", state_id="s2", teacher="t", model="m", run_id="r", scopes=("day:x",),
        reserved_nano=20, timeout_s=600,
    )  # fmt: skip
    leave_open(tmp_path / "l", early, late)
    shown = reconcile(tmp_path / "l")
    assert [(each.state_id, each.reserved_usd) for each in shown] == [("s1", 1e-8), ("s2", 2e-8)]
    assert scopes_of(tmp_path / "l")["day:x"] == [0, 0, 30, 0]
    settled = reconcile(tmp_path / "l", settle=True)
    assert [each.what for each in settled] == ["booked at its bound", "may still be running"]
    assert scopes_of(tmp_path / "l")["day:x"] == [10, 0, 20, 0]
    assert [each.state_id for each in reconcile(tmp_path / "l")] == ["s2"]


def test_reconcile_asks_the_endpoint_for_its_record(tmp_path):
    with TeacherServer(script={"content": "yes"}) as server:
        [teacher] = server.teachers([MODEL])
        [row] = ask(make_states(1), [teacher], tmp_path / "first").actions
        path = tmp_path / "l"
        leave_open(path, call("a", 10**9, timeout_s=0))
        with sqlite3.connect(path) as database:
            database.execute(
                "update calls set teacher = ?, generation_id = ?", (teacher.name, row.generation_id)
            )
        database.close()
        [found] = reconcile(path, [teacher], settle=True)
    assert (found.cost_usd, found.what) == (row.cost_usd, "booked at the endpoint's record")
    assert scopes_of(path)["day:x"] == [round(row.cost_usd * 1e9), 0, 0, 0]


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
            ask(states, [teacher], tmp_path / "l", max_concurrency=8)
        monkeypatch.undo()
        n_charged = server.bill().n_charged
        assert 8 <= n_charged < 40, "it stops sending at once"
        kept = replay_trace_sync(states, [teacher], 0, ledger=tmp_path / "l")
        assert [row.error_code for row in kept].count(None) == n_charged
        assert ledger_status(tmp_path / "l").spent_usd == server.bill().total_nano / 1e9
        assert server.bill().n_charged == n_charged
    assert list(tmp_path.glob("*unbooked*")) == []


def test_where_the_folder_takes_nothing_answers_are_kept_under_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "file").write_text("no folder")
    unbooked = Unbooked(str(tmp_path / "file" / "ledger.sqlite"), 7)
    path = unbooked.keep([(call("a", 5), answered(Reserved(call_id=1, reserved_nano=5), 3))])
    assert path.is_relative_to(tmp_path / "home")
    [(found, [(kept, settlement)])] = list(unbooked.left_behind(lambda _: False))
    assert (found, kept.request_sha, settlement.cost_nano) == (path, "a", 3)


def test_where_no_place_takes_an_answer_each_is_named_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    unbooked = Unbooked(str(tmp_path / "file" / "ledger.sqlite"), 7)
    with pytest.raises(LedgerError) as told:
        unbooked.keep([(call("a", 5), answered(Reserved(call_id=1, reserved_nano=5), 3))])
    beside, at_home = str(told.value).split("; ")
    assert beside.startswith(f"{tmp_path}/file/ledger.sqlite-unbooked-7.jsonl: ")
    assert at_home.startswith(f"{tmp_path}/file/.cache/replay-pipeline/")
    assert all("[Errno " in each for each in (beside, at_home))


def test_what_a_lost_ledger_was_charged_for_is_spent_and_nothing_else(tmp_path):
    path = tmp_path / "l"
    settled = [
        (call(state, 5), Settlement(call_id=n, state=state, cost_nano=cost))
        for n, (state, cost) in enumerate(
            {"answered": 4, "failed": 3, "unknown": 2, "withdrawn": 1}.items(), start=1
        )
    ]
    Unbooked(str(path), 7).keep(settled)
    Ledger(path, is_durable=False).close()
    assert scopes_of(path) == {"day:x": [7, 0, 0, 7]}
    assert list(tmp_path.glob("*unbooked*")) == []


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_ledger_that_is_gone_stops_the_run_and_its_answers_go_into_the_next(tmp_path, how):
    path = tmp_path / "ledger.sqlite"
    states = make_states(60, n_sessions=60)
    with TeacherServer(script={"content": "yes"}, latency=0.1) as server:
        [teacher] = server.teachers([MODEL])

        def lose(progress):
            # While some calls are in flight, which are answered when the file is gone.
            n_in_flight = server.bill().n_requests - progress.n_done
            if progress.n_done >= 8 and n_in_flight >= 4 and list(tmp_path.glob("*-wal")):
                for each in tmp_path.glob("ledger.sqlite*"):
                    if "owner" not in each.name:
                        each.unlink()
                if how == "replaced":
                    Ledger(path).close()

        with pytest.raises(LedgerError, match="deleted or replaced"):
            ask(states, [teacher], path, max_concurrency=8, on_progress=lose)
        n_charged = server.bill().n_charged
        assert n_charged < 60
        [kept] = tmp_path.glob("*unbooked*")
        n_kept = len(kept.read_text().split())
        report = ask(states, [teacher], path, usd=0)
    assert n_kept > 0
    assert len(report.actions) == n_kept
    assert ledger_status(path).spent_usd == pytest.approx(report.spent_usd)


# --- limits and overruns


def test_a_limit_stays_until_it_is_changed_or_lifted_and_every_change_is_kept(tmp_path):
    with TeacherServer(script={"content": "yes " * 300}) as server:
        [teacher] = server.teachers([MODEL])

        def run(n, **limits):
            return ask(
                make_states(20, n_sessions=20, prefix=f"r{n}-"), [teacher], tmp_path / "l",
                limits_usd=limits, tags=("t",),
            )  # fmt: skip

        scope = f"teacher:{teacher.name}"
        assert run(1, **{scope: 0.006, "tag:t": 3.0}).stop_reason == "budget"
        assert run(2).n_sent == 0, "a run that does not name the limit does not lift it"
        assert run(3, **{scope: None}).stop_reason == "completed"
    changes = [(c.scope, c.limit_usd) for c in ledger_status(tmp_path / "l").limits]
    assert changes == [("tag:t", 3.0), (scope, 0.006), (scope, None)]


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_bills_above_the_bound_raise_reservations_by_their_factor_once(tmp_path, factor):
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
    assert report.n_overruns >= 1
    with sqlite3.connect(tmp_path / "l") as database:
        [(most,)] = database.execute("select max(reserved) from calls").fetchall()
    database.close()
    assert most <= bound * factor * 1.1
    assert len([row for row in report.actions if row.error_code is None]) == 120


# --- earlier versions


def test_a_ledger_of_version_1_is_brought_up_to_date_and_its_poison_mended(tmp_path):
    path = tmp_path / "ledger.sqlite"
    shutil.copy(VERSION_1, path)
    with TeacherServer(script={"content": "yes"}) as server:
        [teacher] = server.teachers([MODEL])
    states = [
        {
            "state_id": f"s{i}",
            "session_id": f"session-{i}",
            "messages": [{"role": "user", "content": f"task {i}"}],
            "student_action": {"role": "assistant", "content": "ls"},
        }
        for i in range(4)
    ]
    actions = replay_trace_sync(states, [teacher], 0, ledger=path)
    assert [row.error_code for row in actions] == [None] * 4
    assert actions[0].generation_id == "123"
    assert actions[1].provider is None
    assert actions[2].n_cached_tokens == 5
    status = ledger_status(path)
    assert (status.spent_usd, status.calls) == (8.024e-05, {"answered": 4, "unknown": 1})
    [limit] = [change for change in status.limits if change.scope == "teacher:deepseek-v4-pro"]
    assert (limit.limit_usd, limit.set_by) == (0.05, "version 1")
    [lost] = reconcile(path)
    assert (lost.state_id, lost.why, lost.reserved_usd) == ("lost", "its process died", 0.005)
    [(version,)] = connect(path).query("select value from ledger where key = 'schema_version'")
    assert version == "2"


# --- batches


def batch(states, teachers, ledger, **options):
    return replay_batch(
        states, teachers, max_total_usd=1, ledger=ledger, poll_s=0.01, is_durable=False, **options
    )


def test_a_batch_whose_name_was_never_learnt_is_found_by_its_key(tmp_path, monkeypatch):
    states = make_states(6)
    submit = Client.submit_batch

    async def killed_after(self, *args):
        await submit(self, *args)
        raise TeacherTimeoutError("the process was killed here")

    with TeacherServer(script={"content": "yes"}) as server:
        teachers = server.teachers([MODEL])
        monkeypatch.setattr(Client, "submit_batch", killed_after)
        with pytest.raises(TeacherTimeoutError):
            batch(states, teachers, tmp_path / "l")
        monkeypatch.undo()
        report = batch(states, teachers, tmp_path / "l")
        assert (report.n_sent, len(report.actions)) == (0, 6)
        assert server.bill().n_charged == 6
        assert server.bill().n_duplicates == 0


def test_a_batch_that_never_arrived_gives_its_money_back_and_is_handed_in_again(
    tmp_path, monkeypatch
):
    async def killed_before(*_):
        raise TeacherTimeoutError("the process was killed here")

    with TeacherServer(script={"content": "yes"}) as server:
        teachers = server.teachers([MODEL])
        monkeypatch.setattr(Client, "submit_batch", killed_before)
        with pytest.raises(TeacherTimeoutError):
            batch(make_states(6), teachers, tmp_path / "l")
        monkeypatch.undo()
        report = batch(make_states(6), teachers, tmp_path / "l")
    assert report.n_sent == server.bill().n_charged == len(report.actions) == 6
    assert ledger_status(tmp_path / "l").unknown_usd == 0


def test_a_batch_is_collected_by_a_run_over_some_of_its_states(tmp_path, monkeypatch):
    collect = "replay_pipeline.replay.batch._BatchRun._collect"
    states = make_states(6)

    async def leave(*_):
        return None

    with TeacherServer(script={"content": "yes"}) as server:
        teachers = server.teachers([MODEL])
        monkeypatch.setattr(collect, leave)
        assert batch(states, teachers, tmp_path / "l").n_sent == 6
        monkeypatch.undo()
        report = batch(states[1:3], teachers, tmp_path / "l")
        assert [row.state_id for row in report.actions] == ["s1", "s2"]
        everything = replay_trace_sync(states, teachers, 0, ledger=tmp_path / "l")
    assert [row.state_id for row in everything] == [f"s{i}" for i in range(6)]
    assert {row.error_code for row in everything} == {None}
    assert {row.family for row in everything} == {"deepseek"}

"""The ledger under random interleavings, threads, processes and crashes."""

import random
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_pipeline.errors import ConfigError, LedgerError, MissingDependencyError
from replay_pipeline.replay import database as databases
from replay_pipeline.replay import ledger_status
from replay_pipeline.replay.calls import Known, NewCall, Refused, Reserved, Settlement
from replay_pipeline.replay.database import connect, exists
from replay_pipeline.replay.ledger import Ledger

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
    ledger.open_scopes((), limits, by="test")
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
        ledger.open_scopes((), {"day:x": limit}, by="test")
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
        ledger.open_scopes((), {"day:x": 100}, by="test")
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
        one.open_scopes((), {"day:x": 100}, by="test")
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
        ledger.open_scopes((), {"day:x": 100}, by="test")
    database = connect(tmp_path / "l")
    with pytest.raises(LedgerError, match="refused a booking"):
        database.query("update scopes set held = held + 101 where name = 'day:x'")
    database.close()


def test_a_closed_ledger_leaves_open_calls_unknown_and_their_money_held(tmp_path):
    with Ledger(tmp_path / "l", is_durable=False) as ledger:
        ledger.open_scopes((), {"day:x": 100}, by="test")
        ledger.reserve(call("a", 30)).result(timeout=60)
        waiting = ledger.reserve(call("b", 90))
    with pytest.raises(LedgerError, match="was closed"):
        waiting.result(timeout=60)
    assert scopes_of(tmp_path / "l")["day:x"] == [0, 0, 30, 0]
    with Ledger(tmp_path / "l", is_durable=False) as again:
        in_doubt = again.reserve(call("a", 30)).result(timeout=60)
        [orphan] = in_doubt.lost
        retried = again.reserve(call("a", 30, lost=(orphan.call_id,))).result(timeout=60)
        again.settle(answered(retried, 4, recovers=(orphan.call_id,))).result(timeout=60)
    assert scopes_of(tmp_path / "l")["day:x"] == [4, 0, 0, 0]
    assert ledger_status(tmp_path / "l").calls == {"answered": 1, "recovered": 1}


def test_a_limit_can_be_lowered_below_what_is_spent_and_then_nothing_more_fits(tmp_path):
    with Ledger(tmp_path / "l", is_durable=False) as ledger:
        ledger.open_scopes((), {"day:x": 100}, by="test")
        reserved = ledger.reserve(call(1, 60)).result(timeout=60)
        ledger.open_scopes((), {"day:x": 10}, by="test")
        ledger.settle(answered(reserved, 50)).result(timeout=60)
        assert ledger.reserve(call(2, 1)).result(timeout=60) == Refused(scope="day:x")
        ledger.open_scopes((), {"day:x": 52}, by="test")
        assert isinstance(ledger.reserve(call(3, 2)).result(timeout=60), Reserved)


# --- the database


def told_by(error, action, *arguments, **options):
    with pytest.raises(error) as told:
        action(*arguments, **options)
    return str(told.value)


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


@pytest.mark.parametrize(("is_durable", "synchronous"), [(True, 2), (False, 1)])
def test_only_a_durable_ledger_waits_for_the_disk_at_every_commit(
    tmp_path, is_durable, synchronous
):
    with closing(connect(tmp_path / "l", is_durable=is_durable)) as database:
        assert database.query("pragma synchronous") == [(synchronous,)]
    with closing(connect(tmp_path / "l")) as database:
        assert database.query("pragma synchronous") == [(2,)], "unless it is told otherwise"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("mysql://me:secret@host/db", "mysql://me@host/db"),
        ("mysql://me:sec@ret:too@host/db", "mysql://me@host/db"),
        ("mysql://host/db", "mysql://host/db"),
    ],
)
def test_a_database_of_another_kind_is_refused_without_its_password(url, shown):
    assert told_by(ConfigError, connect, url) == (
        f"ledger {shown}: a path, sqlite:///path or postgresql://... is needed"
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
        assert database.query("select value from ledger") == [("2",)]
        told = told_by(LedgerError, database.query, "delete from ledger")
    assert told == (
        f"{path}: cannot be read or written (attempt to write a readonly database); check free "
        "space and permissions"
    )


class ReadOnlyDisk(sqlite3.Connection):
    """SQLite can make no index of a log there, and so reads only what it is told won't change."""

    def __init__(self, url, **options):
        super().__init__(url, **options)
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
            assert database.query("select value from ledger") == [("2",)]
    log.write_bytes(b"what was written last")
    told = told_by(LedgerError, connect, path, is_read_only=True)
    assert "unable to open database file" in told


def test_a_ledger_of_another_version_is_left_as_it_is(tmp_path):
    path = tmp_path / "l"
    for version, advice in (("3", ""), ("1", "; the next replay brings it up to date")):
        with closing(connect(path)) as database:
            database.query("update ledger set value = ?", (version,))
        told = told_by(LedgerError, connect, path, is_read_only=True)
        assert told == f"{path}: a ledger of version {version}, this program keeps 2{advice}"
        if version == "3":
            assert told_by(LedgerError, connect, path) == told
            with closing(sqlite3.connect(path)) as database, database:
                database.execute("update ledger set value = '2'")


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
            ("schema_version", "2"),
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


def test_where_there_are_no_locks_nobody_else_is_taken_to_live(tmp_path, monkeypatch):
    monkeypatch.setattr(databases, "fcntl", None)
    with closing(connect(tmp_path / "l")) as mine, closing(connect(tmp_path / "l")) as theirs:
        assert mine.claim(5)
        assert not theirs.is_alive(5)
        assert theirs.claim(5)
    assert not (tmp_path / "l-owner-5").exists()


CHILD = """
import os, random, sys
from collections import deque
from concurrent.futures import wait
sys.path.insert(0, sys.argv[1])
from replay_pipeline.replay.calls import *
from replay_pipeline.replay.ledger import *
path, seed, kill_at = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
chance = random.Random(seed)
with Ledger(path, is_durable=False) as ledger:
    ledger.open_scopes((), {"day:x": 200_000, "teacher:a": 150_000}, by="test")
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
        one.open_scopes((), {"day:x": 100, "tag:50%": None}, by="test")
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

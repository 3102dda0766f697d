import asyncio
import threading

import pytest

from replay_pipeline.errors import ConfigError, LedgerError
from replay_pipeline.replay import ledger_status, replay_batch, replay_states
from replay_pipeline.replay.dialects.wellformed import sent_name
from replay_pipeline.testing import TeacherServer
from replay_pipeline.types import TeacherSpec
from tests.replay_pipeline.replay.conftest import make_states

pytestmark = pytest.mark.slow


def batch(states, teachers, usd, ledger, **options):
    options = {"poll_s": 0.01, "is_durable": False, **options}
    return replay_batch(states, teachers, max_total_usd=usd, ledger=ledger, **options)


def test_a_batch_costs_half_and_its_rows_are_the_servers_bill(tmp_path):
    states = make_states(12)
    with (
        TeacherServer(script={"content": "yes"}) as one,
        TeacherServer(script={"content": "yes"}) as two,
    ):
        report = batch(states, one.teachers(), 1, tmp_path / "a")
        alone = asyncio.run(
            replay_states(
                [{**s, "session_id": s["state_id"]} for s in states], two.teachers(),
                max_total_usd=1, ledger=tmp_path / "b", is_durable=False,
            )
        )  # fmt: skip
    assert (report.n_sent, report.stop_reason) == (36, "completed")
    assert [a.state_id for a in report.actions] == [a.state_id for a in alone.actions]
    assert sum(round(a.cost_usd * 1e9) for a in report.actions) == one.bill().total_nano
    assert report.spent_usd == pytest.approx(alone.spent_usd / 2, rel=0.2)
    assert ledger_status(tmp_path / "a").spent_usd == report.spent_usd
    again = batch(states, one.teachers(), 1, tmp_path / "a")
    assert (again.n_sent, again.n_cached) == (0, 36)
    assert again.actions == report.actions


def test_a_batch_holds_no_request_that_breaks_a_rule_and_no_money_for_it(tmp_path):
    states = make_states(4)
    with TeacherServer(script={"content": "yes"}) as server:
        good, bad, *_ = server.teachers()
        bad = bad.model_copy(update={"params": {"temperature": 3.0}})
        report = batch(states, [good, bad], 1, tmp_path / "l")
        asked = server.bill().n_charged
    rows = [action for action in report.actions if action.teacher == bad.name]
    assert (report.n_sent, asked, len(report.actions)) == (4, 4, 8)
    assert {row.error_code for row in rows} == {"invalid_request"}
    assert all("not sent" in (row.error_message or "") for row in rows)
    status = ledger_status(tmp_path / "l")
    assert status.calls == {"answered": 4}
    assert (status.held_usd, status.spent_usd) == (0, report.spent_usd)


def test_an_answer_of_a_batch_calls_a_tool_by_the_name_that_the_session_has(tmp_path):
    name = "mcp__a.b__read"
    tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    states = [{**state, "tools": [tool]} for state in make_states(1)]
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": sent_name(name), "arguments": "{}"},
    }
    with TeacherServer(script={"content": None, "tool_calls": [call]}) as server:
        report = batch(states, server.teachers()[:1], 1, tmp_path / "l")
    (row,) = report.actions
    assert row.action["tool_calls"][0]["function"]["name"] == name


def test_a_batch_that_was_left_is_found_again_and_paid_once(tmp_path):
    states = make_states(6)
    stop = threading.Event()
    with TeacherServer(script={"content": "yes"}) as server:

        def has_reserved_all():
            try:
                return ledger_status(tmp_path / "l").calls.get("open", 0) == 18
            except LedgerError:  # it is being created
                return False

        def leave():
            while not has_reserved_all():
                pass
            stop.set()

        threading.Thread(target=leave).start()
        left = batch(states, server.teachers(), 1, tmp_path / "l", stop=stop, poll_s=60)
        assert left.stop_reason == "stopped"
        assert left.actions == []
        single = asyncio.run(
            replay_states(
                states, server.teachers(), max_total_usd=1, ledger=tmp_path / "l", is_durable=False
            )
        )
        assert single.skipped["in_batch"] == 6 * len(server.teachers()) - single.n_sent
        taken = batch(states, server.teachers(), 1, tmp_path / "l")
    assert len(taken.actions) == 18
    assert server.bill().n_duplicates == 0
    assert ledger_status(tmp_path / "l").unknown_usd == 0


def test_a_batch_keeps_to_its_budget_and_failed_items_cost_nothing(tmp_path):
    states = make_states(20)
    with TeacherServer(script={"content": "yes"}) as server:
        [teacher] = server.teachers(["z-ai/glm-4.6"])
        report = batch(states, [teacher], 0.02, tmp_path / "a")
        assert report.stop_reason == "budget"
        assert 0 < report.n_sent < 20
        assert server.bill().total_nano <= 0.02e9
    with TeacherServer({"s0": {"z-ai/glm-4.6": {"content": "yes"}}}) as server:
        [teacher] = server.teachers(["z-ai/glm-4.6"])
        report = batch(states, [teacher], 1, tmp_path / "b")
    assert report.newly_spent_usd == server.bill().total_nano / 1e9
    assert ledger_status(tmp_path / "b").calls == {"answered": 1, "failed": 19}


def test_limits_of_a_batch_hold_by_teacher_partition_and_tag(tmp_path):
    with TeacherServer(script={"content": "yes"}) as server:
        for scope in ("teacher:glm", "partition", "tag:nightly"):
            report = batch(
                make_states(20, prefix=scope),
                server.teachers()[2:],
                10,
                tmp_path / f"{scope}.sqlite",
                limits_usd={scope: 0.02},
                partition="batch-1",
                tags=("nightly",),
            )
            assert 0 < report.n_sent < 20, scope
            assert 0 < report.spent_usd <= 0.02


def test_only_routers_with_a_batch_api_take_batches(tmp_path):
    with pytest.raises(ConfigError, match="no batch API"):
        batch(make_states(1), [TeacherSpec(name="x", model="m", base_url="https://x/v1")], 1, "l")

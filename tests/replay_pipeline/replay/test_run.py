import asyncio
import logging
import sqlite3
import threading
import time
from contextlib import closing
from datetime import UTC, datetime

import pytest

from replay_pipeline.errors import ConfigError, PriceError
from replay_pipeline.ingesters import ClaudeCodeIngester
from replay_pipeline.replay import (
    check_teachers,
    estimate,
    ledger_status,
    replay_facts,
    replay_in_thread,
    replay_states,
    replay_trace,
    replay_trace_sync,
)
from replay_pipeline.replay.dialects.prices import PriceBook
from replay_pipeline.settings import config_dir
from replay_pipeline.storage.trust import host_of, trust_host
from replay_pipeline.testing.catalog import served
from replay_pipeline.testing.sample import ANSWERS_FILE, SESSIONS_DIR
from replay_pipeline.types import TeacherSpec
from tests.replay_pipeline.replay.conftest import QUICK, make_states
from tests.support.teachers import TeacherServer

pytestmark = pytest.mark.slow


def replay(states, teachers, usd, ledger, **options):
    options = {"retry": QUICK, "is_durable": False, **options}
    return asyncio.run(replay_states(states, teachers, max_total_usd=usd, ledger=ledger, **options))


def recorded(ledger, states, teachers):
    return replay_trace_sync(states, teachers, 0, ledger=ledger)


def test_every_state_is_answered_by_every_teacher_in_order(server, tmp_path):
    states = make_states(10)
    actions = asyncio.run(
        replay_trace(states, server.teachers(), 1.0, ledger=tmp_path / "ledger.sqlite")
    )
    asked = [(state["state_id"], t.name) for state in states for t in server.teachers()]
    assert [(action.state_id, action.teacher) for action in actions] == asked
    assert {action.action["content"] for action in actions} == {"I would read the tests first."}


def test_rows_ledger_and_the_servers_bill_are_equal_to_the_nano_dollar(tmp_path):
    with TeacherServer(script={"content": "yes"}) as server:
        report = replay(make_states(30), server.teachers(), 1.0, tmp_path / "l")
    rows = sum(round(action.cost_usd * 1e9) for action in report.actions)
    status = ledger_status(tmp_path / "l")
    assert rows == server.bill().total_nano == round(status.spent_usd * 1e9)
    assert report.spent_usd == report.newly_spent_usd == pytest.approx(rows / 1e9, abs=1e-12)
    assert status.held_usd == status.unknown_usd == 0


def test_a_second_run_asks_nothing_and_needs_no_network(tmp_path):
    states = make_states(10)
    with TeacherServer(script={"content": "yes"}) as server:
        teachers = server.teachers()
        first = replay(states, teachers, 1.0, tmp_path / "l")
    second = replay(states, teachers, 1.0, tmp_path / "l")
    assert (second.n_sent, second.n_cached) == (0, 30)
    assert second.actions == first.actions
    assert second.spent_usd == first.spent_usd
    assert second.newly_spent_usd == 0
    assert recorded(tmp_path / "l", states, teachers) == first.actions


def test_answers_that_were_paid_before_count_against_the_ceiling(tmp_path):
    with TeacherServer(script={"content": "yes"}) as server:
        first = replay(make_states(10), server.teachers(), 1.0, tmp_path / "l")
        ceiling = first.spent_usd * 1.01
        second = replay(make_states(40), server.teachers(), ceiling, tmp_path / "l")
    assert second.n_sent == 0
    assert second.stop_reason == "budget"
    assert second.skipped == {"budget": 90}
    assert second.actions == first.actions


def test_the_budget_is_never_passed_and_is_used_up(tmp_path):
    states = make_states(400, n_sessions=100)
    faults = [
        {"kind": "status", "status": 429, "probability": 0.1, "retry_after_s": 0.001},
        {"kind": "error_200", "status": 502, "probability": 0.1},
    ]
    answer = "word " * 3000  # close to its bound, so that the last reservation is a fair one
    with TeacherServer(script={"content": answer}, faults=faults, latency=0.001) as server:
        teachers = [
            t.model_copy(update={"params": {"max_completion_tokens": 3800}})
            for t in server.teachers()
        ]
        report = replay(states, teachers, 1.5, tmp_path / "l", max_concurrency=64)
    spent = server.bill().total_nano / 1e9
    assert spent <= 1.5
    assert spent >= 0.99 * 1.5
    assert report.stop_reason == "budget"
    assert report.spent_usd == pytest.approx(spent, abs=1e-6)
    assert len(report.actions) + sum(report.skipped.values()) == 1200


def test_a_budget_of_zero_sends_nothing_and_needs_no_key(tmp_path):
    report = asyncio.run(
        replay_states(make_states(3), max_total_usd=0, ledger=tmp_path / "l", is_durable=False)
    )
    assert (report.actions, report.stop_reason) == ([], "budget")
    assert report.skipped == {"budget": 9}


@pytest.mark.parametrize("usd", [-1, float("nan"), float("inf")])
def test_a_budget_that_is_no_amount_is_refused(tmp_path, usd):
    with pytest.raises(ConfigError, match="number of dollars"):
        replay(make_states(1), [TeacherSpec(name="x", model="a/b")], usd, tmp_path / "l")


def test_a_missing_key_is_named_before_anything_is_sent(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"teacher deepseek: OPENROUTER_API_KEY is not set"):
        replay(make_states(1), (TeacherSpec(name="deepseek", model="a/b"),), 1, tmp_path / "l")


def test_an_unknown_model_is_named_with_close_ones(server, tmp_path):
    [teacher] = server.teachers(["qwen/qwen3-codr"])
    with pytest.raises(ConfigError, match=r"does not serve qwen/qwen3-codr; .*qwen/qwen3-coder"):
        replay(make_states(1), [teacher], 1, tmp_path / "l")


def test_a_price_of_a_million_tokens_is_not_taken_for_that_of_one(tmp_path):
    teacher = TeacherSpec(name="t", model="a/b", price={"prompt": 3, "completion": "15"})
    with pytest.raises(
        ConfigError, match=r"price prompt=3.0 is \$3,000,000 per million.*write 3e-06"
    ):
        replay(make_states(1), [teacher], 1, tmp_path / "l")


def test_a_variant_that_only_sorts_endpoints_has_the_price_of_its_model(server, tmp_path):
    def asked(variant):
        [teacher] = server.teachers(["qwen/qwen3-coder"])
        teacher = teacher.model_copy(update={"model": f"{teacher.model}:{variant}"})
        return estimate(make_states(1), [teacher]).expected_usd

    assert asked("nitro") == asked("floor") > 0
    with pytest.raises(ConfigError, match=r"no list says what the searches of .*:online cost"):
        asked("online")


def test_a_run_whose_calls_mostly_fail_is_not_completed(tmp_path):
    with TeacherServer(script={"content": "yes"}, faults=[{"kind": "length"}]) as server:
        [teacher] = server.teachers(["qwen/qwen3-coder"])
        report = replay(make_states(9), [teacher], 1, tmp_path / "l")
    assert {row.error_code for row in report.actions} == {"cut_off"}
    assert report.stop_reason == "mostly_failed"
    assert replay_facts(report)["failed_usd"] == pytest.approx(report.spent_usd)


def test_a_teacher_without_a_price_is_refused_under_a_ceiling(tmp_path):
    teacher = TeacherSpec(
        name="local", model="m", base_url="http://127.0.0.1:1/v1", api_key_env=None
    )
    with pytest.raises(PriceError, match="teacher local: no price"):
        replay(make_states(1), [teacher], 1, tmp_path / "l")


def test_terms_that_forbid_distillation_need_acceptance_and_then_the_router_is_told(tmp_path):
    with TeacherServer(script={"content": "yes"}) as server:
        [teacher] = server.teachers(["openai/gpt-5"])
        unknown = replay(make_states(1), [teacher], 1, tmp_path / "l")
        teacher = teacher.model_copy(update={"is_distillable": False})
        with pytest.raises(ConfigError, match="accepted_terms='openai/gpt-5'"):
            replay(make_states(1), [teacher], 1, tmp_path / "l")
        accepted = replay(
            make_states(1), [teacher], 1, tmp_path / "l", accepted_terms=("openai/gpt-5",)
        )
    assert unknown.actions[0].error_code == "not_found"
    assert "distillation" in unknown.actions[0].error_message
    assert accepted.actions[0].is_distillable is False
    assert accepted.actions[0].error_code is None


def test_two_teachers_of_one_name_and_unknown_options_are_refused(server, tmp_path):
    [teacher] = server.teachers(["openai/gpt-5"])
    with pytest.raises(ConfigError, match="two teachers are called gpt-5"):
        replay(make_states(1), [teacher, teacher], 1, tmp_path / "l")
    with pytest.raises(ConfigError, match="windw"):
        replay(make_states(1), [teacher], 1, tmp_path / "l", windw="full")


def test_an_address_that_nobody_answers_is_a_failed_row_that_holds_no_money(tmp_path):
    teacher = TeacherSpec(
        name="local", model="m", base_url="http://127.0.0.1:9/v1", api_key_env=None, dialect="vllm",
        price={"prompt": 1e-6, "completion": 1e-6},
    )  # fmt: skip
    report = replay(make_states(1), [teacher], 1, tmp_path / "l")
    [row] = report.actions
    assert row.error_code == "unreachable"
    assert "cannot be reached" in row.error_message
    assert (report.spent_usd, report.unknown_usd) == (0, 0)


def test_a_wrong_key_stops_its_teacher_only_and_is_never_shown(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("GOOD_KEY", "sk-good-1234567890")
    monkeypatch.setenv("BAD_KEY", "sk-bad-0987654321")
    with TeacherServer(script={"content": "yes"}, key="sk-good-1234567890") as server:
        good, bad = (
            spec.model_copy(update={"api_key_env": name, "max_concurrency": 1})
            for spec, name in zip(server.teachers()[:2], ("GOOD_KEY", "BAD_KEY"), strict=True)
        )
        for teacher in (good, bad):
            trust_host(host_of(server.base_url), key=teacher.api_key_env, folder=config_dir())
        report = replay(make_states(20), [good, bad], 1, tmp_path / "l")
    assert sum(action.error_code is None for action in report.actions) == 20
    [failed] = [action for action in report.actions if action.error_code]
    assert failed.error_code == "key_rejected"
    assert report.skipped == {"teacher_stopped": 19}
    everything = caplog.text + repr(report) + (tmp_path / "l").read_bytes().decode("latin-1")
    assert "sk-good" not in everything
    assert "sk-bad" not in everything


def test_exhausted_credit_stops_the_teacher_and_keeps_what_was_paid(tmp_path):
    with TeacherServer(script={"content": "yes"}, credit_usd=0.0005) as server:
        [teacher] = server.teachers(["z-ai/glm-4.6"])
        teacher = teacher.model_copy(update={"max_concurrency": 1})
        report = replay(make_states(20), [teacher], 1, tmp_path / "l")
    paid = [action for action in report.actions if action.error_code is None]
    assert len(paid) == server.bill().n_charged
    assert [a.error_code for a in report.actions if a.error_code] == ["credit_exhausted"]
    assert report.skipped["teacher_stopped"] == 20 - len(paid) - 1


def test_steps_of_a_session_reach_a_teacher_one_after_the_other(tmp_path):
    states = make_states(24, n_sessions=3, words=1500)
    with TeacherServer(script={"content": "yes"}, latency=0.005) as server:
        [teacher] = server.teachers(["deepseek/deepseek-v4-pro"])
        report = replay(states, [teacher], 1, tmp_path / "l")
        bill = server.bill()
    assert bill.max_in_flight == 3
    by_session = {}
    for state, action in zip(states, report.actions, strict=True):
        by_session.setdefault(state["session_id"], []).append(action)
    for actions in by_session.values():
        ids = [action.generation_id for action in actions]
        assert ids == sorted(ids)
        assert actions[0].n_cached_tokens == 0
        assert all(action.n_cached_tokens > 1500 for action in actions[1:])


def test_an_equal_request_is_paid_once_and_its_cost_counted_once(tmp_path):
    state = make_states(1)[0]
    twins = [{**state, "state_id": f"twin{i}", "session_id": f"own{i}"} for i in range(8)]
    with TeacherServer(script={"content": "yes"}, latency=0.01) as server:
        report = replay(twins, server.teachers(), 1, tmp_path / "l")
    assert server.bill().n_charged == report.n_sent == 3
    assert report.n_cached == 21
    assert len(report.actions) == 24
    assert sum(a.cost_usd for a in report.actions) == pytest.approx(server.bill().total_nano / 1e9)


@pytest.mark.parametrize("scope", ["dya", "teacher:glmm", "partition", "night"])
def test_a_limit_that_would_hold_nothing_back_is_refused(server, tmp_path, scope):
    before = server.bill().n_requests
    with pytest.raises(ConfigError, match=f"limit {scope}=0.5: no call of this run counts"):
        replay_in_thread(
            make_states(1),
            server.teachers(),
            max_total_usd=1,
            ledger=tmp_path / "ledger.sqlite",
            limits_usd={scope: 0.5},
        )
    assert server.bill().n_requests == before


def test_limits_by_day_night_teacher_and_partition_hold_over_runs(tmp_path):
    with TeacherServer(script={"content": "yes"}) as server:
        for scope in ("day", "night", "teacher:glm", "partition"):
            ledger = tmp_path / f"{scope}.sqlite"
            spent = 0.0
            for run in range(3):
                report = replay(
                    make_states(40, prefix=f"{scope}{run}-"),
                    server.teachers()[2:],
                    10,
                    ledger,
                    limits_usd={scope: 0.0105},
                    partition="batch-1",
                    night="2026-01-02",
                )
                spent += report.newly_spent_usd
            assert report.stop_reason == "budget"
            assert 0 < spent <= 0.0105


def test_stop_ends_sending_and_keeps_every_paid_answer(tmp_path):
    stop = threading.Event()
    with TeacherServer(script={"content": "yes"}, latency=0.05) as server:
        report = replay_in_thread(
            make_states(400, n_sessions=40), server.teachers(), max_total_usd=1,
            ledger=tmp_path / "l", stop=stop, tick_s=0.01,
            tick=lambda progress: stop.set() if progress.n_done >= 20 else None,
        )  # fmt: skip
    assert report.stop_reason == "stopped"
    assert len(report.actions) == server.bill().n_charged < 1200
    assert len(report.actions) + report.skipped["stopped"] == 1200
    assert ledger_status(tmp_path / "l").held_usd == 0


def test_an_interrupt_in_the_waiting_thread_drains_what_is_paid_and_is_raised(tmp_path):
    states = make_states(400, n_sessions=40)
    with TeacherServer(script={"content": "yes"}, latency=0.05) as server:

        def tick(progress):
            if progress.n_done >= 10:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            replay_in_thread(
                states, server.teachers(), max_total_usd=1, ledger=tmp_path / "l", tick=tick,
                tick_s=0.01,
            )  # fmt: skip
        kept = recorded(tmp_path / "l", states, server.teachers())
        assert len(kept) == server.bill().n_charged < 1200


def test_it_runs_inside_a_running_event_loop_too(server, tmp_path):
    async def notebook():
        actions = replay_trace_sync(make_states(2), server.teachers(), ledger=tmp_path / "l")
        estimate(make_states(2), server.teachers())
        kept = recorded(tmp_path / "l", make_states(2), server.teachers())
        return actions == kept and len(check_teachers(server.teachers())) == 3

    assert asyncio.run(notebook())


def test_retry_after_is_honoured_and_concurrency_shrinks(tmp_path):
    wait = 0.3
    fault = {"kind": "status", "status": 429, "times": 1, "retry_after_s": wait}
    with TeacherServer(script={"content": "yes"}, faults=[fault]) as server:
        start = time.perf_counter()
        report = replay(make_states(1), server.teachers()[:1], 1, tmp_path / "l")
        took = time.perf_counter() - start
    assert took >= wait
    assert report.actions[0].n_attempts == 2
    assert report.actions[0].error_code is None


def test_a_capacity_of_the_endpoint_is_found_and_all_is_answered(tmp_path):
    faults = [{"kind": "capacity", "max_in_flight": 8}]
    with TeacherServer(script={"content": "yes"}, faults=faults, latency=0.02) as server:
        report = replay(
            make_states(300, n_sessions=60), server.teachers()[:1], 1, tmp_path / "l",
            retry=QUICK.__class__(max_attempts=20, first_wait_s=0.01, max_wait_s=0.05),
        )  # fmt: skip
    assert sum(action.error_code is None for action in report.actions) == 300
    assert server.bill().n_duplicates == 0


def test_the_forecast_is_close_to_the_cost_and_below_the_bound(tmp_path):
    states = make_states(60, n_sessions=6, words=2000)
    with TeacherServer(script={"content": "word " * 90}) as server:
        expected = estimate(states, server.teachers())
        report = replay(states, server.teachers(), 5, tmp_path / "l")
    assert report.forecast_usd == pytest.approx(expected.expected_usd)
    assert report.spent_usd == pytest.approx(expected.expected_usd, rel=0.3)
    assert report.spent_usd < expected.bound_usd
    assert expected.n_calls == 180
    assert sum(t["expected_usd"] for t in expected.to_json()["teachers"]) == pytest.approx(
        expected.expected_usd
    )


def test_an_estimate_adds_up_over_sessions(server):
    states = make_states(3, n_sessions=3, words=2000)
    [whole] = estimate(states, server.teachers()[:1]).teachers
    alone = [estimate([state], server.teachers()[:1]).teachers[0] for state in states]
    # The length of answers isn't known: each estimate is the mean of 300 draws of its own.
    drawn = {"n_completion_tokens": 0.06}
    for name in ("n_calls", "n_prompt_tokens", "n_completion_tokens", "expected_usd", "bound_usd"):
        parts = [getattr(each, name) for each in alone]
        assert min(parts) > 0
        assert getattr(whole, name) == pytest.approx(sum(parts), rel=drawn.get(name, 0.02)), name


def test_the_sample_is_forecast_within_15_percent(tmp_path):
    paths = sorted(SESSIONS_DIR.rglob("*.jsonl"))[::3]  # all of it is as close, and takes longer
    states = [state for path in paths for state in ClaudeCodeIngester().ingest(path)]
    with TeacherServer(ANSWERS_FILE) as server:
        expected = estimate(states, server.teachers())
        report = replay(states, server.teachers(), 5, tmp_path / "l")
        billed_usd = server.bill().total_nano / 1e9
    assert report.stop_reason == "completed"
    assert report.spent_usd == pytest.approx(billed_usd)
    assert expected.expected_usd == pytest.approx(billed_usd, rel=0.15)
    assert expected.low_usd < billed_usd < expected.high_usd


def test_after_the_first_prompt_of_a_session_little_more_is_reserved_than_is_sent(tmp_path):
    history = [{"role": "user", "content": "some words " * 4000}]
    states = []
    for step in range(8):
        states.append({**make_states(1)[0], "state_id": f"s{step}", "messages": list(history)})
        history.append({"role": "assistant", "content": f"step {step}"})
        history.append({"role": "user", "content": "a line of output\n" * 60})
    with TeacherServer(script={"content": "yes"}) as server:
        [teacher, *_] = server.teachers()
        report = replay(states, [teacher], 5, tmp_path / "l", max_completion_tokens=16)
    with closing(sqlite3.connect(tmp_path / "l")) as ledger:
        reserved = [nano for (nano,) in ledger.execute("select reserved from calls order by id")]
    model = served(teacher.model)
    tokens = [(1000 * nano - 16 * model.completion) / model.prompt for nano in reserved]
    sent = [action.n_prompt_tokens for action in report.actions]
    assert all(most >= n for most, n in zip(tokens, sent, strict=True))
    # Of the first prompt only its bytes are known; of the others, what was counted before them.
    assert all(most <= 1.2 * n for most, n in zip(tokens[1:], sent[1:], strict=True))
    assert sum(tokens) <= 1.5 * sum(sent)


def test_an_estimate_leaves_out_what_is_in_the_ledger(server, tmp_path):
    replay(make_states(5), server.teachers(), 1, tmp_path / "l")
    expected = estimate(make_states(8), server.teachers(), ledger=tmp_path / "l")
    assert expected.n_calls == 9


def test_check_teachers_says_what_is_wrong(server, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    fine, keyless, away, unknown = check_teachers(
        [
            server.teachers()[0],
            server.teachers()[1].model_copy(update={"api_key_env": "NO_SUCH_KEY"}),
            TeacherSpec(name="away", model="m", base_url="http://127.0.0.1:9", api_key_env=None),
            server.teachers(["nobody/nothing"])[0],
        ]
    )
    assert (fine.problem, fine.prompt_usd_per_mtok, fine.is_distillable) == (None, 0.44, True)
    assert "NO_SUCH_KEY is not bound" in keyless.problem
    assert not away.is_reachable
    assert "cannot be reached" in away.problem
    assert "does not serve nobody/nothing" in unknown.problem


def test_an_endpoint_that_wants_hours_is_left_alone_for_this_run(tmp_path):
    faults = [{"kind": "status", "status": 429, "retry_after_s": 30_000}]
    with TeacherServer(script={"content": "yes"}, faults=faults) as server:
        [teacher] = server.teachers(["deepseek/deepseek-v4-pro"])
        report = asyncio.run(
            replay_states(
                make_states(20, n_sessions=1), [teacher], max_total_usd=5, ledger=tmp_path / "l"
            )
        )
    assert report.newly_spent_usd == 0
    assert report.n_open == 1
    assert report.skipped["teacher_stopped"] == 19


def test_an_estimate_takes_a_price_list_of_any_age_without_a_network_and_a_replay_does_not(
    tmp_path,
):
    url = "http://127.0.0.1:9/v1"
    listing = [{"id": "a/b", "pricing": {"prompt": "1e-6", "completion": "2e-6"}}]
    then = datetime(2026, 1, 2, tzinfo=UTC)
    PriceBook(folder=tmp_path / "prices", now=lambda: then).remember(url, listing)
    teacher = TeacherSpec(name="t", model="a/b", base_url=url, api_key_env="")
    states, kept = make_states(2), {"price_folder": tmp_path / "prices"}
    (found,) = estimate(states, [teacher], **kept).teachers
    assert found.price_date.startswith("2026-01-02")
    assert found.expected_usd > 0
    with pytest.raises(PriceError, match="are from 2026-01-02"):
        replay_trace_sync(states, [teacher], ledger=tmp_path / "l.sqlite", **kept)

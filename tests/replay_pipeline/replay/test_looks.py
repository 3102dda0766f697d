"""A teacher that looks first is answered, and asked on: each step booked once, and nothing above the ceiling."""

import math

import pytest

from replay_pipeline.replay import estimate, ledger_status, replay_in_thread
from replay_pipeline.replay.ask.rows import teacher_actions_from_table, teacher_actions_table
from replay_pipeline.types import LookAnswer
from tests.replay_pipeline.replay.conftest import QUICK, make_states
from tests.support.looking import ACT, TOOLS, answer_looks, call, look, looking
from tests.support.teachers import TeacherServer

MODEL = "deepseek/deepseek-v4-pro"
STATES = [{**state, "tools": TOOLS} for state in make_states(12, n_sessions=3, words=4000)]
IDS = [state["state_id"] for state in STATES]
N_LOOKS = {state_id: number % 4 for number, state_id in enumerate(IDS)}


def replay(teachers, usd, ledger, *, states=STATES, **options):
    options = {"looks": answer_looks, "retry": QUICK} | options
    return replay_in_thread(states, teachers, max_total_usd=usd, ledger=ledger, **options)


@pytest.fixture(scope="module")
def server():
    with TeacherServer(looking(IDS, MODEL, N_LOOKS)) as running:
        yield running


@pytest.fixture(scope="module")
def teachers(server):
    return server.teachers([MODEL])


def test_looks_are_answered_until_the_teacher_acts_and_all_steps_are_on_its_row(tmp_path):
    with TeacherServer(looking(IDS, MODEL, N_LOOKS)) as server:
        teachers = server.teachers([MODEL])
        report = replay(teachers, 1, tmp_path / "l")
        bill = server.bill()
        again = replay(teachers, 1, tmp_path / "l")
        offline = replay(teachers, 0, tmp_path / "l")
        n_requests = server.bill().n_requests
    assert n_requests == bill.n_requests == report.n_sent == len(IDS) + sum(N_LOOKS.values())
    assert [len(row.looks) for row in report.actions] == [*N_LOOKS.values()]
    assert [row.state_id for row in report.actions] == IDS
    assert all(row.action["tool_calls"] == ACT["tool_calls"] for row in report.actions)
    assert bill.n_duplicates == 0
    status = ledger_status(tmp_path / "l")
    assert round(report.spent_usd * 1e9) == bill.total_nano == round(status.spent_usd * 1e9)
    assert again.n_sent == offline.n_sent == 0
    assert again.actions == offline.actions == report.actions
    deepest = max(report.actions, key=lambda row: len(row.looks))
    texts = [answer.text for step in deepest.looks for answer in step.answers]
    assert [text.split(" ")[0] for text in texts] == ["0", "1", "2"]  # each sees those before
    assert deepest.n_prompt_tokens > 4 * deepest.looks[0].n_prompt_tokens
    stored = teacher_actions_from_table(teacher_actions_table(report.actions))
    assert {row.state_id: row.looks for row in stored} == {
        r.state_id: r.looks for r in report.actions
    }


def test_the_prompt_of_a_step_is_in_the_cache_but_for_what_was_added(server, teachers, tmp_path):
    rows = replay(teachers, 1, tmp_path / "l").actions
    for row in rows:
        for before, step in zip(row.looks, row.looks[1:], strict=False):
            assert step.n_cached_tokens >= 0.8 * before.n_prompt_tokens


def test_without_somebody_to_answer_a_look_is_what_the_teacher_did(server, teachers, tmp_path):
    report = replay(teachers, 1, tmp_path / "l", looks=None)
    assert report.n_sent == len(IDS)
    assert not any(row.looks or row.error_code for row in report.actions)


def test_a_teacher_that_goes_on_looking_or_looks_where_nobody_knows_has_no_vote(tmp_path):
    answers = looking(["s0", "s1"], MODEL, {"s0": 3, "s1": 1})
    answers["s1+1"] = {MODEL: look(9)}
    answers["s2"] = {MODEL: call("TodoWrite", todos=[])}
    answers["s2+1"] = {MODEL: {"role": "assistant", "content": "done"}}
    with TeacherServer(answers) as server:
        report = replay(server.teachers([MODEL]), 1, tmp_path / "l", states=STATES[:3], max_looks=2)
    assert [row.error_code for row in report.actions] == ["still_looking", "cannot_look", None]
    assert [len(row.looks) for row in report.actions] == [2, 1, 1]
    assert report.n_open == 0
    assert report.stop_reason == "completed"
    assert report.actions[0].action["tool_calls"] == look(2)["tool_calls"]


@pytest.mark.parametrize(("share", "reason"), [(1.0, "budget"), (0.0001, "completed")])
def test_the_ceiling_and_the_share_of_looks_hold_within_a_continuation_and_the_next_run_ends_it(
    tmp_path, share, reason
):
    states, answers = STATES[:1], looking(IDS[:1], MODEL, {IDS[0]: 3})

    def long(state, action):
        return [LookAnswer(text="line of a file\n" * 3_000, source="files")]

    few = {"params": {"max_completion_tokens": 200}}
    with TeacherServer(answers) as server:
        [teacher] = server.teachers([MODEL])
        teacher = teacher.model_copy(update=few)
        whole = replay([teacher], 1, tmp_path / "whole", states=states, looks=long)
        bound = estimate(states, [teacher]).bound_usd
    ceiling = bound + whole.actions[0].looks[0].cost_usd if share == 1 else 1
    with TeacherServer(answers) as server:
        [teacher] = server.teachers([MODEL])
        teacher = teacher.model_copy(update=few)
        report = replay(
            [teacher], ceiling, tmp_path / "l", states=states, looks=long, looks_share=share
        )
        [row] = report.actions
        assert row.error_code == "unfinished"
        assert (report.stop_reason, report.n_open) == (reason, 1)
        assert 1 <= len(row.looks) < 3
        assert row.cost_usd == math.fsum(step.cost_usd for step in row.looks)
        assert report.spent_usd + report.unknown_usd <= ceiling
        rest = replay([teacher], 1, tmp_path / "l", states=states, looks=long)
        bill = server.bill()
    assert rest.actions[0].action == whole.actions[0].action
    assert rest.n_sent + report.n_sent == bill.n_charged == whole.n_sent
    assert round(rest.spent_usd * 1e9) == bill.total_nano
    assert bill.n_duplicates == 0


def test_the_estimate_knows_how_often_teachers_look_and_learns_it(server, teachers, tmp_path):
    """Its interval holds the bill, looks included; those of this teacher are 1.5 a question."""
    report = replay(teachers, 1, tmp_path / "l")
    other = [{**state, "state_id": f"x{state['state_id']}"} for state in STATES]
    for state in other:
        state["messages"] = [{"role": "user", "content": "Other. " * 3_500}, *state["messages"]]
    plain = estimate(other, teachers, ledger=tmp_path / "l")
    before = estimate(other, teachers, looks=answer_looks)
    after = estimate(other, teachers, ledger=tmp_path / "l", looks=answer_looks)
    assert plain.expected_usd < before.expected_usd < after.expected_usd
    assert estimate(STATES, teachers, ledger=tmp_path / "l", looks=answer_looks).n_calls == 0
    answers = looking(
        (state["state_id"] for state in other), MODEL, {f"x{k}": n for k, n in N_LOOKS.items()}
    )
    with TeacherServer(answers) as running:
        bill = replay(running.teachers([MODEL]), 1, tmp_path / "m", states=other)
    assert before.low_usd < bill.spent_usd < before.high_usd * 1.5
    assert after.low_usd < bill.spent_usd < after.high_usd
    assert report.forecast_usd is not None

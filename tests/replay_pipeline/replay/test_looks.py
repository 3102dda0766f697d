"""A teacher that looks first is answered, and asked on: each step booked once, and nothing above the ceiling."""

import itertools
import math
import threading
from dataclasses import replace

import pytest

from replay_pipeline.replay import estimate, ledger_status, replay_in_thread
from replay_pipeline.replay.ask.looks import Looks
from replay_pipeline.replay.ask.rows import teacher_actions_from_table, teacher_actions_table
from replay_pipeline.replay.buy.lanes import lanes_of
from replay_pipeline.replay.dialects.base import RequestOptions
from replay_pipeline.types import LookAnswer, TeacherAction
from tests.replay_pipeline.replay.conftest import QUICK, make_states
from tests.support.looking import ACT, TOOLS, answer_looks, call, look, looking
from tests.support.teachers import TeacherServer

MODEL = "deepseek/deepseek-v4-pro"
STATES = [{**state, "tools": TOOLS} for state in make_states(12, n_sessions=3, words=4000)]
IDS = [state["state_id"] for state in STATES]
N_LOOKS = {state_id: number % 4 for number, state_id in enumerate(IDS)}


LOOKS = {"looks": answer_looks, "looks_share": 9}


def ask(teachers, usd, ledger, *, states=STATES, **options):
    options = LOOKS | {"retry": QUICK} | options
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
        report = ask(teachers, 1, tmp_path / "l")
        bill = server.bill()
        again = ask(teachers, 1, tmp_path / "l")
        offline = ask(teachers, 0, tmp_path / "l")
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
    rows = ask(teachers, 1, tmp_path / "l").actions
    for row in rows:
        for before, step in zip(row.looks, row.looks[1:], strict=False):
            assert step.n_cached_tokens >= 0.8 * before.n_prompt_tokens


def test_without_somebody_to_answer_a_look_is_what_the_teacher_did(server, teachers, tmp_path):
    report = ask(teachers, 1, tmp_path / "l", looks=None)
    assert report.n_sent == len(IDS)
    assert not any(row.looks or row.error_code for row in report.actions)


def test_a_teacher_that_goes_on_looking_or_looks_where_nobody_knows_has_no_vote(tmp_path):
    answers = looking(["s0", "s1"], MODEL, {"s0": 3, "s1": 1})
    answers["s1+1"] = {MODEL: look(9)}
    answers["s2"] = {MODEL: call("TodoWrite", todos=[])}
    answers["s2+1"] = {MODEL: {"role": "assistant", "content": "done"}}
    with TeacherServer(answers) as server:
        report = ask(server.teachers([MODEL]), 1, tmp_path / "l", states=STATES[:3], max_looks=2)
    assert [row.error_code for row in report.actions] == ["still_looking", "cannot_look", None]
    assert [len(row.looks) for row in report.actions] == [2, 1, 1]
    assert report.n_open == 0
    assert report.stop_reason == "completed"
    assert report.actions[0].action["tool_calls"] == look(2)["tool_calls"]


@pytest.mark.parametrize(
    ("then", "outcome"), [(ACT, None), ({"content": "I can't see it."}, "cannot_look")]
)
def test_a_teacher_that_was_told_that_a_call_is_not_available_votes_by_what_it_does(
    tmp_path, then, outcome
):
    def partly(state, action):
        return [LookAnswer(text="Not available", source="unknown")]

    answers = {"s0": {MODEL: look(0)}, "s0+1": {MODEL: {"role": "assistant", **then}}}
    with TeacherServer(answers) as server:
        teachers = server.teachers([MODEL])
        runs = [ask(teachers, 1, tmp_path / "l", states=STATES[:1], looks=partly) for _ in "ab"]
    assert [run.actions[0].error_code for run in runs] == [outcome] * 2
    assert [run.n_sent for run in runs] == [2, 0]


def test_the_ceiling_holds_within_a_continuation_and_the_next_run_ends_it(tmp_path):
    states, answers = STATES[:1], looking(IDS[:1], MODEL, {IDS[0]: 3})

    def long(state, action):
        return [LookAnswer(text="line of a file\n" * 3_000, source="files")]

    few = {"params": {"max_completion_tokens": 200}}
    with TeacherServer(answers) as server:
        [teacher] = server.teachers([MODEL])
        teacher = teacher.model_copy(update=few)
        whole = ask([teacher], 1, tmp_path / "whole", states=states, looks=long)
        bound = estimate(states, [teacher]).bound_usd
    ceiling = bound + whole.actions[0].looks[0].cost_usd
    with TeacherServer(answers) as server:
        [teacher] = server.teachers([MODEL])
        teacher = teacher.model_copy(update=few)
        report = ask([teacher], ceiling, tmp_path / "l", states=states, looks=long)
        [row] = report.actions
        assert row.error_code == "unfinished"
        assert (report.stop_reason, report.n_open) == ("budget", 1)
        assert 1 <= len(row.looks) < 3
        assert row.cost_usd == math.fsum(step.cost_usd for step in row.looks)
        assert report.spent_usd + report.unknown_usd <= ceiling
        rest = ask([teacher], 1, tmp_path / "l", states=states, looks=long)
        bill = server.bill()
    assert rest.actions[0].action == whole.actions[0].action
    assert rest.n_sent + report.n_sent == bill.n_charged == whole.n_sent
    assert round(rest.spent_usd * 1e9) == bill.total_nano
    assert bill.n_duplicates == 0


MODELS = (MODEL, "qwen/qwen3-coder", "z-ai/glm-4.6")
DEAR = dict.fromkeys(MODELS, (3.0, 15.0))
"""Prices at which a run of these states is no small one."""
MANY = [
    {**state, "tools": TOOLS} for state in make_states(60, n_sessions=12, words=1500, prefix="m")
]


def looking_models(often):
    """Three models that look so often, each at other states, and then act."""
    answers = {}
    for number, model in enumerate(MODELS):
        n_looks = {s["state_id"]: often[(n + number) % len(often)] for n, s in enumerate(MANY)}
        for key, action in looking(n_looks, model, n_looks).items():
            answers.setdefault(key, {}).update(action)
    return answers


@pytest.mark.parametrize("gates", [(), ("cheap_first:0.1",)])
def test_what_is_asked_after_looks_costs_its_share_of_first_steps_at_most(tmp_path, gates):
    """By the server's own bill, against the bill of one step at the same states."""
    options = {"states": MANY, "gates": gates}
    with TeacherServer(looking_models((3, 0, 2, 1)), prices=DEAR) as server:
        teachers = server.teachers(MODELS)
        report = ask(teachers, 5, tmp_path / "l", looks_share=0.3, **options)
        total = server.bill().total_nano
        again = ask(teachers, 5, tmp_path / "l", looks_share=0.3, **options)
        offline = ask(teachers, 0, tmp_path / "l", looks_share=0.3, **options)
        assert server.bill().total_nano == total == round(report.spent_usd * 1e9)
        left = estimate(
            MANY, teachers, ledger=tmp_path / "l", gates=gates, looks=answer_looks, looks_share=0.3
        )
    assert left.n_calls == 0
    assert again.actions == report.actions
    assert offline.actions == report.actions
    first_usd = sum((row.looks[0] if row.looks else row).cost_usd for row in report.actions)
    assert first_usd * 1.2 < report.spent_usd <= first_usd * 1.3
    codes = [row.error_code for row in report.actions]
    assert {*codes} == {None, "still_looking"}
    assert report.n_open == 0
    assert report.stop_reason == "completed"
    acted = [row for row in report.actions if row.error_code is None and row.looks]
    assert acted


@pytest.mark.parametrize(("share", "n_acting"), [(0.3, 3), (0.0, 0)])
def test_a_run_of_a_single_state_answers_all_looks_unless_none_may_cost_anything(
    tmp_path, share, n_acting
):
    options = {"states": MANY[:1], "gates": (), "looks_share": share}
    with TeacherServer(looking_models((3,))) as server:
        teachers = server.teachers(MODELS)
        plain = estimate(MANY[:1], teachers, gates=())
        looks = estimate(MANY[:1], teachers, gates=(), looks=answer_looks, looks_share=share)
        report = ask(teachers, 5, tmp_path / "l", **options)
        cut = ask(teachers, report.spent_usd / 2, tmp_path / "cut", **options)
    assert sum(row.error_code is None for row in report.actions) == n_acting
    assert len(report.actions) == 3
    assert cut.spent_usd <= report.spent_usd / 2
    assert (looks.expected_usd > 1.2 * plain.expected_usd) == bool(share)


@pytest.mark.parametrize("after", [1, 20, 40])
def test_a_run_that_was_stopped_among_looks_asks_the_same_teachers_on(tmp_path, after):
    answers = looking_models((3, 0, 2, 1))
    options = {"states": MANY, "gates": ("cheap_first:0.1",), "looks_share": 0.3}
    options["retry"] = QUICK.model_copy(update={"settle_s": 20.0})
    stop, n_answered = threading.Event(), itertools.count(1)

    def stopping(state, action):
        if next(n_answered) == after:
            stop.set()
        return answer_looks(state, action)

    with TeacherServer(answers) as server:
        whole = ask(server.teachers(MODELS), 5, tmp_path / "whole", **options)
    with TeacherServer(answers) as server:
        teachers = server.teachers(MODELS)
        first = ask(teachers, 5, tmp_path / "l", looks=stopping, stop=stop, **options)
        rest = ask(teachers, 5, tmp_path / "l", **options)
        assert server.bill().n_duplicates == 0
    assert first.stop_reason == "stopped"
    assert 0 < rest.n_sent < whole.n_sent
    assert first.n_sent + rest.n_sent == whole.n_sent
    assert [asked(row) for row in rest.actions] == [asked(row) for row in whole.actions]


def asked(row):
    return row.state_id, row.teacher, row.error_code, row.action, len(row.looks)


def test_who_has_others_to_agree_with_goes_on_first_then_the_shortest_prompt(teachers):
    """Whoever was asked on once is asked to the end before others begin."""
    lanes = lanes_of(STATES[:4], [teachers[0]], RequestOptions())
    looks = Looks(options=RequestOptions(), answer=answer_looks, share=0.3)

    def row(state, n_tokens, **fields):
        return TeacherAction(
            state_id=state, teacher="t", model=MODEL, family="f", cost_usd=n_tokens / 1e4,
            n_prompt_tokens=n_tokens, request_sha=f"{state} {fields}", **fields,
        )  # fmt: skip

    n_tokens = {"s0": 900, "s1": 1000, "s2": 800, "s3": 1000}
    waiting = []
    for step in (task for _, lane in lanes for task in lane):
        answer = row(step.state_id, n_tokens[step.state_id], action=look(1))
        looks.follow(step, answer, step.state)
        if step.state_id == "s3":
            step = step.then
            looks.follow(step, replace(answer, action=look(2)), step.state)
        waiting.append((step, answer))
    of_another = row("s1", 100, action=ACT)
    for n_first, n_chosen in ((8_000, 1), (12_000, 2), (100_000, 4)):
        rows = [row("other", n_first, action=ACT), of_another]
        chosen = [(step.first or step).state_id for step, _ in looks.affordable(waiting, rows)]
        assert chosen == ["s3", "s1", "s2", "s0"][:n_chosen]


def test_the_estimate_knows_how_often_teachers_look_and_learns_it(server, teachers, tmp_path):
    """Its interval holds the bill, looks included; those of this teacher are 1.5 a question."""
    report = ask(teachers, 1, tmp_path / "l")
    other = [{**state, "state_id": f"x{state['state_id']}"} for state in STATES]
    for state in other:
        state["messages"] = [{"role": "user", "content": "Other. " * 3_500}, *state["messages"]]
    plain = estimate(other, teachers, ledger=tmp_path / "l")
    before = estimate(other, teachers, **LOOKS)
    after = estimate(other, teachers, ledger=tmp_path / "l", **LOOKS)
    told = [each.teachers[0].n_completion_tokens for each in (plain, before, after)]
    assert told[0] < told[1] < told[2]
    assert plain.expected_usd < after.expected_usd
    assert estimate(STATES, teachers, ledger=tmp_path / "l", **LOOKS).n_calls == 0
    answers = looking(
        (state["state_id"] for state in other), MODEL, {f"x{k}": n for k, n in N_LOOKS.items()}
    )
    with TeacherServer(answers) as running:
        bill = ask(running.teachers([MODEL]), 1, tmp_path / "m", states=other)
    assert before.low_usd < bill.spent_usd < before.high_usd * 1.5
    assert after.low_usd < bill.spent_usd < after.high_usd
    assert report.forecast_usd is not None

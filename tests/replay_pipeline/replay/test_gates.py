import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_pipeline.errors import ConfigError
from replay_pipeline.replay import (
    estimate,
    parse_gates,
    replay_states,
)
from replay_pipeline.settings import ReplaySettings
from replay_pipeline.types import TeacherAction, TeacherSpec
from tests.replay_pipeline.replay.conftest import QUICK
from tests.support.gates import bought, measured
from tests.support.teachers import TeacherServer
from tests.support.votes import extract_pairs

MODELS = ("qwen/qwen3-coder", "deepseek/deepseek-v4-pro", "z-ai/glm-4.6")  # cheapest first
TEACHERS = tuple(TeacherSpec(name=model, model=model, api_key_env=None) for model in MODELS)


def bash(command):
    arguments = json.dumps({"command": command})
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "Bash", "arguments": arguments}}
        ],
    }


def make_state(i, *, student=0, outcome="ok", text=None):
    return {
        "state_id": f"s{i}",
        "session_id": f"session-{i % 4}",
        "messages": [{"role": "user", "content": text or f"task {i}"}],
        "student_action": bash(f"run {student}"),
        "outcome": outcome,
    }


def answers_of(states, votes):
    return [
        TeacherAction(
            state_id=state["state_id"],
            teacher=teacher.name,
            family=teacher.vendor,
            action=None if vote is None else bash(f"run {vote}"),
            error_code="timeout" if vote is None else None,
            cost_usd=1.0,
        )
        for state, row in zip(states, votes, strict=True)
        for teacher, vote in zip(TEACHERS, row, strict=True)
    ]


votes_of_a_state = st.tuples(*[st.sampled_from([0, 1, 2, None])] * 3)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(votes_of_a_state, min_size=1, max_size=12), st.integers(1, 3))
def test_cheap_first_never_loses_a_pair(votes, threshold):
    states = [make_state(i) for i in range(len(votes))]
    report = measured(
        states, TEACHERS, answers_of(states, votes), ["cheap_first"], threshold=threshold
    )
    assert report.n_pairs_lost == 0
    assert 0 <= report.n_calls_saved <= 2 * len(votes) if threshold < 3 else True


def test_a_share_of_the_states_without_a_pair_is_asked_of_everybody():
    """So every answer has a known chance, and weighted by it, what is bought stands for all states."""
    votes = [(0, 0, 1), (0, 1, 2), (1, 0, 0), (1, 1, 0), (1, 2, 2)] * 200
    states = [make_state(i) for i in range(len(votes))]
    answers = answers_of(states, votes)
    report = measured(states, TEACHERS, answers, ["cheap_first:0.2"])
    plain = measured(states, TEACHERS, answers, ["cheap_first"])
    assert report.n_pairs_lost == plain.n_pairs_lost == 0
    assert plain.n_calls_saved == 2 * 400 + 200
    assert 0.75 < report.n_calls_saved / plain.n_calls_saved < 0.85
    assert report.n_explored == plain.n_calls_saved - report.n_calls_saved
    policy = parse_gates(["cheap_first:0.2"])
    by_place = {(i // 3, i % 3): answer for i, answer in enumerate(answers)}
    chosen = bought(states, TEACHERS, by_place, policy)
    for teacher in range(3):
        weights = [1 / p for (_, who), p in chosen.items() if who == teacher]
        assert sum(weights) == pytest.approx(len(states), rel=0.1)
    assert {p for (_, who), p in chosen.items() if who == 0} == {1.0}
    assert {p for (_, who), p in chosen.items() if who == 2} == {0.2, 1.0}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cheapest", "not one of wide_first"),
        ("value", "not one of wide_first"),
        ("cheap_first:2", "not a number from 0 to 1"),
        ("cheap_first:", "not a number from 0 to 1"),
    ],
)
def test_an_unknown_gate_is_refused_with_the_known_ones(name, words):
    with pytest.raises(ConfigError, match=words):
        parse_gates([name])


@pytest.fixture(scope="module")
def lively_server():
    """Answers that agree, disagree and follow the student, by state."""
    by_state = {
        f"s{i}": {m: bash(f"run {(i * (k + 1)) % 3}") for k, m in enumerate(MODELS)}
        for i in range(300)
    }
    with TeacherServer(by_state, latency=0.001) as server:
        yield server


def run(server, ledger, gates, states, **options):
    return asyncio.run(
        replay_states(
            states, server.teachers(MODELS), max_total_usd=5, ledger=ledger, gates=gates,
            retry=QUICK, is_durable=False, **options,
        )
    )  # fmt: skip


def test_a_run_saves_what_the_measurement_on_recorded_answers_says(lively_server, tmp_path):
    states = [make_state(i) for i in range(60)]
    everyone = run(lively_server, tmp_path / "all", (), states)
    teachers = lively_server.teachers(MODELS)
    gates = ("cheap_first:0.2",)
    on_record = measured(states, teachers, everyone.actions, gates)
    gated = run(lively_server, tmp_path / "gated", gates, states)
    assert sum(gated.skipped.values()) == on_record.n_calls_saved
    assert len(gated.actions) + on_record.n_calls_saved == 180
    explored = [action for action in gated.actions if action.propensity < 1]
    assert len(explored) == on_record.n_explored > 0
    assert {action.gate for action in explored} == {"cheap_first:0.2"}
    again = run(lively_server, tmp_path / "gated", gates, states)
    assert again.n_sent == 0
    assert again.actions == gated.actions


def asked(server, ledger, states, n_teachers, **options):
    return asyncio.run(
        replay_states(
            states, server.teachers(MODELS[:n_teachers]), ledger=ledger, gates=("cheap_first",),
            retry=QUICK, is_durable=False, counts_recorded=False,
            **({"max_total_usd": 5} | options),
        )
    )  # fmt: skip


def test_teachers_that_can_make_no_pair_are_asked_everywhere(lively_server, tmp_path):
    """A gate that rules pairs out would leave nobody to ask, and somebody wants these answers."""
    report = asked(lively_server, tmp_path / "l", [make_state(i) for i in range(8)], 1)
    assert len(report.actions) == report.n_sent == 8
    assert not report.skipped


def test_what_an_identical_question_was_answered_counts_where_a_gate_left_it_out(tmp_path):
    """The session was forked: two states ask the same, and the agent acted otherwise in each."""
    alike, other = make_state(0, text="same"), make_state(1, text="same", student=1)
    said = {m: bash("run 0") for m in MODELS}
    with TeacherServer({"s0": said, "s1": said}) as server:
        both = asked(server, tmp_path / "both", [alike, other], 2)
        again = asked(server, tmp_path / "both", [alike, other], 2, max_total_usd=0)
        first = asked(server, tmp_path / "l", [alike], 2)
        second = asked(server, tmp_path / "l", [other], 2)
        today = asked(server, tmp_path / "l", [alike], 2, max_total_usd=0)
    assert (both.n_sent, len(both.actions)) == (2, 4)
    assert again.actions == both.actions
    assert (first.n_sent, second.n_sent) == (1, 1)
    assert (len(first.actions), len(today.actions)) == (1, 2)


def test_the_default_gates_run_and_are_forecast(lively_server, tmp_path):
    states = [make_state(i, outcome="tool_error" if i % 5 == 0 else "ok") for i in range(60)]
    gates = ReplaySettings().gates
    report = run(lively_server, tmp_path / "l", gates, states)
    teachers = lively_server.teachers(MODELS)
    plain = estimate(states, teachers)
    gated = estimate(states, teachers, gates=gates)
    assert report.forecast_usd == pytest.approx(gated.expected_usd)
    assert report.spent_usd < gated.expected_usd * 1.5
    assert gated.expected_usd < plain.expected_usd


def test_a_third_vote_that_makes_a_dispute_is_asked_for():
    """Two for another action, the third and the student for the recorded one: no pair."""
    states = [make_state(0)]
    answers = answers_of(states, [(1, 1, 0)])
    gates = parse_gates(["cheap_first"])
    poll = gates.poll(states[0])
    for place, answer in enumerate(answers):
        assert not gates.verdict(poll, {each.vendor for each in TEACHERS[place:]}).reason
        poll.add(answer)
    assert not poll.makes_pair()
    assert extract_pairs(states, answers).outcome_counts == {"contested": 1}

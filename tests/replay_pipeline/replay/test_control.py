import pytest

from replay_pipeline.errors import ConfigError
from replay_pipeline.replay import control
from replay_pipeline.replay.ask.control import openrouter_name
from tests.replay_pipeline.replay.test_gates import bash
from tests.support.teachers import TeacherServer


def make_state(i, **more):
    return {
        "state_id": f"s{i}",
        "session_id": "one",
        "turn_idx": i,
        "messages": [{"role": "user", "content": f"task {i}"}],
        "student_action": bash(f"run {i}"),
        "student_model": "claude-opus-4-5-20251101",
        **more,
    }


def test_a_student_that_leaves_its_recording_is_counted(tmp_path):
    states = [make_state(i) for i in range(20)]
    model = "anthropic/claude-opus-4.5"
    answers = {f"s{i}": {model: bash(f"run {i if i % 4 else 'else'}")} for i in range(20)}
    with TeacherServer(answers) as server:
        [teacher] = server.teachers([model])
        report = control(states, max_total_usd=1, teacher=teacher, ledger=tmp_path / "l")
        again = control(states, max_total_usd=1, teacher=teacher, ledger=tmp_path / "l")
    assert (report.n_states, report.n_valid, report.left) == (20, 20, 0.25)
    assert report.same["exact"] == 0.75
    assert report.left_interval[0] < 0.25 < report.left_interval[1]
    assert report.models == {model: 20}
    assert report.spent_usd > 0
    assert again == report
    assert server.bill().n_charged == 20


def test_the_sample_is_the_same_on_every_run_and_keeps_to_its_budget(tmp_path):
    states = [make_state(i) for i in range(40)]
    with TeacherServer(script=bash("ls")) as server:
        [teacher] = server.teachers(["openai/gpt-5"])
        states = [{**state, "student_model": "openai/gpt-5"} for state in states]
        first = control(states, max_total_usd=1, n_states=8, teacher=teacher, ledger=tmp_path / "a")
        other = control(
            reversed(states), max_total_usd=1, n_states=8, teacher=teacher, ledger=tmp_path / "a"
        )
        none = control(states, max_total_usd=0, n_states=8, teacher=teacher, ledger=tmp_path / "b")
    assert first == other
    assert first.left == 1.0
    assert (none.n_valid, none.left) == (0, None)


def test_states_of_unknown_models_cannot_be_controlled():
    with pytest.raises(ConfigError, match="student_model"):
        control([make_state(0, student_model=None)], max_total_usd=1)


def test_recorded_model_names_are_translated():
    assert openrouter_name("claude-sonnet-4-20250514") == "anthropic/claude-sonnet-4"
    assert openrouter_name("claude-opus-4-6") == "anthropic/claude-opus-4.6"
    assert openrouter_name("gpt-5") == "gpt-5"

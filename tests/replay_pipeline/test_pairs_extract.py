"""From votes to pairs: outcomes, thresholds, families, evidence, tables."""

import json

import pytest

from replay_pipeline.pairs import (
    extract_dpo_pairs,
)
from replay_pipeline.types import TeacherAction

CWD = "/home/ada/shop"
READ_TOOL = {
    "type": "function",
    "function": {
        "name": "Read",
        "parameters": {
            "type": "object",
            "properties": {"file_path": {"type": "string"}},
            "required": ["file_path"],
        },
    },
}


def call(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


def bash(command):
    return call("Bash", command=command)


def state(state_id="s1", action=None, **more):
    return {
        "state_id": state_id,
        "session_id": "session",
        "messages": [{"role": "user", "content": "Fix the failing test."}],
        "student_action": action or bash("pytest"),
        "student_model": "claude-opus-4-5-20251101",
        "cwd": CWD,
        **more,
    }


def answers(state_id="s1", **by_teacher):
    return [
        TeacherAction(state_id=state_id, teacher=name, family=name, action=action, cost_usd=0.01)
        for name, action in by_teacher.items()
    ]


def test_two_teachers_that_agree_against_the_student_make_a_pair():
    [pair] = extract_dpo_pairs(
        [state()],
        answers(
            deepseek=call("Read", file_path="tests/test_cart.py"),
            qwen=call("Read", file_path=f"{CWD}/tests/./test_cart.py"),
            glm=bash("ls"),
        ),
    )
    assert pair["chosen"] == 'Read {"file_path":"tests/test_cart.py"}'
    assert pair["rejected"] == 'Bash {"command":"pytest"}'
    assert pair["n_teachers_agreeing"] == 2
    assert pair["n_teachers_asked"] == pair["n_teachers_valid"] == 3
    assert pair["teachers_agreeing"] == ["deepseek", "qwen"]
    assert pair["agreement_level"] == "exact"
    assert pair["margin"] == 1
    assert pair["cost_usd"] == pytest.approx(0.03)
    assert pair["weight"] == pytest.approx(2 / 3)
    assert pair["state_messages"] == [{"role": "user", "content": "Fix the failing test."}]

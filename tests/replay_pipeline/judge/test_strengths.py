"""How strong teachers are said to be, held to worlds in which it is known."""

import pytest

from replay_pipeline.judge.extract import extract_pairs
from replay_pipeline.judge.report import shared_errors, strengths
from tests.support.worlds import WORLDS, simulate


def test_each_teacher_is_told_with_its_share_of_right_answers_and_what_one_costs():
    world = simulate(WORLDS["four kinds"], 2_000, seed=0)
    halves = [
        extract_pairs(half, world.rows(half)).to_json()
        for half in (world.states[:800], world.states[800:])
    ]
    found = {each.teacher: each for each in strengths(halves)}
    assert found.keys() == {teacher.name for teacher in world.teachers}
    for teacher, price in zip(world.teachers, world.world.prices, strict=True):
        answers = [
            s
            for s in world.states
            if world.is_right(s["state_id"], world.answers[s["state_id"]][teacher.model])
        ]
        right, said = len(answers) / 2_000, found[teacher.name]
        assert said.right == pytest.approx(right, abs=0.04)
        assert said.usd_per_right == pytest.approx(price / 1_000 / right, rel=0.06)
        assert (said.n_asked, said.n_valid) == (2_000, 2_000)
        assert 0 < said.n_with_agent < 2_000
    assert "WebSearch" in found["deepseek-v4-pro"].stronger_at
    assert "Grep" in found["glm-4.6" if "glm-4.6" in found else "qwen3-coder"].weaker_at
    own, agent = found["deepseek-v4-pro"].right_at["WebSearch"]
    assert (own, agent) == pytest.approx((0.95, 0.3), abs=0.08)
    assert f"WebSearch ({own:.0%} to {agent:.0%})" in found["deepseek-v4-pro"].row()["stronger at"]
    assert shared_errors(halves) == pytest.approx(0.4, abs=0.12)


def test_without_estimates_nothing_is_said():
    assert strengths([{}, {"teachers": {"qwen": {"n_valid": 3, "family": "qwen"}}}]) == []
    assert shared_errors([{}]) is None

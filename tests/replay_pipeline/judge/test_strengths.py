"""How strong teachers are said to be, held to worlds in which it is known."""

import pytest

from replay_pipeline.judge.strengths import strengths
from tests.support.votes import extract_pairs
from tests.support.worlds import WORLDS, simulate


def test_each_teacher_is_told_with_its_share_of_right_answers_and_what_one_costs():
    world = simulate(WORLDS["four kinds"], 1_000, seed=0)
    halves = [
        extract_pairs(half, world.rows(half)).to_json()
        for half in (world.states[:400], world.states[400:])
    ]
    found = {each.teacher: each for each in strengths(halves)}
    assert found.keys() == {teacher.name for teacher in world.teachers}
    for teacher, price in zip(world.teachers, world.world.prices, strict=True):
        answers = [
            s
            for s in world.states
            if world.is_right(s["state_id"], world.answers[s["state_id"]][teacher.model])
        ]
        right, said = len(answers) / 1_000, found[teacher.name]
        assert said.right == pytest.approx(right, abs=0.2)
        assert said.usd_per_right == pytest.approx(price / 1_000 / said.right, rel=1e-3)
        assert (said.n_asked, said.n_valid) == (1_000, 1_000)
        assert 0 < said.n_with_agent < 1_000
    assert "forecast" in found["deepseek-v4-pro"].stronger_at
    own, agent = found["deepseek-v4-pro"].right_at["forecast"]
    assert own > agent + 0.15
    row = found["deepseek-v4-pro"].row()
    assert f"forecast ({own:.0%} right, the agent {agent:.0%})" in row["stronger at"]
    assert list(row)[:3] == ["teacher", "answers", "as the agent there"]
    assert list(row)[3:6] == ["right", "agent right", "$ a right answer"]
    assert row["answers"] == "1,000 of 1,000"


def test_teachers_that_can_be_exchanged_get_the_same_weights():
    """Whoever agrees with whom, and whatever the seed: names and chance decide nothing."""
    for seed in range(2):
        world = simulate(WORLDS["equal prices"], 600, seed=seed)
        weights: dict[str, list[float]] = {}
        for pair in extract_pairs(world.states, world.rows()).pairs:
            assert 0.05**2 <= pair["weight"] <= 0.95**2
            if pair["n_teachers_agreeing"] == 2:
                for name in pair["teachers_agreeing"]:
                    weights.setdefault(name, []).append(pair["weight"])
        means = [sum(each) / len(each) for each in weights.values()]
        assert len(means) == 3
        assert max(means) - min(means) <= 0.05


def test_without_estimates_nothing_is_said():
    assert strengths([{}, {"teachers": {"qwen": {"n_valid": 3, "family": "qwen"}}}]) == []

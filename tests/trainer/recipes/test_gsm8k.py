import runpy
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[3] / "recipes" / "gsm8k" / "run.py"


@pytest.fixture(scope="module")
def recipe():
    return runpy.run_path(str(RECIPE))


def test_the_reward_is_verifiable(recipe):
    assert recipe["is_right"]("#### 7", "7")
    assert recipe["is_right"]("first #### 3 then #### 7", "7")
    assert not recipe["is_right"]("#### 17", "7")
    assert not recipe["is_right"]("7", "7")
    completions = [[{"role": "assistant", "content": text}] for text in ("#### 7", "#### 8")] * 2
    ids = [[1] * 5, [1] * 5, [1] * recipe["MAX_TOKENS"], [1] * 5]
    # The third never stopped by itself.
    assert recipe["reward"](completions, ids, answer=["7"] * 4) == [1.0, 0.0, 0.0, 0.0]


def test_items_cover_every_sum_in_every_template(recipe):
    rows = recipe["items"](seed=0)
    assert len({row["prompt"][0]["content"] for row in rows}) == len(rows) == 12
    assert {row["answer"] for row in rows} == {"2", "3", "4"}


@pytest.mark.slow
def test_grpo_moves_probability_to_right_answers(recipe, capsys):
    assert recipe["main"]([]) == 0
    assert "PASS" in capsys.readouterr().out

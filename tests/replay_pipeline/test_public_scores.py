"""What public scores say of teachers beside the agent."""

from replay_pipeline.stages.pages.public_scores import compared, public_scores, words_of_scores


def test_before_anybody_was_asked_public_scores_say_who_is_weaker():
    teachers = {
        "deepseek": "deepseek/deepseek-v4-pro",
        "qwen": "qwen/qwen3-coder",
        "glm": "z-ai/glm-4.6",
    }
    [said] = words_of_scores("claude-sonnet-4-5-20250929", teachers)
    assert said == (
        "beside claude-sonnet-4-5-20250929 (74%), which wrote these sessions, qwen (62%) is weaker; "
        "deepseek (73%) is about as strong; no score of glm is known "
        "(SWE-bench Verified in one harness, OpenHands Index, 2026-06-30)"
    )
    [said] = words_of_scores("qwen/qwen3-coder", {"opus": "anthropic/claude-opus-4.7"})
    assert "opus (82%) is stronger" in said
    [said] = words_of_scores("a-model-of-ones-own", teachers)
    assert said.endswith("is not known")


def test_a_difference_that_chance_explains_is_none():
    assert compared(0.75, 0.73) == 0  # 500 tasks: five points and a half are chance
    assert compared(0.62, 0.74) == -1
    assert all(0 < percent < 100 for percent in public_scores()["models"].values())

"""The rule for pairs: extraction, asking, and the worth of a question follow it at every pattern of votes."""

from functools import cache
from itertools import chain

import pytest

from replay_pipeline.judge.rule import rule, standing_of_pattern
from replay_pipeline.replay.buy.policy import parse_gates
from replay_pipeline.types import TeacherAction, family_of_model
from tests.replay_pipeline.judge.test_extract import state
from tests.support.messages import bash
from tests.support.votes import extract_pairs

FAMILIES = ("deepseek", "qwen", "glm", "kimi", "mistral")
OWN = "anthropic"
ACTIONS = [bash(f"cat {name}.py") for name in "abcdef"]
STATE = state(
    action=ACTIONS[0],
    messages=[{"role": "user", "content": "Look at a.py b.py c.py d.py e.py f.py"}],
)


def answers_of(pattern, families):
    return [
        TeacherAction(state_id=str(pattern), teacher=name, family=name, action=ACTIONS[group])
        for name, group in zip(families, pattern[1:], strict=True)
        if group >= 0
    ]


def all_patterns(n_raters):
    """Every pattern with an action of the agent, whoever else was asked."""
    patterns = [(0,)]
    for _ in range(n_raters - 1):
        patterns = [(*each, n) for each in patterns for n in range(-1, max(each) + 2)]
    return patterns


def answers_at(pattern, place):
    """Return the patterns that an answer of the rater at index `place` can lead to."""
    found = []
    for number in range(max(pattern) + 2):
        numbers = {-1: -1}
        grown = (*pattern[:place], number, *pattern[place + 1 :])
        for each in grown:
            numbers.setdefault(each, len(numbers) - 1)
        found.append(tuple(numbers[each] for each in grown))
    return found


@cache
def outcomes_from(pattern, threshold, without_vote):
    """Everything that further answers may make of a pattern, its own outcome included."""
    found = {rule(standing_of_pattern(pattern, without_vote)[1], threshold)}
    for place, group in enumerate(pattern):
        for after in answers_at(pattern, place) if group < 0 else ():
            found |= outcomes_from(after, threshold, without_vote)
    return found


@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize(("n_families", "threshold"), [(4, 1), (5, 2), (4, 3)])
def test_one_rule_decides_at_every_pattern_of_votes(n_families, has_own, threshold):
    families = (*FAMILIES[: n_families - has_own], *[OWN] * has_own)
    without_vote = (n_families,) if has_own else ()
    assert family_of_model(OWN) == family_of_model(STATE["student_model"])
    patterns = all_patterns(n_families + 1)
    states = [{**STATE, "state_id": str(pattern)} for pattern in patterns]
    answers = {pattern: answers_of(pattern, families) for pattern in patterns}
    report = extract_pairs(states, chain.from_iterable(answers.values()), threshold)
    for pattern, one, row in zip(patterns, states, report.outcomes, strict=True):
        _, standing = standing_of_pattern(pattern, without_vote)
        expected = rule(standing, threshold)
        # All who were asked took the recorded action: with its own vote they may be enough.
        is_confirmed = 0 < standing.n_voting == threshold - 1 and set(pattern) <= {0, -1}
        outcome = expected if answers[pattern] else "not_asked"
        assert row["outcome"] == ("agreement" if is_confirmed else outcome), pattern

        poll = parse_gates([], threshold=threshold).poll(one)
        for answer in answers[pattern]:
            poll.add(answer)
        assert poll.makes_pair() == (expected == "pair"), pattern
        left = {name for name, group in zip(families, pattern[1:], strict=True) if group < 0}
        can_be_pair = "pair" in outcomes_from(pattern, threshold, without_vote)
        if poll.is_hopeless(left):
            assert not can_be_pair, pattern
        elif left and not has_own:
            assert can_be_pair, pattern

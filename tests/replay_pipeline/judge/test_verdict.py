"""The verdict on two models: what a panel tells of answers, and what an interval holds."""

import random
from statistics import fmean

import pytest

from replay_pipeline.actions import canonical_action
from replay_pipeline.judge.verdict import (
    FEWEST,
    MARGIN,
    Scored,
    _time_uniform,
    features,
    is_same,
    judged,
    p_right,
    verdict,
)
from replay_pipeline.types import Trial
from tests.support import messages


def bash(command):
    return canonical_action(messages.bash(command))


def edit(new):
    return canonical_action(messages.edit("/a.py", "x", new))


def test_more_of_a_panel_on_a_side_makes_it_likelier_right():
    push, test = bash("git push"), bash("pytest -x")
    panels = [[push] * n + [test] * (3 - n) for n in range(4)]
    found = [p_right(features(push, panel)) for panel in panels]
    assert found == sorted(found)
    assert found[0] < 0.5 < 0.9 < found[3]


def test_another_number_of_calls_tells_more_than_another_name_for_the_same():
    panel = [edit("y")] * 3
    near = features(edit("y "), panel)
    far = features(bash("rm a.py"), panel)
    assert set(near) - set(far)
    assert set(far) - set(near)
    assert p_right(near) > p_right(far)


def test_equal_actions_and_ends_of_a_turn_differ_in_nothing_and_an_invalid_action_is_hardly_right():
    panel = [bash("ls"), bash("pytest")]
    words = [canonical_action({"content": text}) for text in ("Done.", "All tests pass now.")]
    for one, other in ((bash("pytest  -q"), bash("pytest -q")), words):
        assert is_same(one, other)
        speaks = None if other in words else False
        assert judged(one, other) == Scored(0.0, only_speaks=speaks, differs=False)
    assert not is_same(words[0], bash("pytest"))
    broken = canonical_action({"tool_calls": [{"function": {"name": "", "arguments": "{"}}]})
    assert not broken.is_valid
    assert judged(broken, bash("pytest"), panel).gain == pytest.approx(0.05 - 0.5)


def test_where_the_panel_is_silent_the_usual_gain_counts_and_tells_less():
    rng = random.Random(6)
    whole = [Scored(0.0, differs=False)] * 90 + [
        Scored(rng.choice((-1, 0)), 1.0) for _ in range(60)
    ]
    silent = [*whole[:120], *[Scored(None)] * 30]
    assert judged(bash("ls"), bash("pytest")).gain is None
    known, guessed = verdict(whole), verdict(silent)
    assert guessed.difference == pytest.approx(fmean(each.gain for each in whole[90:120]) * 0.4)
    assert guessed.high - guessed.low > 1.15 * (known.high - known.low)
    nobody = verdict([*whole[:90], *[Scored(None)] * 60])
    assert (nobody.answer, nobody.low, nobody.high) == ("can't tell", -1.0, 1.0)


def test_of_commands_and_edits_the_votes_alone_count():
    """Nobody has scored their like, so an own way of going wrong must not look worse than another one's."""
    for wrong in (bash("make 7"), edit("z"), edit("y # 7")):
        right = edit("y")
        panel = [right, right, bash("make 8")]
        assert judged(wrong, right, panel).gain == pytest.approx(-2 / 3)
        assert judged(right, wrong, panel).gain == pytest.approx(2 / 3)


def test_what_execution_shows_outranks_the_panel():
    own, better, bad = edit("y"), edit("z"), edit("w")
    panel = [edit("a"), edit("b"), edit("c")]
    tried = {
        own.render(): Trial(works=True, effect="a", was_passing=False, is_passing=False),
        better.render(): Trial(works=True, effect="b", was_passing=False, is_passing=True),
        bad.render(): Trial(works=False, error_kind="string_not_found"),
    }
    voted, found = judged(better, own, panel), judged(better, own, panel, tried=tried)
    assert abs(voted.gain) < 0.05 < 0.3 < found.gain
    assert (voted.is_tried, found.is_tried) == (False, True)
    assert judged(bad, own, [own, own, bad], tried=tried).gain < -0.3
    one_effect = {each.render(): Trial(works=True, effect="a") for each in (own, better)}
    assert judged(better, own, panel, tried=one_effect).gain == 0


def drawn(rng, gain, n, agreeing=1.0):
    """Draw judged decisions with a mean gain."""
    return [Scored(gain + rng.gauss(0, 0.2), agreeing) for _ in range(n)]


@pytest.mark.parametrize(
    ("gain", "answer"),
    [(0.1, "could"), (0.0, "could"), (-0.4, "could not"), (-MARGIN, "can't tell")],
)
def test_the_answer_is_told_when_the_interval_leaves_no_other(gain, answer):
    found = verdict(drawn(random.Random(1), gain, 150))
    assert found.answer == answer
    assert found.low <= gain <= found.high


def test_what_more_decisions_would_tell_is_said():
    decisions = drawn(random.Random(1), 0.0, FEWEST, 0.5)
    some = verdict(decisions)
    assert some.answer == "can't tell"
    n_times = -(-(FEWEST + some.n_more) // FEWEST)
    assert verdict(decisions * n_times).answer == "could"
    never = verdict(drawn(random.Random(1), -MARGIN, 150))
    assert never.n_more is None


def test_few_decisions_settle_nothing_and_a_panel_that_seldom_agrees_tells_less():
    rng = random.Random(2)
    assert verdict(drawn(rng, 0.9, FEWEST - 1)).answer == "can't tell"
    assert verdict([]).answer == "can't tell"
    sure, unsure = (verdict(drawn(random.Random(3), 0.0, 150, each)) for each in (0.75, 0.35))
    assert unsure.high - unsure.low > 1.3 * (sure.high - sure.low)


def test_the_interval_holds_at_every_look():
    rng = random.Random(4)
    n_missed = 0
    for _ in range(200):
        total = squares = 0.0
        is_missed = False
        for n in range(1, 601):
            value = rng.gauss(0, 1)
            total, squares = total + value, squares + value**2
            if n >= FEWEST:
                mean = total / n
                sd = (squares / n - mean**2) ** 0.5
                is_missed = is_missed or abs(mean) > sd * _time_uniform(n)
        n_missed += is_missed
    assert n_missed <= 28  # of 200, where a plain 90 % interval misses about 110


def test_decisions_of_a_run_that_are_alike_tell_less():
    rng = random.Random(5)
    alone = [Scored(rng.choice((-1, 0, 0, 1)), 1.0) for _ in range(240)]
    one, other = (
        verdict(each._replace(run=str(number // size)) for number, each in enumerate(alone))
        for size in (1, 12)
    )
    assert other.high - other.low < 1.3 * (one.high - one.low)
    n_could = n_apart = 0
    for _ in range(150):
        found, apart = [], []
        for run in range(10):
            common = rng.choice((-1, 0, 0, 1))
            gains = [rng.choice((common, common, rng.choice((-1, 0, 0, 1)))) for _ in range(12)]
            found += [Scored(0.7 * gain - MARGIN, 1.0, run=str(run)) for gain in gains]
            apart += [each._replace(run=None) for each in found[-12:]]
        n_could += verdict(found).low > -MARGIN
        n_apart += verdict(apart).low > -MARGIN
    assert n_could <= 8 < 15 < n_apart  # of 150, where one in twenty is allowed

"""How right pairs are said to be, by checks in worlds in which it is known who is right."""

import math
import random
from itertools import product

import numpy as np
import pytest

from replay_pipeline.judge.precision import (
    PrecisionEvidence,
    calibrated,
    draw,
    draw_next,
    wilson_interval,
)
from tests.support.votes import extract_pairs
from tests.support.worlds import WORLDS, simulate

UNALIKE = ("four kinds, half hard", "several right actions", "drift")


def judged(name, n_states, seed, **options):
    world = simulate(WORLDS[name], n_states, seed=seed)
    return world, extract_pairs(world.states, world.rows(), **options)


def true_precision(world, pairs):
    return sum(map(world.is_right_pair, pairs)) / len(pairs)


def checked_by_hand(world, report, n):
    """Draw pairs as the page of `look` does, and look up which are right."""
    by_id = {pair["pair_id"]: pair for pair in report.pairs}
    chances = draw({key: pair["p_better"] for key, pair in by_id.items()}, n)
    return {key: world.is_right_pair(by_id[key]) for key in chances}, chances


def test_a_hundred_checked_pairs_tell_it_where_they_are_not():
    errors, covered, blind = [], [], []
    for name, seed in product(UNALIKE, range(2)):
        world, report = judged(name, 1_000, seed)
        truth = true_precision(world, report.pairs)
        blind.append(abs(report.precision.share - truth))
        checked, chances = checked_by_hand(world, report, 100)
        after = extract_pairs(world.states, world.rows(), checked=checked, chances=chances)
        found = after.precision
        # Of the pairs that are left: those found wrong are gone.
        left = true_precision(world, after.pairs)
        errors.append(abs(found.share - left))
        covered.append(found.low <= left <= found.high)
        assert (found.n_checked, found.n_pairs) == (100, len(after.pairs))
    assert np.mean(errors) <= 0.05
    assert np.mean(errors) < np.mean(blind)
    assert sum(covered) >= 5


def test_claims_are_brought_to_what_was_found():
    found = calibrated([(0.9, i % 10 < 7, 1.0) for i in range(200)])
    assert found.of(0.9) == pytest.approx(0.7, abs=0.02)
    assert 0.7 < found.of(0.97) < 0.97
    assert found.of(0.6) < 0.6


def test_a_few_checks_change_claims_little():
    assert calibrated([(0.9, False, 1.0)] * 4).of(0.9) == 0.9
    assert calibrated([(0.9, True, 1.0)] * 5 + [(0.9, False, 1.0)]).of(0.9) == pytest.approx(
        0.87, abs=0.03
    )


def test_checks_that_were_likelier_to_be_drawn_count_for_less():
    doubtful = [(0.8, False, 1.0)] * 20
    sure = [(0.8, True, 0.1)] * 20
    even = [(p, is_right, 1.0) for p, is_right, _ in doubtful + sure]
    assert calibrated(even).of(0.8) < 0.6
    assert calibrated(doubtful + sure).of(0.8) > 0.75


def test_checks_of_no_use_leave_no_surer_claim_worth_less():
    found = calibrated([(0.99, False, 1.0), (0.6, True, 1.0)] * 50)
    assert found.of(0.99) >= found.of(0.6)


def test_what_was_executed_and_found_wrong_makes_no_pair():
    world, report = judged("four kinds", 300, 0)
    pair = report.pairs[0]
    wrong = {(pair["state_id"], pair["teachers_agreeing"][0]): False}
    after = extract_pairs(world.states, world.rows(), verdicts=wrong)
    assert [each["pair_id"] for each in after.refuted] == [pair["pair_id"]]
    assert len(after.pairs) == len(report.pairs) - 1
    assert after.outcome_counts["refuted"] == 1
    right = {(pair["state_id"], name): True for name in pair["teachers_agreeing"]}
    right[pair["state_id"], "agent"] = False
    after = extract_pairs(world.states, world.rows(), verdicts=right)
    assert [p["is_checked_right"] for p in after.pairs if "is_checked_right" in p] == [True]


def test_what_execution_proves_is_gold_for_these_pairs_and_no_sample_of_the_others():
    """Of the agent's wrong actions three in ten are refused where they are tried; right ones never."""
    world = simulate(WORLDS["four kinds"], 1_000, seed=0)
    rows = world.rows()
    chance = random.Random(0)
    refused = [
        state
        for state in world.states
        if not world.is_right(state["state_id"], state["student_action"]) and chance.random() < 0.3
    ]
    verdicts = {(state["state_id"], "agent"): False for state in refused}
    for row in rows:
        if (row.state_id, "agent") in verdicts:
            works = world.is_right(row.state_id, row.action) or chance.random() < 0.1
            verdicts[row.state_id, row.teacher] = works
    after = extract_pairs(world.states, rows, verdicts=verdicts)
    found = after.precision
    assert found.n_proven > 20
    assert found.n_checked == 0
    assert f"{found.n_proven} proven by execution; nobody has checked" in found.words()
    checked, chances = checked_by_hand(world, after, 100)
    both = extract_pairs(world.states, rows, verdicts=verdicts, checked=checked, chances=chances)
    truth = true_precision(world, both.pairs)
    assert both.precision.low <= truth <= both.precision.high


def precision_of(claims, checked):
    return PrecisionEvidence.of(claims, checked).precision()


def test_precision_in_words():
    claims = {f"p{i}": 0.9 for i in range(200)}
    claimed = "90 of 100 as claimed (71 to 100 without a check)"
    assert precision_of(claims, {}).words() == f"{claimed}; nobody has checked a pair"
    assert precision_of(claims, {"p1": True}).words() == f"{claimed}; 1 checked, too few"
    checked = {f"p{i}": i % 10 > 0 for i in range(40)}
    found = precision_of(claims, checked)
    assert found.words() == "92 of 100 (80 to 98), 40 pairs checked"
    assert found.n_pairs == 196  # those found wrong are gone
    assert precision_of({}, {}).words() == "no pairs"
    halves = [
        PrecisionEvidence.of({k: claims[k] for k in list(claims)[i::2]}, checked) for i in (0, 1)
    ]
    assert (
        PrecisionEvidence.pooled(half.to_json() for half in halves).precision().words()
        == found.words()
    )


def test_the_drawn_pairs_are_the_doubtful_ones_and_the_same_each_time():
    claims = {f"p{i}": 0.5 if i % 4 == 0 else 0.99 for i in range(400)}
    drawn = draw(claims, 40)
    assert drawn == draw(claims, 40)
    assert len(drawn) == 40
    assert sum(claims[key] == 0.5 for key in drawn) > 15  # a quarter of the pairs
    assert 0 < min(drawn.values()) < max(drawn.values()) <= 1
    assert draw(claims, 1_000) == dict.fromkeys(sorted(claims), 1.0)


def test_a_second_draw_counts_with_the_first():
    """Claims of .1 too much, the doubtful ones drawn most: both rounds together tell the truth."""
    chance, errors, apart = random.Random(0), [], []
    for world in range(150):
        claims = {f"{world}-{i}": chance.uniform(0.55, 1.0) for i in range(150)}
        right = {key: chance.random() < p - 0.1 for key, p in claims.items()}
        first = draw(claims, 20)
        rest = {key: p for key, p in claims.items() if key not in first}
        both = draw_next(rest, 40, first)
        assert first.keys() < both.keys()
        assert len(both) == 60
        assert all(both[key] > p for key, p in first.items())
        found = PrecisionEvidence.of(claims, {key: right[key] for key in both}, both).precision()
        left = sum(right.values()) / (len(right) - sum(not right[key] for key in both))
        errors.append(found.share - left)
        apart.append(found.low <= left <= found.high)
    assert abs(np.mean(errors)) < 0.01
    assert np.mean(apart) >= 0.9


@pytest.mark.parametrize(("n", "total"), [(1, 3), (5, 10), (9, 10), (150, 431), (3, 1_000)])
def test_at_its_ends_the_share_is_as_far_as_chance_goes(n, total):
    for end in wilson_interval(n / total, total):
        error = math.sqrt(end * (1 - end) / total)
        assert abs(n / total - end) == pytest.approx(1.959964 * error)


def test_it_holds_where_everything_or_nothing_was_so():
    assert wilson_interval(0.0, 0) == (0.0, 1.0)
    assert wilson_interval(0.0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert wilson_interval(1.0, 10) == pytest.approx((0.722467, 1.0), abs=1e-6)

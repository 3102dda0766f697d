"""What is estimated from votes alone, held to worlds in which it is known who is right."""

import itertools
import math
import random

import numpy as np
import pytest

from replay_pipeline.judge.ballots import OWN, Ballot, labelings
from replay_pipeline.judge.extract import extract_pairs
from replay_pipeline.judge.precision import (
    PrecisionEvidence,
    calibrated,
    draw,
    draw_next,
    wilson_interval,
)
from replay_pipeline.judge.reliability import fit, posterior
from tests.support.worlds import WORLDS, bought, simulate

ALIKE = ("agent much weaker", "equal, errors shared", "four kinds", "a liar", "five teachers")
"""Worlds whose states are alike within a kind, so that votes alone tell the precision."""
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


@pytest.mark.parametrize("name", ALIKE)
def test_votes_alone_tell_the_precision_where_states_are_alike(name):
    """Within .03 on average over draws of 1,000 states, which have .02 of chance of their own."""
    errors = []
    for seed in range(4):
        world, report = judged(name, 1_000, seed)
        claimed = np.mean([pair["p_better"] for pair in report.pairs])
        errors.append(abs(claimed - true_precision(world, report.pairs)))
    assert np.mean(errors) <= 0.03


@pytest.mark.slow
def test_where_nobody_has_checked_the_truth_is_in_what_votes_leave_open():
    """In nine of ten draws of all worlds, everybody asked or the cheapest first."""
    hits = []
    for name, each in WORLDS.items():
        world = simulate(each, 1_000, seed=5)
        for rows in (world.rows(world.states[:600]), bought(world, 0.3 * sum(each.prices))):
            report = extract_pairs(world.states, rows)
            found, truth = report.precision, true_precision(world, report.pairs)
            hits.append((found.low <= truth <= found.high, name, truth, found))
    assert np.mean([is_in for is_in, *_ in hits]) >= 0.9, [hit for hit in hits if not hit[0]]


@pytest.mark.parametrize("name", UNALIKE)
def test_a_hundred_checked_pairs_tell_it_where_they_are_not(name):
    errors, covered, blind = [], [], []
    for seed in range(4):
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
    assert sum(covered) >= 3


def test_accuracies_come_back_by_kind():
    world, report = judged("four kinds", 3_000, 0)
    for kind in WORLDS["four kinds"].kinds:
        found = [
            report.reliability.accuracy(rater, kind.tool) for rater in report.reliability.raters
        ]
        families = report.reliability.raters[1:]
        true = {t.vendor: a for t, a in zip(world.teachers, kind.teachers, strict=True)}
        assert found == pytest.approx([kind.agent, *(true[f] for f in families)], abs=0.08)
    assert report.reliability.shared() == pytest.approx(0.4, abs=0.1)


def test_pairs_kept_by_probability_are_as_right_as_they_claim():
    world, votes = judged("four kinds", 2_000, 1)
    _, report = judged("four kinds", 2_000, 1, min_p_better=0.7)
    assert min(pair["p_better"] for pair in report.pairs) >= 0.7
    assert true_precision(world, report.pairs) >= 0.95
    n_right = [sum(map(world.is_right_pair, each.pairs)) for each in (report, votes)]
    assert n_right[0] > n_right[1]  # more than by counting, since one strong teacher may do
    assert {"pair"} < report.outcome_counts.keys()


@pytest.mark.slow
def test_checks_bring_pairs_kept_by_probability_to_what_is_asked():
    """Of those that nobody has checked; what a person accepted stays, whatever the votes say."""
    rights = []
    for seed in range(3, 6):
        world, report = judged("several right actions", 1_000, seed, min_p_better=0.9)
        checked, chances = checked_by_hand(world, report, 100)
        after = extract_pairs(
            world.states, world.rows(), min_p_better=0.9, checked=checked, chances=chances
        )
        left = {pair["pair_id"]: pair for pair in after.pairs}
        accepted = {key for key, is_right in checked.items() if is_right}
        assert accepted <= left.keys()
        assert all(left[key]["weight"] >= 0.99 for key in accepted)
        found = after.precision
        assert found.n_pairs == len(left)
        assert len(accepted) <= found.n_checked <= len(checked)  # what is not kept is no sample
        rights += [world.is_right_pair(left[key]) for key in left.keys() - checked.keys()]
    assert np.mean(rights) >= 0.9


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


def test_the_likelihoods_of_all_partitions_add_up_to_one():
    """Three raters that all answered: Bell's five partitions, and nothing else can be seen."""
    model = fit([Ballot("s", "Bash", (0, 1, 1))] * 30 + [Ballot("t", "Bash", (0, 0, 1))] * 9, "abc")
    patterns = {(0, *rest) for rest in itertools.product(range(3), repeat=2)}
    grown = {p for p in patterns if all(n <= max(p[:i]) + 1 for i, n in enumerate(p) if i)}
    assert len(grown) == 5
    total = math.fsum(posterior(model, 0, pattern).likelihood for pattern in grown)
    assert total == pytest.approx(1.0)


def test_nobody_shares_an_action_of_its_own():
    assert all(OWN not in ways[:1] for ways in labelings((0, 0, 1)))
    assert (OWN, OWN, OWN) in labelings((0, 1, 2))


def test_a_failed_action_and_a_verdict_are_evidence():
    world, report = judged("four kinds", 500, 0)
    model = report.reliability
    place = model.kind("Bash")
    pattern = (0, 1, 1, 2)
    plain, failed = (posterior(model, place, pattern, has_failed=f).better[1] for f in (None, True))
    known = posterior(model, place, pattern, known=((1, True), (0, False)))
    assert plain < failed < known.better[1] == pytest.approx(1.0)
    assert posterior(model, place, pattern, known=((-2, False),)).better[1] == 0
    executed = {("s0", "agent"): False, ("s0", world.teachers[0].name): True}
    again = extract_pairs(world.states, world.rows(), verdicts=executed)
    assert again.reliability.n_known == 1


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
    rows, blind = world.rows(), extract_pairs(world.states, world.rows())
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
    found, truth = after.precision, true_precision(world, after.pairs)
    assert found.n_proven > 20
    assert found.n_checked == 0
    missed_blind = abs(blind.precision.share - true_precision(world, blind.pairs))
    assert abs(found.share - truth) <= missed_blind + 0.01
    assert found.low <= truth <= found.high
    assert f"{found.n_proven} proven by execution; nobody has checked" in found.words()
    checked, chances = checked_by_hand(world, after, 100)
    both = extract_pairs(world.states, rows, verdicts=verdicts, checked=checked, chances=chances)
    truth = true_precision(world, both.pairs)
    assert both.precision.low <= truth <= both.precision.high


def precision_of(claims, checked):
    return PrecisionEvidence.of(claims, checked).precision()


def test_precision_in_words():
    claims = {f"p{i}": 0.9 for i in range(200)}
    claimed = "claimed precision .90 (.66 to .97 by votes alone)"
    assert precision_of(claims, {}).words() == f"{claimed}; nobody has checked a pair"
    assert precision_of(claims, {"p1": True}).words() == f"{claimed}; 1 checked, too few"
    checked = {f"p{i}": i % 10 > 0 for i in range(40)}
    found = precision_of(claims, checked)
    assert found.words() == "precision .92 (.80 to .98), 40 pairs checked"
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

"""The two numbers of a pair: what they follow from, and that what was learned says so."""

import pytest

from replay_pipeline.actions.difference import FACTS, ActionDifference
from replay_pipeline.judge import extract
from replay_pipeline.judge.belief import (
    LEAST_LESSON,
    belief,
    evidence_of,
    features,
    learned,
    right_if_agreed,
)
from tests.replay_pipeline.judge.test_extract import answers, state
from tests.support.messages import bash, call
from tests.support.worlds import WORLDS, simulate


def said_of(*facts, evidence=1.0, **votes):
    differs = ActionDifference(frozenset(facts))
    return belief(features(differs, **{"n_for": 2, "n_voting": 3, **votes}), evidence)


def test_what_differs_decides_whether_the_rejected_side_is_wrong():
    """In the order that real models' answers have shown; each far from the next."""
    wrong = [said_of(fact).rejected_wrong for fact in ("idle", "longer", "number")]
    assert wrong[0] < 0.2 < wrong[1] < 0.6 < 0.7 < wrong[2]
    for unscored in ("looks", "coding", "words"):
        assert said_of("number", unscored).rejected_wrong == pytest.approx(0.05)


def test_more_votes_make_the_chosen_side_surer():
    few = said_of("text")
    more = said_of("text", n_for=4, n_voting=4)
    assert few.chosen_right < more.chosen_right
    assert said_of("text", n_against=2).chosen_right != few.chosen_right
    assert right_if_agreed(0) > right_if_agreed(1) > right_if_agreed(2)


def test_an_agent_that_agrees_less_is_wrong_more_often_as_far_as_it_is_known():
    usual, weaker, unseen = (
        said_of("text", agreement=share).rejected_wrong for share in (0.9, 0.8, 0.4)
    )
    assert weaker > usual == unseen == said_of("text").rejected_wrong


def test_no_number_is_surer_than_a_check():
    for fact in FACTS:
        for n in (2, 3, 5):
            for evidence in (1.0, 60.0):
                found = said_of(fact, n_for=n, n_voting=n, evidence=evidence)
                assert 0.05 <= min(found) <= max(found) <= 0.95


def test_every_coefficient_has_an_interval_and_belongs_to_a_fact():
    model = learned()
    assert model.n_agents >= 20
    assert model.n_pairs >= 5_000
    every = ActionDifference(frozenset(FACTS), n_calls=2)
    names = features(every, n_for=3, n_voting=3, n_against=2, agreement=0.8).keys()
    for table in (model.chosen_right, model.rejected_wrong, model.chosen_right_by_votes):
        assert table.keys() <= names
        assert all(low - 0.3 <= value <= high + 0.3 for value, low, high in table.values())


def test_a_look_makes_a_pair_only_with_evidence_from_the_session():
    looks = {"a": call("Read", file_path="a.py"), "b": call("Read", file_path="a.py")}
    for outcome, made in (("ok", "lesson"), (None, "lesson"), ("tool_error", "pair")):
        at = state(action=call("Read", file_path="b.py"), outcome=outcome)
        at["messages"] = [{"role": "user", "content": "Look at a.py and b.py."}]
        report = extract.extract_pairs([at], answers(**looks), min_p_better=0.5)
        assert report.outcome_counts == {made: 1}
        assert [p["kind"] for p in report.positives] == ["lesson"] * (made == "lesson")
    two = [at | {"outcome": "ok", "state_id": name} for name in ("s1", "s2")]
    report = extract.extract_pairs(two, [*answers(**looks), *answers("s2", **looks)])
    assert report.to_json()["n_lessons"] == len(report.positives) == 2
    for lesson in report.positives:
        assert lesson["action"] == 'Read {"file_path":"a.py"}'
        assert lesson["p_chosen_right"] > 0.5
    assert report.pairs == []


@pytest.mark.parametrize(
    ("hint", "is_told"),
    [
        ("Exit code 1\n--- FAIL: TestCart (0.00s)\n    cart_test.go:3: stat: no such file or directory", False),
        ("Exit code 1\nsrc/cart.py:3:1: F401 unused import", False),
        ("Exit code 127\n/bin/bash: line 1: pytset: command not found", True),
        ("Exit code 1\n(eval):cd:1: no such file or directory: src", True),
        ("error: unknown option `--colour'\nusage: git diff [<options>]", True),
    ],
)  # fmt: skip
def test_a_failed_command_is_wrong_where_its_shell_refuses_it(hint, is_told):
    assert evidence_of("ok", ("Bash",), hint) == evidence_of(None, ("Edit",)) == 1
    refused = evidence_of("tool_error", ("Edit",))
    assert evidence_of("tool_error", ("Bash",), hint) == (refused if is_told else 1)
    assert evidence_of("user_rejected", ("Bash",)) == refused > 1


def test_a_command_or_an_edit_makes_a_pair_only_with_evidence_from_the_session():
    """A number in a command is no argument that somebody has scored: both may be right."""
    rows = answers(**dict.fromkeys("abc", bash("make test 2>&1 | head -50")))
    for outcome, made in (("ok", "lesson"), ("user_rejected", "pair")):
        at = state(action=bash("make test 2>&1 | head -100"), outcome=outcome)
        assert extract.extract_pairs([at], rows).outcome_counts == {made: 1}


def test_pairs_are_those_above_the_minimum_and_the_others_are_lessons():
    world = simulate(WORLDS["four kinds"], 400, seed=1)
    every = extract.extract_pairs(world.states, world.rows(), min_p_better=0.0)
    least = 0.6
    report = extract.extract_pairs(world.states, world.rows(), min_p_better=least)
    kept = {pair["pair_id"] for pair in report.pairs}
    assert kept == {p["pair_id"] for p in every.pairs if p["p_better"] >= least}
    counts = report.outcome_counts
    assert counts["pair"] == len(kept)
    assert counts["doubtful"] + report.n_lessons == len(every.pairs) - len(kept)
    for pair in every.pairs:
        both = pair["p_chosen_right"] * pair["p_rejected_wrong"]
        assert pair["p_better"] == pytest.approx(both, abs=1e-4)


def test_what_two_families_contradict_is_no_lesson():
    """Agent and teachers are right there too seldom: it is imitated at its probability alone."""
    rows = {name: bash("make") for name in "ab"} | {"c": bash("make test")}
    at = state(action=bash("make"))
    one = extract.extract_pairs([at], answers(**rows))
    two = extract.extract_pairs([at], answers(**rows, d=bash("make all")))
    assert [row["kind"] for row in (*one.positives, *two.positives)] == ["agreement", "answer"]
    assert (one.n_answers, two.n_answers) == (0, 1)
    assert one.outcome_counts == two.outcome_counts == {"agreement": 1}
    assert two.positives[0]["p_chosen_right"] < LEAST_LESSON <= one.positives[0]["p_chosen_right"]


def test_checks_move_what_nobody_has_checked():
    world = simulate(WORLDS["four kinds"], 400, seed=1)
    every = extract.extract_pairs(world.states, world.rows(), min_p_better=0.0).pairs
    checked = {pair["pair_id"]: False for pair in every[:40]}
    after = extract.extract_pairs(world.states, world.rows(), min_p_better=0.0, checked=checked)
    assert len(after.refuted) == 40
    before = {pair["pair_id"]: pair["p_better"] for pair in every}
    moved = [pair["p_better"] - before[pair["pair_id"]] for pair in after.pairs]
    assert max(moved) <= 0, "none is believed more"
    assert sum(moved) < -1
    assert after.reliability.accuracy("agent") > 0.7


def test_an_action_that_its_tool_refused_is_wrong_for_sure_enough():
    rows = answers(a=bash("make"), b=bash("make"))
    plain, refused = (
        extract.extract_pairs([state()], rows, min_p_better=0.0, verdicts=known).pairs[0]
        for known in ({}, {("s1", "agent"): False})
    )
    assert plain["p_rejected_wrong"] < refused["p_rejected_wrong"] == pytest.approx(0.95)

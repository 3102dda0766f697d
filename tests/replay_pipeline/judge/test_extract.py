"""From votes to pairs: outcomes, thresholds, families, evidence, tables."""

import json
from dataclasses import replace

import pytest

from replay_pipeline.errors import ConfigError
from replay_pipeline.judge.belief import learned
from replay_pipeline.judge.records import outcomes_table, pairs_table, positives_table
from replay_pipeline.judge.report import PairReport, TeacherTally
from replay_pipeline.storage.pair_rows import pair_id_of, pairs_of
from replay_pipeline.storage.schemas import (
    DPO_PAIRS,
    DROPPED_PAIRS,
    NORMALIZED_PAIRS,
    POSITIVES,
    TABLES,
)
from replay_pipeline.types import TeacherAction
from tests.support.messages import bash, call, says
from tests.support.votes import extract_dpo_pairs, extract_pairs

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


def state(state_id="s1", action=None, **more):
    return {
        "state_id": state_id,
        "session_id": "session",
        "messages": [{"role": "user", "content": "Fix tests/test_cart.py; a.py?"}],
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


TOLD = {
    "session_id": "session",
    "conversation": "conversation",
    "cwd": "/home/ada/shop",
    "tools": [{"type": "function", "function": {"name": "Bash", "parameters": {}}}],
    "hint": "Look first.",
    "outcome": "tool_error",
    "student_model": "claude-opus-4-5-20251101",
}
"""What a state tells, and a pair of it takes over."""


def message(command):
    """A canonical call."""
    function = {"name": "Bash", "arguments": f'{{"command":"{command}"}}'}
    called = {"id": "call_0", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [called]}


def prices(**by_teacher):
    """Answers with a price each."""
    return [
        TeacherAction(
            state_id="s1",
            teacher=name,
            family=name,
            action=bash(command),
            cost_usd=cost_usd,
            is_distillable=True,
        )
        for name, (command, cost_usd) in by_teacher.items()
    ]


def test_a_pair_says_all_that_is_known_of_it():
    rows = prices(qwen=("ls", 0.1), deepseek=("ls", 0.2), glm=("make", 0.3))
    told = state(**TOLD)
    [pair] = extract_dpo_pairs([told], [*rows, *answers(kimi=None), own(bash("tox"))])
    assert pair == {
        **TOLD,
        "state_id": "s1",
        "state_messages": told["messages"],
        "pair_id": pair_id_of("s1", 'Bash {"command":"ls"}', 'Bash {"command":"pytest"}'),
        "chosen": 'Bash {"command":"ls"}',
        "rejected": 'Bash {"command":"pytest"}',
        "chosen_action": message("ls"),
        "rejected_action": message("pytest"),
        "n_teachers_agreeing": 2,
        "n_teachers_asked": 5,
        "n_teachers_valid": 3,
        "teachers_agreeing": ["deepseek", "qwen"],
        "agreement_level": "exact",
        "n_against": 1,
        "margin": 1,
        "source": "consensus",
        "rejected_source": "recorded",
        "shares_vendor": False,
        "is_distillable": True,
        "control_mismatch": True,
        "cost_usd": 0.61,
        "difference": ["text", "looks", "coding"],
        "p_chosen_right": pair["p_chosen_right"],
        "p_rejected_wrong": pair["p_rejected_wrong"],
        "p_better": pair["p_better"],
        "weight": pair["p_better"],
    }


def test_a_pair_leaves_out_what_nobody_knows():
    [pair] = extract_dpo_pairs([state(hint=None)], answers(a=bash("ls"), b=bash("ls")))
    unknown = {"tools", "hint", "outcome", "is_distillable", "control_mismatch", "evidence"}
    assert not pair.keys() & unknown
    assert None not in pair.values()


def test_a_positive_says_all_that_is_known_of_it():
    rows = prices(qwen=("pytest", 0.1), deepseek=("pytest", 0.2), glm=("make", 0.3))
    told = state(**TOLD)
    report = extract_pairs([told], rows)
    shared = {key: value for key, value in TOLD.items() if key != "hint"}
    assert report.positives == [
        {
            **shared,
            "state_id": "s1",
            "state_messages": told["messages"],
            "action": 'Bash {"command":"pytest"}',
            "action_message": message("pytest"),
            "kind": "agreement",
            "p_chosen_right": report.positives[0]["p_chosen_right"],
            "n_teachers_agreeing": 2,
            "n_teachers_asked": 3,
            "teachers_agreeing": ["deepseek", "qwen"],
            "agreement_level": "exact",
            "is_distillable": True,
            "cost_usd": 0.6,
        }
    ]
    [stored] = positives_table(report.positives).to_pylist()
    assert (stored["n_teachers_agreeing"], stored["cost_usd"]) == (2, 0.6)
    assert json.loads(stored["action_json"]) == message("pytest")


UNREAD = call("Edit", file_path="nowhere.py", old_string="a", new_string="b")


@pytest.mark.parametrize(
    ("said", "left_out", "action", "p"),
    [
        ({"a": "ls"}, None, "ls", 0),  # the only answer
        ({"a": "ls", "b": "make"}, "all_differ", None, None),
        ({"a": "ls", "b": "pytest"}, None, "pytest", 1),  # one for the agent, one not
        ({"a": "ls", "b": None}, None, "ls", 0),
        ({"a": UNREAD}, "infeasible", None, None),
        ({"a": "ls", "b": "ls"}, None, None, None),  # they agree
    ],
)
def test_an_answer_that_nobody_confirmed_is_to_be_imitated_at_its_probability(
    said, left_out, action, p
):
    rows = [
        TeacherAction(
            state_id="s1",
            teacher=name,
            family=name,
            action=bash(command) if isinstance(command, str) else command,
            error_code=None if command else "timeout",
            cost_usd=0.01 * (1 + number),
        )
        for number, (name, command) in enumerate(said.items())
    ]
    report = extract_pairs([state()], rows)
    found = [row for row in report.positives if row["kind"] == "answer"]
    assert report.n_answers == len(found) == (action is not None)
    assert dict(report.answers_left_out) == ({left_out: 1} if left_out else {})
    if action is not None:
        assert found[0]["action"] == f'Bash {{"command":"{action}"}}'
        assert found[0]["p_chosen_right"] == learned().answer_right[p]
        assert report.to_json()["n_positives"] == 0
    failed = extract_pairs([state(outcome="user_rejected")], rows).positives
    assert [row for row in failed if row["action"] == 'Bash {"command":"pytest"}'] == []


def test_the_cost_of_a_state_does_not_depend_on_the_order_of_its_answers():
    rows = prices(qwen=("ls", 0.1), deepseek=("ls", 0.2), glm=("ls", 0.3))
    for drawn in (rows, rows[::-1], [rows[1], rows[2], rows[0]]):
        assert extract_dpo_pairs([state()], drawn)[0]["cost_usd"] == 0.6


def row(**told):
    """A row of the table of outcomes, of a state at which nothing special happened."""
    plain = {
        "state_id": "s1",
        "session_id": "session",
        "outcome": "no_consensus",
        "level": None,
        "student_level": None,
        "near_level": None,
        "n_asked": 0,
        "n_valid": 0,
        "n_failed": 0,
        "n_invalid": 0,
        "n_own_family": 0,
        "n_agreeing": 0,
        "n_against": None,
        "margin": 0,
        "is_tie": False,
        "invalid_reason": None,
        "why": None,
        "looked_in_vain": None,
    }
    return plain | told


LS, MAKE, TOX, PYTEST = bash("ls"), bash("make"), bash("tox"), bash("pytest")
EXACT = {"outcome": "pair", "level": "exact"}


@pytest.mark.parametrize(
    ("votes", "told"),
    [
        ({}, {"outcome": "too_few_answers"}),
        (
            {"a": LS, "b": None, "c": call("Read")},
            {"outcome": "too_few_answers", "n_asked": 3, "n_valid": 1, "n_failed": 1}
            | {"n_invalid": 1, "n_agreeing": 1, "margin": 1},
        ),
        (
            {"a": LS, "b": MAKE},
            {"n_asked": 2, "n_valid": 2, "n_agreeing": 1, "near_level": "tool"},
        ),
        (
            {"a": LS, "b": call("Read", file_path="a.py")},
            {"n_asked": 2, "n_valid": 2, "n_agreeing": 1},
        ),
        (
            {"a": bash("make -j2"), "b": MAKE, "c": TOX},
            {"n_asked": 3, "n_valid": 3, "n_agreeing": 1, "near_level": "target"},
        ),
        (
            {"a": LS, "b": LS, "c": MAKE, "d": bash("make")},
            {"n_asked": 4, "n_valid": 4, "n_agreeing": 2, "is_tie": True},
        ),
        (
            {"a": LS, "b": LS, "anthropic": LS, "d": bash("pytest -q")},
            EXACT
            | {"n_asked": 4, "n_valid": 3, "n_own_family": 1, "n_agreeing": 2}
            | {"n_against": 1, "margin": 2, "student_level": "tool"},
        ),
        (
            {"a": PYTEST, "b": PYTEST, "c": MAKE},
            {"outcome": "agreement", "level": "exact", "student_level": "exact"}
            | {"n_asked": 3, "n_valid": 3, "n_agreeing": 2, "margin": 1},
        ),
        (
            {"a": LS, "b": LS, "c": PYTEST, "anthropic": PYTEST},
            EXACT
            | {"outcome": "contested", "why": "3 for the student's action", "n_own_family": 1}
            | {"n_asked": 4, "n_valid": 3, "n_agreeing": 2, "n_against": 3, "margin": -1}
            | {"student_level": "tool"},
        ),
        (
            {"a": bash("pytest -x"), "b": bash("pytest -x")},
            EXACT
            | {"n_asked": 2, "n_valid": 2, "n_agreeing": 2, "n_against": 1, "margin": 1}
            | {"student_level": "target"},
        ),
    ],
)
def test_the_row_of_a_state_says_how_it_was_judged(votes, told):
    [found] = extract_pairs([state()], answers(**votes)).outcomes
    assert found == row(**told)


def test_answers_of_the_students_own_family_are_counted_whether_or_not_they_vote():
    rows = [*answers(a=LS, b=LS), own(LS, teacher="opus"), own(MAKE, teacher="sonnet")]
    counted = {"n_asked": 4, "n_own_family": 2, "student_level": "tool", "n_against": 1}
    [found] = extract_pairs([state()], rows).outcomes
    assert found == row(**EXACT, **counted, n_valid=2, n_agreeing=2, margin=2)
    [found] = extract_pairs([state()], rows, count_own_family=True).outcomes
    assert found == row(**EXACT, **counted, n_valid=4, n_agreeing=3, margin=2)


def test_the_row_of_an_action_that_cannot_run_says_why():
    broken = state(action=call("Bash"))
    [found] = extract_pairs([broken], answers(a=LS, b=LS)).outcomes
    counted = {"n_asked": 2, "n_valid": 2, "n_agreeing": 2, "n_against": 1, "margin": 1}
    why = "schema_invalid: Bash: command is missing"
    told = {"outcome": "invalid_action", "invalid_reason": why, "level": "exact"}
    assert found == row(**told, **counted)


def outcome_of(report, state_id="s1"):
    return next(row for row in report.outcomes if row["state_id"] == state_id)


def judged(*args, **options):
    return outcome_of(extract_pairs(*args, **options))["outcome"]


def test_where_all_who_were_asked_took_the_agents_action_its_vote_counts():
    report = extract_pairs([state()], answers(a=bash("pytest  # all")))
    assert report.outcome_counts == {"agreement": 1}
    [positive] = report.positives
    assert (positive["teachers_agreeing"], positive["n_teachers_agreeing"]) == (["a"], 1)
    assert outcome_of(report)["n_agreeing"] == 1
    listed = state(action=bash("ls -a -l"))
    assert (
        outcome_of(extract_pairs([listed], answers(a=bash("ls -la"))))["student_level"] == "effect"
    )
    both = extract_pairs([state()], answers(a=bash("pytest"), b=bash("pytest")), 3)
    assert both.positives[0]["n_teachers_agreeing"] == 2
    # Not with another answer, one that can't be used, or a higher threshold.
    assert judged([state()], answers(a=bash("ls"))) == "too_few_answers"
    assert judged([state()], answers(a=bash("pytest"), b=None)) == "too_few_answers"
    assert judged([state()], answers(a=bash("pytest")), 3) == "too_few_answers"
    assert judged([state()], answers(a=bash("pytest"), b=bash("pytest")), 3) == "agreement"


def test_an_answer_cut_short_has_no_vote():
    text = says("The test fails because")
    rows = [
        TeacherAction(state_id="s1", teacher=t, family=t, action=text, finish_reason=reason)
        for t, reason in (("a", "stop"), ("b", "length"))
    ]
    asked = state(action=says("Shall I?"))
    assert judged([asked], rows) == "too_few_answers"
    assert judged([asked], rows, 1) == "pair"


def test_one_model_family_is_one_vote():
    rows = answers(a=bash("ls"), b=bash("ls"))
    same = [
        TeacherAction(state_id="s1", teacher=t, model=m, family=None, action=bash("ls"))
        for t, m in (("small", "qwen/qwen3-8b"), ("large", "Qwen/Qwen3-Coder"))
    ]
    assert judged([state()], rows) == "pair"
    assert judged([state()], same) == "too_few_answers"
    assert judged([state()], same, 1) == "pair"


def test_a_teacher_of_the_students_family_does_not_count_by_default():
    own = TeacherAction(
        state_id="s1", teacher="opus", model="anthropic/claude-opus-4.7", action=bash("ls")
    )
    rows = [own, *answers(deepseek=bash("ls"), qwen=bash("make"))]
    assert judged([state()], rows) == "no_consensus"
    report = extract_pairs([state()], rows, count_own_family=True)
    [pair] = report.pairs
    assert pair["shares_vendor"] is True
    assert report.n_circular_pairs == 1


OPUS = "anthropic/claude-opus-4.5"


def own(action, model=OPUS, teacher="own", **more):
    """An answer of the student's own model."""
    return TeacherAction(state_id="s1", teacher=teacher, model=model, action=action, **more)


def control_of(*rows, at=None, **options):
    report = extract_pairs([at or state()], rows, **options)
    return report.n_control, report.n_control_mismatch


def test_an_answer_of_the_students_own_model_tells_whether_it_would_act_alike():
    states = [state("s1"), state("s2"), state("s3")]
    rows = [row for s in states for row in answers(s["state_id"], a=LS, b=LS, c=LS)]
    rows += [own(bash("pytest")), replace(own(bash("tox")), state_id="s2")]
    report = extract_pairs(states, rows)
    assert [pair.get("control_mismatch") for pair in report.pairs] == [False, True, None]
    assert report.control_mismatch_rate == 0.5
    assert control_of(own(bash("ls"), error_code="502")) == control_of(own(None)) == (0, 0)
    # Of several the first by name; and compared as teachers are.
    named = [own(bash("ls"), teacher="b"), own(bash("pytest"), teacher="a")]
    assert control_of(*named) == control_of(*named[::-1]) == (1, 0)
    more = own(bash("pytest -x"))
    assert (control_of(more), control_of(more, level="target")) == ((1, 1), (1, 0))
    asked, again = state(action=says("Shall I?")), own(says("Should I?"))
    assert control_of(again, at=asked) == (1, 1)
    assert control_of(again, at=asked, same_text=lambda *_: True) == (1, 0)


@pytest.mark.parametrize(
    ("answered", "recorded", "is_own"),
    [
        ("anthropic/claude-opus-4.5", "claude-opus-4-5-20251101", True),
        ("openrouter/anthropic/Claude_Opus_4.5", "claude-opus-4-5", True),
        ("claude-opus-4-5-251101", "claude-opus-4-5-20250901", True),
        ("claude-opus-4-6", "claude-opus-4-5", False),
        ("claude-opus-4-5", "claude-opus-4", False),
        ("moonshotai/kimi-k2-0905", "kimi-k2-0711", False),
        ("kimi-k2-25090", "kimi-k2", False),
        ("kimi-k2-250905b", "kimi-k2", False),
        ("qwen/qwen3", "anthropic/qwen3", True),
        (None, "claude-opus-4-5", False),
        ("claude-opus-4-5", None, False),
        (None, None, False),
        ("", "", False),
    ],
)
def test_the_students_own_model_is_known_under_every_spelling(answered, recorded, is_own):
    row = own(bash("pytest"), model=answered)
    assert control_of(row, at=state(student_model=recorded)) == (int(is_own), 0)


def votes(*rows):
    return [
        TeacherAction(state_id="s1", action=bash("ls"), **{"family": told["teacher"], **told})
        for told in rows
    ]


@pytest.mark.parametrize(
    ("known", "is_distillable"),
    [
        ((True, True), True),
        ((True, None), None),
        ((None, None), None),
        ((None, False), False),
        ((False, True), False),
    ],
)
def test_a_pair_may_be_trained_on_if_every_agreeing_teacher_allows_it(known, is_distillable):
    one, other = known
    rows = votes({"teacher": "a", "is_distillable": one}, {"teacher": "b", "is_distillable": other})
    outsider = TeacherAction(state_id="s1", teacher="c", action=bash("make"), is_distillable=False)
    [pair] = extract_dpo_pairs([state()], [*rows, outsider])
    assert pair.get("is_distillable") is is_distillable


def test_one_vote_of_a_rehearsal_makes_all_of_a_pair_a_rehearsal():
    real = {"teacher": "b", "model": "qwen/qwen3"}
    for played in ({"model": "rehearsal/one"}, {"provider": "Rehearsal"}):
        rows = votes({"teacher": "a", **played}, real, {"teacher": "rehearsal-one"})
        [pair] = extract_dpo_pairs([state()], rows)
        assert pair["source"] == "rehearsal"
        assert pair["teachers_agreeing"] == ["rehearsal:a", "b", "rehearsal-one"]
    report = extract_pairs([state(action=bash("ls"))], rows)
    assert report.positives[0]["teachers_agreeing"] == ["rehearsal:a", "b", "rehearsal-one"]
    beside = TeacherAction(state_id="s1", teacher="rehearsal-two", action=bash("make"))
    [pair] = extract_dpo_pairs([state()], [*votes(real, {"teacher": "c"}), beside])
    assert (pair["source"], pair["teachers_agreeing"]) == ("consensus", ["b", "c"])


def test_what_became_of_the_recorded_action_is_evidence_for_the_weight():
    rows = answers(a=bash("ls"), b=bash("ls"))
    well, plain, failed = (
        extract_dpo_pairs([state(outcome=outcome)], rows)[0]["weight"]
        for outcome in ("ok", None, "denied_by_policy")
    )
    assert well == plain < failed < 1


def read(offset, limit, file="a.py"):
    return call("Read", file_path=file, offset=offset, limit=limit)


def test_consensus_is_a_group_that_agrees_pairwise():
    chain = {"a": read(1, 10), "b": read(8, 10), "c": read(15, 10)}
    [pair] = extract_dpo_pairs([state()], answers(**chain))
    assert pair["n_teachers_agreeing"] == 2
    assert judged([state()], answers(**chain), 3) == "no_consensus"


def test_grouping_does_not_depend_on_the_order_of_votes():
    votes = {
        "a": read(1, 10),
        "b": read(8, 10),
        "c": read(15, 10),
        "d": read(12, 30),
        "e": bash("ls"),
    }
    rows = answers(**votes)
    found = [
        extract_dpo_pairs([state()], [rows[i] for i in order])
        for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3])
    ]
    assert found[0] == found[1] == found[2]
    assert found[0][0]["n_teachers_agreeing"] == 3


def test_chosen_is_the_medoid_of_the_winning_group():
    votes = {
        "a": bash("pytest -q -x"),
        "b": bash("pytest -x -q"),
        "c": bash("pytest -x -q"),
    }
    [pair] = extract_dpo_pairs([state(action=bash("ls"))], answers(**votes))
    assert pair["chosen"] == 'Bash {"command":"pytest -x -q"}'
    assert pair["agreement_level"] == "effect"


def test_a_student_that_agrees_with_any_of_the_group_makes_no_pair():
    chain = answers(a=read(1, 10), b=read(8, 10))
    assert judged([state(action=read(17, 5))], chain) == "agreement"
    assert judged([state(action=read(18, 5))], chain) == "pair"


def test_tools_on_offer_decide_what_is_a_valid_action():
    rows = answers(a=call("Read", file_path="a.py"), b=call("Glob", pattern="*"), c=bash("ls"))
    report = extract_pairs([state(action=call("Read", file_path="b.py"), tools=[READ_TOOL])], rows)
    assert outcome_of(report)["n_invalid"] == 2


def test_a_student_that_calls_a_tool_not_on_offer_makes_no_pair():
    rows = answers(a=call("Read", file_path="a.py"), b=call("Read", file_path="a.py"))
    assert judged([state(action=LS)], rows) == "pair"
    assert judged([state(action=LS, tools=[READ_TOOL])], rows) == "invalid_action"


def test_duplicates_and_strangers_are_counted():
    rows = answers(a=bash("ls"), b=bash("ls"))
    strangers = [row for name in ("s8", "s9") for row in answers(name, a=LS, b=LS)]
    twice = [*rows, rows[0], *answers(a=MAKE), *answers(b=MAKE)]
    report = extract_pairs([state()] * 3 + [state("s2")], [*twice, *strangers])
    assert report.n_duplicate_states == 2
    assert report.n_duplicate_answers == 3
    assert report.n_unmatched_answers == 4
    assert [row["state_id"] for row in report.outcomes] == ["s1", "s2"]
    assert [pair["chosen"] for pair in report.pairs] == ['Bash {"command":"ls"}']


@pytest.mark.parametrize(
    ("threshold", "why"),
    [
        (0, "agreement_threshold=0 must be at least 1: it is the number of model families that"),
        (-1, "agreement_threshold=-1 must be at least 1"),
        (1.5, "agreement_threshold=1.5 is not a whole number"),
        (True, "agreement_threshold=True is not a whole number"),
        ("2", "agreement_threshold='2' is not a whole number"),
    ],
)
def test_threshold_must_be_a_positive_number_of_families(threshold, why):
    with pytest.raises(ConfigError, match=f"^{why}"):
        extract_dpo_pairs([], [], threshold)


def test_final_texts_are_compared_by_the_judge_that_is_given():
    def same_topic(one, other):
        return one.split()[0] == other.split()[0]

    rows = answers(a=says("Fixed it."), b=says("Fixed the cart."), c=says("Stuck."))
    asked = state(action=says("Shall I?"))
    assert judged([asked], rows) == "no_consensus"
    for more in ([], [own(says("I stopped."))]):  # one that does not vote makes no difference
        [pair] = extract_dpo_pairs([asked], [*rows, *more], same_text=same_topic)
        assert pair["agreement_level"] == "effect"
    assert pair["rejected"] == "Shall I?"


def test_unknown_level_is_refused():
    with pytest.raises(
        ConfigError, match=r"^level='nearly' is not one of exact, effect, target, tool$"
    ):
        extract_dpo_pairs([], [], level="nearly")


def test_the_report_as_json_holds_every_figure():
    def judged(outcome, **told):
        return {"outcome": outcome, "level": None, "is_tie": False, "near_level": None, **told}

    pairs = [{"shares_vendor": True}, {"source": "rewind"}, {"source": "rejection"}, {}]
    pairs += [{"source": "rewind", "shares_vendor": False}, {"shares_vendor": True}]
    report = PairReport(
        level="effect",
        agreement_threshold=3,
        pairs=pairs,
        positives=[{}] * 5,
        outcomes=[
            judged("pair", level="exact"),
            judged("pair", level="effect"),
            judged("agreement", level="exact"),
            judged("no_consensus", is_tie=True),
            judged("no_consensus", near_level="tool"),
            judged("no_consensus", near_level="target"),
            judged("no_consensus", near_level="tool"),
        ],
        teachers={
            "qwen": TeacherTally(n_asked=11, n_failed=1, n_invalid=2, n_valid=8),
            "glm": TeacherTally(n_in_consensus=4, n_with_student=3, cost_usd=0.0123456784999),
        },
        n_duplicate_states=21,
        n_duplicate_answers=22,
        n_unmatched_answers=23,
        n_control=40,
        n_control_mismatch=10,
        n_natural_joined=24,
    )
    report.natural_left_out.update(["rewind_refusal", "rewind_refusal", "rejection_invalid"])
    counts = ("n_asked", "n_failed", "n_invalid", "n_valid", "n_in_consensus", "n_with_student")
    nothing = {**dict.fromkeys(counts, 0), "cost_usd": 0.0, "family": None}
    found = json.loads(json.dumps(report.to_json()))
    assert found == {
        "level": "effect",
        "agreement_threshold": 3,
        "n_states": 7,
        "n_pairs": 6,
        "n_positives": 5,
        **dict.fromkeys(("n_lessons", "n_answers", "n_refuted"), 0),
        "answers_left_out": {},
        "precision": {
            **dict.fromkeys(("share", "low", "high", "claimed"), 0.0),
            **dict.fromkeys(("n_pairs", "n_checked", "n_proven"), 0),
            "words": "no pairs",
        },
        "poll": {
            **dict.fromkeys(("n_pairs", "n_proven", "n_accepted"), 0),
            **dict.fromkeys(("claimed", "open"), 0.0),
            "checks": [],
        },
        "reliability": None,
        "outcomes": {"agreement": 1, "no_consensus": 4, "pair": 2},
        "pairs_by_source": {"consensus": 3, "rejection": 1, "rewind": 2},
        "natural_left_out": {"rejection_invalid": 1, "rewind_refusal": 2},
        "n_natural_joined": 24,
        "consensus_levels": {"effect": 1, "exact": 2},
        "n_ties": 1,
        "near_misses": {"target": 1, "tool": 2},
        "n_circular_pairs": 2,
        "n_duplicate_states": 21,
        "n_duplicate_answers": 22,
        "n_unmatched_answers": 23,
        "control": {"n": 40, "n_mismatch": 10, "mismatch_rate": 0.25},
        "teachers": {
            "glm": nothing | {"n_in_consensus": 4, "n_with_student": 3, "cost_usd": 0.012345678},
            "qwen": nothing | {"n_asked": 11, "n_failed": 1, "n_invalid": 2, "n_valid": 8},
        },
        "matrix": {},
    }
    assert [*found["outcomes"]] == ["agreement", "no_consensus", "pair"]
    assert [*found["teachers"]] == ["glm", "qwen"]
    assert [*found["natural_left_out"]] == ["rejection_invalid", "rewind_refusal"]


def test_a_report_of_nothing_has_no_rates():
    report = extract_pairs([state()], []).to_json()
    assert (report["level"], report["agreement_threshold"]) == ("effect", 2)
    assert report["control"] == {"n": 0, "n_mismatch": 0, "mismatch_rate": None}
    assert report["matrix"] == report["teachers"] == {}


def test_every_answer_is_tallied_under_its_teacher():
    states = [state("s1"), state("s2"), state("s3")]
    rows = [
        *answers("s1", a=LS, b=LS, anthropic=PYTEST, c=bash("pytest  # all")),
        *answers("s2", a=PYTEST, b=PYTEST, anthropic=MAKE, c=None),
        *answers("s3", a=LS, b=MAKE, c=call("Read")),
    ]
    report = extract_pairs(states, rows)
    assert report.outcome_counts == {"agreement": 1, "contested": 1, "no_consensus": 1}
    tally = {
        name: (t.n_asked, t.n_failed, t.n_invalid, t.n_valid, t.n_in_consensus, t.n_with_student)
        for name, t in report.teachers.items()
    }
    assert tally == {
        "a": (3, 0, 0, 3, 2, 1),
        "b": (3, 0, 0, 3, 2, 1),
        "anthropic": (2, 0, 0, 2, 0, 1),
        "c": (3, 1, 1, 1, 0, 1),
    }
    costs = {name: tally.cost_usd for name, tally in report.teachers.items()}
    assert costs == pytest.approx({"a": 0.03, "b": 0.03, "anthropic": 0.02, "c": 0.03})


def test_the_matrix_counts_states_at_which_both_teachers_were_valid():
    rows = [
        *answers("s1", b=bash("ls -l -a"), a=bash("ls -la"), c=bash("ls -l")),
        *answers("s2", a=LS, b=MAKE),
        *answers("s3", c=LS, a=None),
    ]
    states = [state(f"s{n}") for n in (1, 2, 3)]
    assert extract_pairs(states, rows).matrix == {
        "a": {"b": (2, 1), "c": (1, 0)},
        "b": {"a": (2, 1), "c": (1, 0)},
        "c": {"a": (1, 0), "b": (1, 0)},
    }
    loose = extract_pairs(states, rows, level="target").matrix
    assert loose["a"] == {"b": (2, 1), "c": (1, 1)}
    strict = extract_pairs(states, rows, level="exact").matrix
    assert strict["a"] == {"b": (2, 0), "c": (1, 0)}


def test_a_state_may_be_named_by_what_is_no_text():
    names = ("s\ud800", "s\udfff")
    rows = [row for name in names for row in answers(name, a=LS, b=LS)]
    report = extract_pairs([state(name) for name in names], rows)
    assert len({pair["pair_id"] for pair in report.pairs}) == 2


def test_tables_have_their_schemas_and_pairs_come_back():
    surrogate = call("Write", file_path="a.py", content="\ud800")
    rows = [
        *answers("s1", a=bash("ls"), b=bash("ls")),
        *answers("s2", a=bash("pytest"), b=bash("pytest")),
        *answers("s3", a=surrogate, b=surrogate),
    ]
    states = [state("s1", tools=[]), state("s2", hint="Not so."), state("s3")]
    by_id = {one["state_id"]: one for one in states}
    report = extract_pairs(states, rows)
    table = pairs_table(report.pairs)
    assert table.schema.equals(DPO_PAIRS)
    assert list(pairs_of(table, lambda ids: [by_id[i] for i in ids])) == report.pairs
    positives = positives_table(report.positives)
    assert positives.schema.equals(POSITIVES)
    assert positives["action"].to_pylist() == ['Bash {"command":"pytest"}']
    assert outcomes_table(report.outcomes).schema.equals(TABLES["outcomes"])
    assert pairs_table([]).schema.equals(DPO_PAIRS)
    assert pairs_table(report.pairs, "normalized_pairs").schema.equals(NORMALIZED_PAIRS)
    assert positives_table(report.positives, "dropped_pairs").schema.equals(DROPPED_PAIRS)


def test_a_pair_at_rest_names_its_state_and_gets_its_prompt_back(monkeypatch):
    monkeypatch.setattr("replay_pipeline.storage.pair_rows.ROWS_AT_ONCE", 3)
    states = [state(f"s{n}", tools=[]) for n in range(8)]
    rows = [r for n in range(8) for r in answers(f"s{n}", a=bash("ls"), b=bash("ls"))]
    report = extract_pairs(states, rows)
    table = pairs_table(report.pairs)
    assert table.nbytes < 8_000
    asked = []

    def prompts(ids):
        asked.append(list(ids))
        return [one for one in states if one["state_id"] in ids and one["state_id"] != "s4"]

    pairs = list(pairs_of(table, prompts))
    assert [len(ids) for ids in asked] == [3, 3, 2]
    assert "state_messages" not in pairs.pop(4)
    assert pairs == report.pairs[:4] + report.pairs[5:]


def test_extraction_is_deterministic_whatever_the_order_of_answers():
    states = [state(f"s{n}") for n in range(5)]
    rows = [row for s in states for row in answers(s["state_id"], a=bash("ls"), b=bash("ls -l"))]
    one, other = extract_pairs(states, rows), extract_pairs(states, rows[::-1])
    assert one.to_json() == other.to_json()
    assert one.pairs == other.pairs

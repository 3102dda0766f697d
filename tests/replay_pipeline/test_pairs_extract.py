"""From votes to pairs: outcomes, thresholds, families, evidence, tables."""

import json

import pytest

from replay_pipeline.errors import ConfigError
from replay_pipeline.pairs import (
    extract_dpo_pairs,
    extract_pairs,
    outcomes_table,
    pairs_of,
    pairs_table,
    positives_table,
)
from replay_pipeline.storage.schemas import DPO_PAIRS, OUTCOMES, POSITIVES
from replay_pipeline.types import TeacherAction

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


def call(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


def bash(command):
    return call("Bash", command=command)


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


def test_two_teachers_that_agree_against_the_student_make_a_pair():
    [pair] = extract_dpo_pairs(
        [state()],
        answers(
            deepseek=call("Read", file_path="tests/test_cart.py"),
            qwen=call("Read", file_path=f"{CWD}/tests/./test_cart.py"),
            glm=bash("ls"),
        ),
    )
    assert pair["chosen"] == 'Read {"file_path":"tests/test_cart.py"}'
    assert pair["rejected"] == 'Bash {"command":"pytest"}'
    assert pair["n_teachers_agreeing"] == 2
    assert pair["n_teachers_asked"] == pair["n_teachers_valid"] == 3
    assert pair["teachers_agreeing"] == ["deepseek", "qwen"]
    assert pair["agreement_level"] == "exact"
    assert pair["margin"] == 1
    assert pair["cost_usd"] == pytest.approx(0.03)
    assert pair["weight"] == pytest.approx(2 / 3)
    assert pair["state_messages"] == [{"role": "user", "content": "Fix tests/test_cart.py; a.py?"}]


def outcome_of(report, state_id="s1"):
    return next(row for row in report.outcomes if row["state_id"] == state_id)


def judged(*args, **options):
    return outcome_of(extract_pairs(*args, **options))["outcome"]


def test_every_state_has_exactly_one_outcome():
    states = [state(f"s{n}") for n in range(6)]
    states[5] = state("s5", action=call("Edit", file_path="a.py"))
    rows = [
        *answers("s0", a=bash("ls"), b=bash("ls"), c=bash("make")),
        *answers("s1", a=bash("pytest  # all"), b=bash("pytest"), c=bash("make")),
        *answers("s2", a=bash("ls"), b=bash("make"), c=bash("tox")),
        *answers("s3", a=bash("ls"), b=None, c=call("Read")),
        *answers("s5", a=bash("ls"), b=bash("ls")),
    ]
    report = extract_pairs(states, rows)
    assert [(row["state_id"], row["outcome"]) for row in report.outcomes] == [
        ("s0", "pair"),
        ("s1", "agreement"),
        ("s2", "no_consensus"),
        ("s3", "too_few_answers"),
        ("s4", "too_few_answers"),
        ("s5", "invalid_action"),
    ]
    assert report.n_states == sum(report.outcome_counts.values()) == 6
    s3 = outcome_of(report, "s3")
    assert (s3["n_asked"], s3["n_valid"], s3["n_failed"], s3["n_invalid"]) == (3, 1, 1, 1)
    assert "old_string is missing" in outcome_of(report, "s5")["invalid_reason"]


def test_failed_and_invalid_answers_have_no_vote_but_are_counted():
    failed = TeacherAction(
        state_id="s1", teacher="kimi", family="kimi", action=bash("ls"), error_code="502"
    )
    report = extract_pairs([state()], [*answers(a=bash("ls"), b=call("Bash", cmd="ls")), failed])
    assert outcome_of(report)["outcome"] == "too_few_answers"
    assert report.teachers["kimi"].n_failed == 1
    assert report.teachers["b"].n_invalid == 1
    assert sum(tally.n_asked for tally in report.teachers.values()) == 3


def test_an_answer_cut_short_has_no_vote():
    text = {"role": "assistant", "content": "The test fails because"}
    rows = [
        TeacherAction(state_id="s1", teacher=t, family=t, action=text, finish_reason=reason)
        for t, reason in (("a", "stop"), ("b", "length"))
    ]
    asked = state(action={"role": "assistant", "content": "Shall I?"})
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
    assert pair["weight"] == pytest.approx(2 / 3 * 0.5)


def test_control_run_of_the_students_own_model_is_carried_along():
    def control(state_id, action):
        return TeacherAction(
            state_id=state_id, teacher="c", model="anthropic/claude-opus-4.5", action=action
        )

    states = [state("s1"), state("s2"), state("s3")]
    rows = [row for s in states for row in answers(s["state_id"], a=bash("ls"), b=bash("ls"))]
    report = extract_pairs(
        states, rows, control=[control("s1", bash("pytest")), control("s2", bash("tox"))]
    )
    assert [pair.get("control_mismatch") for pair in report.pairs] == [False, True, None]
    assert [pair["weight"] for pair in report.pairs] == [1.0, 0.5, 1.0]
    assert report.control_mismatch_rate == 0.5
    asked_again = extract_pairs(states, [*rows, control("s2", bash("pytest"))])
    assert (asked_again.n_control, asked_again.n_control_mismatch) == (1, 0)


def test_a_failed_recorded_action_is_evidence_and_raises_the_weight():
    rows = answers(a=bash("ls"), b=bash("ls"))
    plain, failed = (
        extract_dpo_pairs([state(outcome=outcome)], rows)[0]["weight"]
        for outcome in ("ok", "tool_error")
    )
    assert failed == 2 * plain


def test_two_separate_groups_of_equal_size_are_a_tie():
    rows = answers(a=bash("ls"), b=bash("ls"), c=bash("make"), d=bash("make"))
    report = extract_pairs([state()], rows)
    assert outcome_of(report)["outcome"] == "no_consensus"
    assert report.n_ties == 1
    assert outcome_of(report)["margin"] == 0


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


def test_near_misses_name_the_level_that_would_have_agreed():
    rows = answers(a=bash("pytest -q"), b=bash("pytest -x"), c=bash("make"))
    report = extract_pairs([state(action=bash("ls"))], rows)
    assert report.near_misses == {"target": 1}
    assert judged([state(action=bash("ls"))], rows, level="target") == "pair"


def test_a_student_that_agrees_with_any_of_the_group_makes_no_pair():
    chain = answers(a=read(1, 10), b=read(8, 10))
    assert judged([state(action=read(17, 5))], chain) == "agreement"
    assert judged([state(action=read(18, 5))], chain) == "pair"


def test_tools_on_offer_decide_what_is_a_valid_action():
    rows = answers(a=call("Read", file_path="a.py"), b=call("Glob", pattern="*"), c=bash("ls"))
    report = extract_pairs([state(action=call("Read", file_path="b.py"), tools=[READ_TOOL])], rows)
    assert outcome_of(report)["n_invalid"] == 2


def test_rejected_side_can_be_sampled_from_the_model_to_be_trained():
    rows = answers(a=bash("ls"), b=bash("ls"))
    [pair] = extract_dpo_pairs([state()], rows, samples={"s1": bash("make")})
    assert pair["rejected"] == 'Bash {"command":"make"}'
    assert pair["rejected_source"] == "sampled"
    assert judged([state()], rows, samples={"s1": bash("ls")}) == "agreement"


def test_duplicates_and_strangers_are_counted():
    rows = answers(a=bash("ls"), b=bash("ls"))
    report = extract_pairs([state(), state()], [*rows, rows[0], *answers("s9", a=bash("ls"))])
    assert report.n_duplicate_states == 1
    assert report.n_duplicate_answers == 1
    assert report.n_unmatched_answers == 1
    assert len(report.pairs) == 1


@pytest.mark.parametrize("threshold", [0, -1, 1.5, True, "2"])
def test_threshold_must_be_a_positive_number_of_families(threshold):
    with pytest.raises(ConfigError, match="agreement_threshold"):
        extract_dpo_pairs([], [], threshold)


def test_final_texts_are_compared_by_the_judge_that_is_given():
    def says(text):
        return {"role": "assistant", "content": text}

    def same_topic(one, other):
        return one.split()[0] == other.split()[0]

    rows = answers(a=says("Fixed it."), b=says("Fixed the cart."), c=says("Stuck."))
    asked = state(action=says("Shall I?"))
    assert judged([asked], rows) == "no_consensus"
    [pair] = extract_dpo_pairs([asked], rows, same_text=same_topic)
    assert pair["agreement_level"] == "effect"
    assert pair["rejected"] == "Shall I?"


def test_progress_is_told_every_thousand_states():
    told = []
    extract_pairs((state(f"s{n}") for n in range(2_100)), [], on_progress=told.append)
    assert [one.n_done for one in told] == [1_000, 2_000]


def test_unknown_level_is_refused():
    with pytest.raises(ConfigError, match="exact, effect, target, tool"):
        extract_dpo_pairs([], [], level="nearly")


def test_report_is_plain_json_with_matrix_and_chance():
    states = [state(f"s{n}", action=bash("tox")) for n in range(20)]
    rows = [
        row
        for n in range(20)
        for row in answers(
            f"s{n}",
            a=call("Read", file_path=f"{n}.py"),
            b=call("Read", file_path=f"./{n}.py"),
            c=call("Read", file_path="x.py"),
        )
    ]
    report = extract_pairs(states, rows)
    found = json.loads(json.dumps(report.to_json()))
    assert found.keys() == {
        *("level", "agreement_threshold", "consensus_levels", "outcomes"),
        *("n_states", "n_pairs", "n_positives", "n_natural_joined", "n_circular_pairs"),
        *("n_ties", "near_misses", "pairs_by_source", "natural_left_out"),
        *("n_duplicate_states", "n_duplicate_answers", "n_unmatched_answers"),
        *("control", "teachers", "matrix", "agreement"),
    }
    assert found["matrix"]["a"]["b"] == {"n": 20, "n_agree": 20, "rate": 1.0}
    assert found["matrix"]["c"]["a"]["rate"] == 0
    assert found["teachers"]["a"]["n_in_consensus"] == 20
    agreement = found["agreement"]
    assert agreement["exact"]["raw"] == pytest.approx(1 / 3, abs=1e-5)
    assert agreement["exact"]["chance"] < 0.2 < agreement["tool"]["chance"] == 1.0
    assert agreement["exact"]["corrected"] > 0.15
    assert agreement["tool"]["corrected"] == 0
    raw = [agreement[level]["raw"] for level in ("exact", "effect", "target", "tool")]
    assert raw == sorted(raw)


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
    assert outcomes_table(report.outcomes).schema.equals(OUTCOMES)
    assert pairs_table([]).schema.equals(DPO_PAIRS)


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

"""Pairs that a session holds by itself: branches given up, actions the user rejected."""

from functools import partial

from replay_pipeline.storage.pair_rows import pair_id_of
from replay_pipeline.types import TeacherAction
from tests.support import messages
from tests.support.messages import bash, call, says, together
from tests.support.votes import extract_dpo_pairs, extract_pairs


def state(turn, action, outcome="ok", **more):
    return {
        "state_id": f"s{turn}",
        "session_id": "session",
        "turn_idx": turn,
        "messages": [{"role": "user", "content": "Go on with a.py."}] * (turn + 1),
        "student_action": action,
        "outcome": outcome,
        **more,
    }


def sides(pairs):
    return [(p["source"], p["chosen"], p["rejected"]) for p in pairs]


edit = partial(messages.edit, "a.py")
MAKE, TOX = 'Bash {"command":"make"}', 'Bash {"command":"tox"}'


def test_abandoned_branch_is_rejected_for_the_one_that_was_kept():
    given_up = state(3, bash("tox"), "rewound", alternatives=[bash("make")])
    [pair] = extract_dpo_pairs([given_up], [])
    assert sides([pair]) == [("rewind", MAKE, TOX)]
    assert pair["n_teachers_agreeing"] == pair["n_teachers_asked"] == 0
    assert pair["cost_usd"] == 0
    assert pair["state_messages"] == given_up["messages"]


def test_a_natural_pair_says_all_that_is_known_of_it():
    told = {
        "session_id": "session",
        "tools": [{"type": "function", "function": {"name": "Bash", "parameters": {}}}],
        "hint": "Not so.",
        "outcome": "rewound",
        "student_model": "claude-opus-4-5",
    }
    given_up = state(3, bash("tox"), alternatives=[bash("make")], **told)
    [pair] = extract_dpo_pairs([given_up], [])
    calls = [
        {"id": "call_0", "type": "function", "function": {"name": "Bash", "arguments": arguments}}
        for arguments in ('{"command":"make"}', '{"command":"tox"}')
    ]
    made, toxed = ({"role": "assistant", "content": "", "tool_calls": [call]} for call in calls)
    assert pair == {
        **told,
        "state_id": "s3",
        "state_messages": given_up["messages"],
        "pair_id": pair_id_of("s3", MAKE, TOX),
        "chosen": MAKE,
        "rejected": TOX,
        "chosen_action": made,
        "rejected_action": toxed,
        "n_teachers_agreeing": 0,
        "n_teachers_asked": 0,
        "n_teachers_valid": 0,
        "teachers_agreeing": [],
        "margin": 0,
        "source": "rewind",
        "rejected_source": "recorded",
        "shares_vendor": False,
        "cost_usd": 0.0,
        "p_chosen_right": 0.8062,
        "p_rejected_wrong": 0.8062,
        "p_better": 0.65,
        "weight": 0.65,
    }


def test_a_natural_pair_is_worth_what_its_source_is_until_such_pairs_were_checked():
    steps = [
        state(0, edit("Go", "b"), "user_rejected"),
        state(1, edit("Go", "c")),
        state(2, edit("Go", "d"), "user_rejected"),
        state(3, edit("Go", "e")),
        state(5, bash("tox"), "rewound", alternatives=[bash("make")]),
    ]
    weighed = {pair["source"]: pair["weight"] for pair in extract_dpo_pairs(steps, [])}
    assert weighed == {"rewind": 0.65, "rejection": 0.8}
    rejection, other = [p for p in extract_dpo_pairs(steps, []) if p["source"] == "rejection"]
    pairs = extract_dpo_pairs(steps, [], checked={rejection["pair_id"]: True})
    found = {pair["pair_id"]: pair["weight"] for pair in pairs}
    assert found.pop(rejection["pair_id"]) == 0.99, "somebody accepted it"
    assert found.pop(other["pair_id"]) == round(9 / 11, 4)
    assert [*found.values()] == [0.65]
    report = extract_pairs(steps, [], checked={rejection["pair_id"]: False})
    assert {pair["source"] for pair in report.pairs} == {"rewind", "rejection"}
    assert [pair["pair_id"] for pair in report.refuted] == [rejection["pair_id"]]


def test_of_several_branches_the_last_was_kept_and_the_others_given_up():
    tried = [bash("make"), bash("ls")]
    pairs = extract_dpo_pairs([state(3, bash("tox"), "rewound", alternatives=tried)], [])
    assert sides(pairs) == [("rewind", 'Bash {"command":"ls"}', TOX)]
    pairs = extract_dpo_pairs([state(3, bash("tox"), alternatives=tried)], [])
    assert sides(pairs) == [("rewind", TOX, MAKE), ("rewind", TOX, 'Bash {"command":"ls"}')]


def test_a_branch_that_could_not_run_makes_no_pair():
    glob = call("Glob", pattern="*")
    tools = [{"type": "function", "function": {"name": "Bash", "parameters": {}}}]
    invalid = {"rewind_invalid": 1}
    for one, other in ((glob, bash("ls")), (bash("ls"), glob)):
        assert left_out(state(3, one, "rewound", alternatives=[other], tools=tools)) == invalid
        assert left_out(state(3, one, alternatives=[other], tools=tools)) == invalid
        [pair] = extract_dpo_pairs([state(3, one, "rewound", alternatives=[other])], [])
        assert pair["source"] == "rewind"


def test_a_branch_that_does_the_same_and_more_makes_no_pair():
    def both(*commands):
        return together(*map(bash, commands))

    def left(chosen, **options):
        given_up = state(3, bash("pytest"), "rewound", alternatives=[chosen])
        return dict(extract_pairs([given_up], [], **options).natural_left_out)

    counted = {"rewind_call_count": 1}
    assert (
        left(both("pytest", "make docs"))
        == left(both("make docs", "pytest"), level="exact")
        == counted
    )
    assert left(both("pytest -x", "make docs")) == left(both("tox", "make docs")) == {}
    assert left(both("pytest -x", "make docs"), level="target") == counted
    assert left(bash("pytest -x"), level="target") == {"rewind_same_action": 1}


def test_a_rewind_seen_from_both_sides_is_one_pair():
    given_up = state(3, bash("tox"), "rewound", alternatives=[bash("make")])
    kept = state(3, bash("make"), alternatives=[bash("tox")], state_id="kept")
    assert sides(extract_dpo_pairs([given_up, kept], [])) == [("rewind", MAKE, TOX)]
    assert sides(extract_dpo_pairs([kept], [])) == [("rewind", MAKE, TOX)]


def test_a_retry_of_the_same_action_is_no_pair():
    retried = state(3, bash("tox"), "rewound", alternatives=[bash("tox  # again")])
    assert extract_dpo_pairs([retried], []) == []


def test_a_rejected_action_loses_to_the_one_that_the_user_accepted_next():
    steps = [
        state(0, edit("Go", "b"), "user_rejected", hint="Use c."),
        state(1, edit("Go", "d"), "user_rejected"),
        state(2, edit("Go", "c")),
        state(3, edit("x", "y")),
    ]
    pairs = extract_dpo_pairs(steps[::-1], [])
    assert [pair["source"] for pair in pairs] == ["rejection", "rejection"]
    assert all('"new_string":"c"' in pair["chosen"] for pair in pairs)
    assert '"new_string":"b"' in pairs[0]["rejected"]
    assert pairs[0]["hint"] == "Use c."
    assert pairs[0]["state_messages"] == steps[0]["messages"]


def test_a_rejection_is_found_wherever_in_the_session_it_comes():
    refused = [state(1, edit("Go", "b"), "user_rejected"), state(2, edit("Go", "c"))]
    pairs = extract_dpo_pairs([state(0, bash("ls")), *refused], [])
    assert [pair["source"] for pair in pairs] == ["rejection"]


def test_a_session_without_numbers_keeps_its_order():
    steps = [state(0, edit("Go", "b"), "user_rejected"), state(1, edit("Go", "c"))]
    for step in steps:
        del step["turn_idx"]
    assert [pair["source"] for pair in extract_dpo_pairs(steps, [])] == ["rejection"]
    assert extract_dpo_pairs(steps[::-1], []) == []
    steps[1]["turn_idx"] = 1
    assert [pair["source"] for pair in extract_dpo_pairs(steps[::-1], [])] == ["rejection"]


def test_the_two_branches_of_a_rewind_name_their_files_from_the_same_folder():
    paths = {"cwd": "/shop", "alternatives": [call("Read", file_path="/shop/a.py")]}
    same = state(3, call("Read", file_path="a.py"), "rewound", **paths)
    assert left_out(same) == {"rewind_same_action": 1}
    [pair] = extract_dpo_pairs([state(3, bash("tox"), "rewound", **paths)], [])
    assert pair["chosen"] == 'Read {"file_path":"a.py"}'


def left_out(*steps):
    report = extract_pairs(steps, [])
    assert report.pairs == []
    assert report.to_json()["natural_left_out"] == dict(report.natural_left_out)
    return dict(report.natural_left_out)


def test_a_rejection_without_another_try_at_once_is_no_pair():
    rejected = state(0, edit("Go", "b"), "user_rejected")
    looked = state(1, bash("grep c a.py"))
    assert left_out(rejected, looked, state(2, edit("Go", "c"))) == {"rejection_other_object": 1}
    assert left_out(rejected, state(1, edit("Go", "c"), "tool_error")) == {}
    assert left_out(rejected, state(1, edit("Go", "c"), session_id="another")) == {}


def test_another_command_is_no_retry_of_the_one_that_was_rejected():
    tests = state(0, bash("bun test"), "user_rejected")
    moved = state(1, bash("mv migrations/1.sql old/"))
    assert left_out(tests, moved) == {"rejection_other_object": 1}
    change = state(0, edit("Go on", "b"), "user_rejected")
    assert left_out(change, state(1, edit("with", "b"))) == {"rejection_other_object": 1}
    push = state(0, bash("git push"), "user_rejected")
    [pair] = extract_dpo_pairs([push, state(1, bash("git push --dry-run"))], [])
    assert pair["source"] == "rejection"


def test_a_retry_that_needs_what_the_prompt_never_held_is_no_pair():
    rejected = state(0, edit("Go", "b"), "user_rejected")
    assert left_out(rejected, state(1, edit("Go\nunseen", "b"))) == {"rejection_infeasible": 1}


def test_a_branch_that_stops_or_refuses_is_not_chosen():
    for text, why in (("Done.", "early_stop"), ("I'm sorry, but I can't.", "refusal")):
        given_up = state(3, bash("tox"), "rewound", alternatives=[says(text)])
        assert left_out(given_up) == {f"rewind_{why}": 1}


def answers(state_id, message):
    return [
        TeacherAction(state_id=state_id, teacher=name, action=message) for name in ("qwen", "glm")
    ]


def test_what_record_and_teachers_say_alike_is_one_pair_with_evidence():
    given_up = state(3, bash("tox"), "rewound", alternatives=[bash("make")])
    report = extract_pairs([given_up], answers("s3", bash("make")))
    [pair] = report.pairs
    assert (pair["source"], pair["evidence"]) == ("consensus", ["rewind"])
    assert report.to_json()["n_natural_joined"] == 1
    kept = state(3, bash("make"), alternatives=[bash("tox")], state_id="kept")
    [pair] = extract_dpo_pairs([kept, given_up], answers("s3", bash("make")))
    assert (pair["state_id"], pair["evidence"]) == ("s3", ["rewind"])
    rejected, accepted = state(0, bash("bun test"), "user_rejected"), state(1, bash("make"))
    [pair] = extract_dpo_pairs([rejected, accepted], answers("s0", bash("make")))
    assert pair["evidence"] == ["rejection"]


def test_what_they_say_differently_stays_two_pairs_of_one_state():
    given_up = state(3, bash("tox"), "rewound", alternatives=[bash("make")])
    pairs = extract_dpo_pairs([given_up], answers("s3", bash("ls")))
    assert [pair["source"] for pair in pairs] == ["consensus", "rewind"]
    assert len({pair["pair_id"] for pair in pairs}) == 2


def test_everything_that_the_record_says_is_evidence_of_one_pair():
    rejected = state(0, bash("bun test"), "user_rejected")
    accepted = state(1, bash("make"), alternatives=[bash("bun test")])
    accepted["messages"] = rejected["messages"]
    report = extract_pairs([rejected, accepted], answers("s0", bash("make")))
    [pair] = report.pairs
    assert pair["evidence"] == ["rejection", "rewind"]
    assert report.n_natural_joined == 2


def test_a_record_without_a_session_joins_too():
    given_up = state(3, bash("tox"), "rewound", alternatives=[bash("make")])
    del given_up["session_id"]
    [pair] = extract_dpo_pairs([given_up], answers("s3", bash("make")))
    assert pair["evidence"] == ["rewind"]


def test_a_pair_joins_only_where_both_sides_are_the_same():
    rows = answers("s3", bash("make"))
    elsewhere = state(4, bash("tox"), "rewound", alternatives=[bash("make")])
    pairs = extract_dpo_pairs([state(3, bash("tox"), "tool_error"), elsewhere], rows)
    assert [pair["state_id"] for pair in pairs] == ["s3", "s4"]


def test_what_is_joined_goes_by_the_level_and_the_judge_that_are_asked_for():
    given_up = state(3, bash("pytest"), "rewound", alternatives=[bash("make -B")])
    for level, n_pairs in (("effect", 2), ("target", 1)):
        pairs = extract_dpo_pairs([given_up], answers("s3", bash("make")), level=level)
        assert len(pairs) == n_pairs
    given_up = state(3, says("Shall I?"), "rewound", alternatives=[says("It is done.")])
    rows = answers("s3", says("It works."))
    assert len(extract_dpo_pairs([given_up], rows)) == 2
    judge = {"same_text": lambda one, other: one[:2] == other[:2]}
    assert len(extract_dpo_pairs([given_up], rows, **judge)) == 1


def test_natural_pairs_can_be_left_out():
    given_up = state(3, bash("tox"), "rewound", alternatives=[bash("make")])
    assert extract_dpo_pairs([given_up], [], include_natural=False) == []

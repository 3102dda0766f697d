"""Pairs that a session holds by itself: branches given up, actions the user rejected."""

import json

from replay_pipeline.pairs import extract_dpo_pairs, extract_pairs
from replay_pipeline.types import TeacherAction


def bash(command):
    function = {"name": "Bash", "arguments": json.dumps({"command": command})}
    return {"role": "assistant", "tool_calls": [{"function": function}]}


def edit(old, new):
    arguments = {"file_path": "a.py", "old_string": old, "new_string": new}
    function = {"name": "Edit", "arguments": json.dumps(arguments)}
    return {"role": "assistant", "tool_calls": [{"function": function}]}


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


MAKE, TOX = 'Bash {"command":"make"}', 'Bash {"command":"tox"}'


def test_abandoned_branch_is_rejected_for_the_one_that_was_kept():
    given_up = state(3, bash("tox"), "rewound", alternatives=[bash("make")])
    [pair] = extract_dpo_pairs([given_up], [])
    assert sides([pair]) == [("rewind", MAKE, TOX)]
    assert pair["n_teachers_agreeing"] == pair["n_teachers_asked"] == 0
    assert pair["cost_usd"] == 0
    assert pair["state_messages"] == given_up["messages"]


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


def test_the_two_branches_of_a_rewind_name_their_files_from_the_same_folder():
    def read(path):
        function = {"name": "Read", "arguments": json.dumps({"file_path": path})}
        return {"role": "assistant", "tool_calls": [{"function": function}]}

    paths = {"cwd": "/shop", "alternatives": [read("/shop/a.py")]}
    assert left_out(state(3, read("a.py"), "rewound", **paths)) == {"rewind_same_action": 1}
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
    push = state(0, bash("git push"), "user_rejected")
    [pair] = extract_dpo_pairs([push, state(1, bash("git push --dry-run"))], [])
    assert pair["source"] == "rejection"


def test_a_retry_that_needs_what_the_prompt_never_held_is_no_pair():
    rejected = state(0, edit("Go", "b"), "user_rejected")
    assert left_out(rejected, state(1, edit("unseen", "b"))) == {"rejection_infeasible": 1}


def test_a_branch_that_stops_or_refuses_is_not_chosen():
    for text, why in (("Done.", "early_stop"), ("I'm sorry, but I can't.", "refusal")):
        says = {"role": "assistant", "content": text}
        given_up = state(3, bash("tox"), "rewound", alternatives=[says])
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


def test_natural_pairs_can_be_left_out():
    given_up = state(3, bash("tox"), "rewound", alternatives=[bash("make")])
    assert extract_dpo_pairs([given_up], [], include_natural=False) == []

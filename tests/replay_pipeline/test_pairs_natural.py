"""Pairs that a session holds by itself: branches given up, actions the user rejected."""

import json

from replay_pipeline.pairs import extract_dpo_pairs


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
        "messages": [{"role": "user", "content": "Go on."}] * (turn + 1),
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


def test_a_rejected_action_loses_to_the_one_the_user_accepted_later():
    steps = [
        state(0, edit("a", "b"), "user_rejected", hint="Use c."),
        state(1, bash("grep c a.py")),
        state(2, edit("a", "c")),
        state(3, edit("x", "y")),
    ]
    [pair] = extract_dpo_pairs(steps[::-1], [])
    assert pair["source"] == "rejection"
    assert '"new_string":"c"' in pair["chosen"]
    assert '"new_string":"b"' in pair["rejected"]
    assert pair["hint"] == "Use c."
    assert pair["state_messages"] == steps[0]["messages"]


def test_a_rejection_without_another_try_soon_after_is_no_pair():
    rejected = state(0, edit("a", "b"), "user_rejected")
    far = [state(n, bash(f"step {n}")) for n in range(1, 4)] + [state(4, edit("a", "c"))]
    assert extract_dpo_pairs([rejected, *far], []) == []
    failed = state(1, edit("a", "c"), "tool_error")
    assert extract_dpo_pairs([rejected, failed], []) == []
    other_session = state(1, edit("a", "c"), session_id="another")
    assert extract_dpo_pairs([rejected, other_session], []) == []


def test_another_command_counts_as_a_new_attempt_only_at_once():
    rejected = state(0, bash("git push"), "user_rejected")
    again = state(1, bash("git checkout ."), "user_rejected")
    accepted = state(2, bash("make"))
    pairs = extract_dpo_pairs([rejected, again, accepted], [])
    assert [p["rejected"] for p in pairs] == [
        'Bash {"command":"git push"}',
        'Bash {"command":"git checkout ."}',
    ]
    assert {p["chosen"] for p in pairs} == {MAKE}
    looked = state(1, edit("x", "y"))
    assert extract_dpo_pairs([rejected, looked, accepted], []) == []
    same_object = state(2, bash("git push --dry-run"))
    assert len(extract_dpo_pairs([rejected, looked, same_object], [])) == 1


def test_natural_pairs_can_be_left_out():
    given_up = state(3, bash("tox"), "rewound", alternatives=[bash("make")])
    assert extract_dpo_pairs([given_up], [], include_natural=False) == []

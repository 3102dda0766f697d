"""A training as the page tells it: what the model writes at held-out states, before and after."""

from typing import Any

from replay_pipeline.stages.pages.training import examples, training_shown

REPORT = {"steps": 2, "pairs": 3, "loss_first": 1.0, "loss_last": 0.5}
RATES = {"consensus_rate_before": 0.75, "consensus_rate_after": 0.5}


def acts(*found: tuple[str, str | None]) -> dict[str, Any]:
    call = {"function": {"name": "Read", "arguments": '{"file_path": "a.py"}'}}
    return {
        "consensus": {
            "exact": 0.25,
            "acts": [
                {
                    "state_id": f"s{n}",
                    "asked": "Read a.py.",
                    "consensus": {"tool_calls": [call]},
                    "text": text,
                    "level": level,
                }
                for n, (text, level) in enumerate(found)
            ],
        }
    }


def test_states_that_came_nearer_and_that_went_away_are_shown_in_turns_and_unchanged_ones_not():
    before = acts(
        ("a", "tool"), ("b", "exact"), ("c", None), ("d", None), ("e", "tool"), ("f", None)
    )
    after = acts(
        ("A", "exact"), ("B", None), ("c", None), ("D", None), ("E", "target"), ("F", "tool")
    )
    shown = examples({"before": before, "after": after})
    assert [(each["state_id"], each["title"]) for each in shown] == [
        ("s0", "The same tool before, the teachers' action after"),
        ("s1", "The teachers' action before, another action after"),
        ("s4", "The same tool before, an action on the same target after"),
        ("s5", "Another action before, the same tool after"),
        ("s3", "Another action both times"),
    ]
    assert shown[0]["sides"] == [
        ["what the user said last", "Read a.py."],
        ["the teachers", "Read\n  file_path: a.py"],
        ["the model before", "a"],
        ["the model after", "A"],
    ]


def test_a_training_without_an_evaluation_of_single_states_shows_no_example():
    assert training_shown(REPORT)["examples"] == []
    assert examples({"before": {"consensus": {}}, "after": {"consensus": {}}}) == []


def test_the_rate_of_consensus_actions_is_told_by_how_alike_they_are():
    measured = {"before": acts(), "after": {"consensus": {"exact": 0.5, "tool": 0.125}}}
    rows = training_shown({**REPORT, **RATES, "held_out_states": 8, "valid_calls_before": 1.0,
                           "valid_calls_after": 1.0}, measured)["before_after"]  # fmt: skip
    told = [(row["name"], row["before"], row["after"]) for row in rows]
    assert told[:3] == [
        ("takes the teachers' action by itself", "75 %", "50 %"),
        ("of these, the teachers' action", "25 %", "50 %"),
        ("besides, the same tool", "0 %", "12 %"),
    ]


def test_pairs_are_shown_as_training_reads_them():
    parts = [["prompt: 7 of 8 tokens, read and not scored; cut: nothing", "<user>hi"]]
    row = {"state_id": "s1", "weight": 0.9, "parts": parts}
    [seen] = training_shown(REPORT, None, [row])["seen"]
    assert seen["title"] == "As the model reads it: s1, weight 0.90"
    assert seen["sides"] == parts
    [balanced] = training_shown(REPORT, None, [row | {"balance": 0.125}])["seen"]
    assert balanced["title"].endswith(": s1, weight 0.90, times 0.12 in the preference loss")

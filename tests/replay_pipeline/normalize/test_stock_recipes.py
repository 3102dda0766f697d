"""Recipes as data-juicer's documentation writes them, and what a reviewer would throw out."""

import pytest
import yaml

from replay_pipeline.actions import canonical_action
from replay_pipeline.errors import ConfigError, UntrustedError
from replay_pipeline.judge.records import pairs_table, positives_table
from replay_pipeline.normalize import DJNormalizer
from tests.support.messages import bash, call, says

SEEDS = [
    {"text_length_filter": {"min_len": 8, "max_len": 32_000}},
    {"words_num_filter": {"min_num": 2, "max_num": 4_096}},
    {"special_characters_filter": {"min_ratio": 0.0, "max_ratio": 0.5}},
    {"document_deduplicator": {"lowercase": True, "ignore_non_character": True}},
]
GOOD = {
    "chosen": "Read the file first, then mend the test.",
    "rejected": "Delete the test, since it only fails.",
}


def recipe(folder, process):
    (folder / "own.yaml").write_text(yaml.safe_dump({"process": process}))
    return folder / "own.yaml"


def pairs(*rows):
    messages = [{"role": "user", "content": "The cart test fails."}]
    return [
        {"state_id": f"s{n}", "state_messages": messages, "n_teachers_agreeing": 2, **GOOD, **row}
        for n, row in enumerate(rows)
    ]


def states_of(rows):
    by_id = {row["state_id"]: row for row in rows}
    return lambda ids: [
        {"state_id": one, "messages": by_id[one]["state_messages"], "tools": None} for one in ids
    ]


def kept(where, rows):
    return [one["state_id"] for one in DJNormalizer(where).normalize(rows)]


ROWS = pairs(
    {},
    {"rejected": "x"},
    {"chosen": "#### $$$$ ((())) ;;;; a b c d"},
    {"rejected": "Undoubtedlyonewordalone"},
    {},
    {"state_messages": [{"role": "user", "content": "Another request."}]},
)


def test_a_recipe_of_data_juicers_own_operators_judges_both_sides(tmp_path):
    assert kept(recipe(tmp_path, SEEDS), ROWS) == ["s0", "s5"]
    for step, dropped in zip(SEEDS, ("s1", "s3", "s2", "s4"), strict=True):
        assert dropped not in kept(recipe(tmp_path, [step]), ROWS)


def test_a_filter_with_a_text_key_judges_that_side_by_a_statistic_of_its_own(tmp_path):
    """data-juicer keeps one statistic per row and metric, so by itself the second would judge nothing."""
    limits = {"min_len": 10, "max_len": 100}
    process = [
        {"text_length_filter": {"text_key": side, **limits}} for side in ("chosen", "rejected")
    ]
    where = recipe(tmp_path, process)
    rows = pairs({}, {"rejected": "x"}, {"chosen": "x"})
    assert kept(where, rows) == ["s0"]
    dropped = DJNormalizer(where).run(pairs_table(rows), prompts=states_of(rows)).dropped
    assert dropped["drop_field"].to_pylist() == ["rejected", "chosen"]
    assert dropped["drop_value"].to_pylist() == ["text_len=1"] * 2
    only = recipe(tmp_path, process[:1])
    assert kept(only, rows) == ["s0", "s1"]


def test_an_operator_of_data_juicer_can_judge_a_part_of_a_side(tmp_path):
    judged = {"operator": "text_length_filter", "arguments": {"max_len": 60}, "view": "prose"}
    long = {"chosen": "word " * 40}
    assert kept(recipe(tmp_path, [{"pair_each_side_filter": judged}]), pairs({}, long)) == ["s0"]


def test_a_misspelled_operator_is_told_those_there_are(tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean text_length_filter\?"):
        DJNormalizer(recipe(tmp_path, [{"text_lenght_filter": {"max_len": 60}}]))


def test_what_executes_something_is_refused_inside_too(tmp_path):
    step = {"pair_each_side_filter": {"operator": "python_lambda_mapper", "arguments": {}}}
    with pytest.raises(UntrustedError, match="python_lambda_mapper"):
        DJNormalizer(recipe(tmp_path, [step]))


READ = call("Read", file_path="cart.py")
EDIT = call("Edit", file_path="cart.py", old_string="a = 1", new_string="a = 2")
SEEN = [READ, {"role": "tool", "tool_call_id": "call_1", "content": "     1→a = 1\n"}]
MADE = [EDIT, {"role": "tool", "tool_call_id": "call_1", "content": "The file has been updated."}]


def answered(action, answer="Done."):
    return [action, {"role": "tool", "tool_call_id": "call_1", "content": answer}]


def task(prompt):
    return call("Task", description="Look", prompt=prompt, subagent_type="general-purpose")


WRITTEN = [
    *answered(call("Write", file_path="cart.py", content="total = 1\n")),
    *answered(call("Write", file_path="total.py", content="total = 0\n")),
]
WROTE_OVER = answered(call("Write", file_path="cart.py", content="total = 2\n"))
RAN = answered(bash("python cart.py"), "2")
FULL = [*SEEN, *answered(bash("make"), "Exit code 2 No space left on device")]


def test_the_recipe_for_agents_drops_what_a_reviewer_would_and_says_why(tmp_path):
    cases = [
        (SEEN, EDIT, ""),
        ([*SEEN, *MADE], EDIT, "applied"),
        (SEEN, READ, "repeated_look"),
        (SEEN, bash("git push --force"), "unasked"),
        ([], EDIT, "infeasible"),
        (SEEN, bash("lsof -i :3000 | head"), ""),
        (SEEN, call("browser_snapshot"), ""),
        (SEEN, call("TodoWrite", todos=[]), "needless"),
        (SEEN, bash(": run the tests"), "needless"),
        (SEEN, bash("uname -a && whoami | head"), "needless"),
        (SEEN, bash("git status"), "needless"),
        (FULL, bash("df -h"), ""),
        (SEEN, says("I have looked around. Should I proceed with the change?"), "needless"),
        (SEEN, says("The cart is mended. Shall I push it?"), ""),
        (SEEN, says("The discount was taken twice, so I took it out of the loop."), ""),
        (SEEN, task("Explore the codebase and fix everything that is wrong."), "needless"),
        (SEEN, task("Find out where the discount is taken a second time."), ""),
        (
            SEEN,
            call(
                "AskUserQuestion",
                questions=[
                    {
                        "question": "Which approach do you prefer?",
                        "options": [{"label": "Simple"}, {"label": "Full"}],
                    }
                ],
            ),
            "needless",
        ),
        (SEEN, bash("git stash"), "unasked"),
        (SEEN, bash("ls -la"), "needless"),
        ([], bash("ls -la"), ""),
        (SEEN, bash("python3 report.py"), "infeasible"),
        (SEEN, bash("echo 'print(1)' > report.py && python3 report.py"), ""),
        (FULL, says("All done: the cart is mended and the tests pass."), "needless"),
        (SEEN, bash("git stash && make test; git stash pop"), ""),
        (WRITTEN, bash("rm total.py"), ""),
        (WRITTEN, bash("rm cart.py"), "unasked"),
        ([*WRITTEN, *WROTE_OVER, *RAN], WRITTEN[0], "applied"),
        (
            SEEN,
            call("AskUserQuestion", questions=[{"options": [{"label": "Mend the cart"}]}]),
            "needless",
        ),
        (SEEN, call("AskUserQuestion", questions=[{"options": [{"label": "Drop the cart"}]}]), ""),
    ]
    request = {
        "role": "user",
        "content": "Mend the cart in cart.py, then tell me how it went, number {}.",
    }
    rows = [
        {
            **pairs({})[0],
            "state_id": f"s{n}",
            "state_messages": [{**request, "content": request["content"].format(n)}, *messages],
            "chosen_action": chosen,
            "rejected_action": bash(f"make target{n}"),
            "chosen": f"Chosen {n}",
            "rejected": f"Rejected {n}",
        }
        for n, (messages, chosen, _) in enumerate(cases)
    ]
    wanted = [f"s{n}" for n, (_, _, why) in enumerate(cases) if not why]
    assert kept("agent", rows) == wanted
    steps = [{"pair_feasibility_filter": {}}, {"pair_worth_filter": {}}]
    assert kept(recipe(tmp_path, steps), rows) == wanted


def test_one_action_is_kept_so_often_in_a_conversation_and_in_the_dataset(tmp_path):
    rows = pairs(*({"conversation": f"c{n // 3}"} for n in range(9)))
    cap = {"per_conversation": 2, "per_dataset": 5}
    ways = ("make test", "make test 2>&1 | tail -20", "make test | head")
    actions = [row | {"chosen_action": bash(ways[n % 3])} for n, row in enumerate(rows)]
    assert kept(recipe(tmp_path, [{"pair_action_cap": cap}]), actions) == [
        "s0",
        "s1",
        "s3",
        "s4",
        "s6",
    ]


def test_a_recipe_judges_lessons_after_the_pairs_and_keeps_what_it_drops():
    """The pair counts against the cap, a note teaches nothing, and an action is no pair with itself."""
    notes = call("TodoWrite", todos=[{"content": "Test", "status": "pending"}])
    kinds = ["pair", "agreement", "lesson", "agreement", "agreement"]
    does = [bash("make test")] * 4 + [notes]
    rows = pairs(
        *(
            {
                "state_messages": [{"role": "user", "content": f"Mend fault {n * 1111}."}],
                "chosen_action": action,
                "rejected_action": bash("make install"),
                "chosen": canonical_action(action).render(),
                "conversation": "c",
                "action": canonical_action(action).render(),
                "action_message": action,
                "kind": kind,
            }
            for n, (action, kind) in enumerate(zip(does, kinds, strict=True))
        )
    )
    found = DJNormalizer("agent").run(
        pairs_table(rows[:1]), lessons=positives_table(rows[1:]), prompts=states_of(rows)
    )
    assert found.kept["state_id"].to_pylist() == ["s0"]
    assert found.lessons["state_id"].to_pylist() == ["s1"]
    dropped = {row["state_id"]: row["drop_operator"] for row in found.dropped_lessons.to_pylist()}
    cap, worth = "pair_action_cap", "pair_worth_filter"
    assert dropped == {"s2": cap, "s3": cap, "s4": worth}
    assert found.report.dropped_lessons == {cap: 2, worth: 1}
    assert (found.report.n_lessons_in, found.report.n_lessons_kept) == (4, 1)


def test_a_look_is_a_repetition_from_the_folder_of_its_session_too(tmp_path):
    """Chosen sides name files relative to it, logs by their whole path."""
    whole = call("Read", file_path="/home/ada/shop/cart.py")
    messages = [{"role": "user", "content": "Mend the cart."}, whole, SEEN[1]]
    rows = pairs({"state_messages": messages, "chosen_action": READ, "cwd": "/home/ada/shop"})
    where = recipe(tmp_path, [{"pair_feasibility_filter": {}}])
    [dropped] = (
        DJNormalizer(where).run(pairs_table(rows), prompts=states_of(rows)).dropped.to_pylist()
    )
    assert dropped["drop_value"].startswith("repeated_look")

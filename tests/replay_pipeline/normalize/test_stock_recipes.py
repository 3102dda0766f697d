"""Recipes as data-juicer's documentation writes them, and what a reviewer would throw out."""

import json

import pytest
import yaml

from replay_pipeline.errors import ConfigError, MissingDependencyError, UntrustedError
from replay_pipeline.judge.rows import pairs_table
from replay_pipeline.normalize import DJNormalizer
from replay_pipeline.normalize.recipe import _EXECUTES_NOTHING, _NEEDS_A_TEXT

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


def kept(where, rows, executor="in_process"):
    return [one["state_id"] for one in DJNormalizer(where, executor=executor).normalize(rows)]


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


@pytest.mark.slow
def test_both_engines_keep_the_same_rows_of_it(tmp_path):
    process = [*SEEDS, {"alphanumeric_filter": {"min_ratio": 0.3}}]
    where = recipe(tmp_path, process)
    assert kept(where, ROWS) == kept(where, ROWS, "default") == ["s0", "s5"]


def test_an_operator_of_data_juicer_can_judge_a_part_of_a_side(tmp_path):
    judged = {"operator": "text_length_filter", "arguments": {"max_len": 60}, "view": "prose"}
    long = {"chosen": "word " * 40}
    assert kept(recipe(tmp_path, [{"pair_each_side_filter": judged}]), pairs({}, long)) == ["s0"]


def test_what_executes_something_is_refused_inside_too(tmp_path):
    step = {"pair_each_side_filter": {"operator": "python_lambda_mapper", "arguments": {}}}
    with pytest.raises(UntrustedError, match="python_lambda_mapper"):
        DJNormalizer(recipe(tmp_path, [step]))


def call(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}]}


def bash(command):
    return call("Bash", command=command)


READ = call("Read", file_path="cart.py")
EDIT = call("Edit", file_path="cart.py", old_string="a = 1", new_string="a = 2")
SEEN = [READ, {"role": "tool", "tool_call_id": "c", "content": "     1→a = 1\n"}]
MADE = [EDIT, {"role": "tool", "tool_call_id": "c", "content": "The file has been updated."}]


def test_the_recipe_for_agents_drops_what_a_reviewer_would_and_says_why(tmp_path):
    cases = [
        (SEEN, EDIT, ""),
        ([*SEEN, *MADE], EDIT, "applied"),
        (SEEN, READ, "repeated_look"),
        (SEEN, bash("git push --force"), "unasked"),
        ([], EDIT, "infeasible"),
        (SEEN, bash("lsof -i :3000 | head"), ""),
        (SEEN, call("browser_snapshot"), ""),
    ]
    request = {"role": "user", "content": "Mend the cart, then tell me how it went, number {}."}
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
    assert kept(recipe(tmp_path, [{"pair_feasibility_filter": {}}]), rows) == wanted


ARGUMENTS = {
    "specified_field_filter": {"field_key": "session_id", "target_value": ["x"]},
    "specified_numeric_field_filter": {"field_key": "n_teachers_agreeing", "min_value": 1},
    "replace_content_mapper": {"pattern": "x", "repl": "y"},
    "frequency_specified_field_selector": {"field_key": "state_id", "top_ratio": 0.5},
    "random_selector": {"select_num": 2},
    "range_specified_field_selector": {
        "field_key": "n_teachers_agreeing",
        "lower_percentile": 0,
        "upper_percentile": 1,
    },
    "tags_specified_field_selector": {"field_key": "session_id", "target_tags": ["x"]},
    "topk_specified_field_selector": {"field_key": "n_teachers_agreeing", "topk": 2},
}


NEED_A_PACKAGE = {"clean_html_mapper": "selectolax", "fix_unicode_mapper": "ftfy"}


@pytest.mark.parametrize("name", sorted(NEED_A_PACKAGE))
def test_an_operator_whose_package_is_missing_names_it(tmp_path, name):
    rows = pairs({})
    with pytest.raises(MissingDependencyError, match=NEED_A_PACKAGE[name]):
        DJNormalizer(recipe(tmp_path, [{name: {}}])).normalize(rows)


@pytest.mark.parametrize("name", sorted(_EXECUTES_NOTHING - {*_NEEDS_A_TEXT, *NEED_A_PACKAGE}))
def test_every_operator_of_data_juicer_runs_as_its_page_writes_it(tmp_path, name):
    rows = pairs({}, {"rejected": "See http://x.y and a@b.c."}, {"chosen_action": READ})
    where = recipe(tmp_path, [{name: ARGUMENTS.get(name, {})}])
    report = DJNormalizer(where).run(pairs_table(rows), prompts=states_of(rows)).report
    assert report.n_kept + report.n_dropped == 3


@pytest.mark.parametrize("name", sorted(_NEEDS_A_TEXT))
def test_an_operator_that_needs_one_text_says_so(tmp_path, name):
    with pytest.raises(ConfigError, match=f"{name} .*: set its text_key to a column"):
        DJNormalizer(recipe(tmp_path, [{name: {}}]))


def test_a_mapper_edits_the_texts_of_both_sides_and_leaves_calls_alone(tmp_path):
    where = recipe(tmp_path, [{"clean_email_mapper": {}}])
    mail = {"chosen": "Mail a@b.co now.", "rejected": "Ask c@d.co first."}
    called = {**mail, "chosen_action": call("Bash", command="mail a@b.co")}
    text, with_call = DJNormalizer(where).normalize(pairs(mail, called))
    assert text["chosen_messages"][0]["content"] == "Mail  now."
    assert text["rejected"] == with_call["rejected"] == "Ask  first."
    assert with_call["chosen_messages"][0]["tool_calls"] == called["chosen_action"]["tool_calls"]


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

import json
import subprocess
import sys

import pytest
import yaml

from replay_pipeline.errors import ConfigError, NormalizeError, SchemaError
from replay_pipeline.normalize import DJNormalizer, bundled_recipes
from replay_pipeline.storage.schemas import DROPPED_PAIRS, NORMALIZED_PAIRS
from tests.replay_pipeline.normalize.rows import pair_table, row
from tests.support.messages import call

GOOD = "read the tests before the change"
OTHER = "change the code right away"


def drops(result):
    columns = ["state_id", "drop_operator", "drop_field", "drop_value", "drop_limit"]
    return [tuple(row.values()) for row in result.dropped.select(columns).to_pylist()]


@pytest.fixture(scope="module")
def default():
    return DJNormalizer("default")


def test_deduplication_needs_prompt_chosen_and_rejected_to_be_the_same(default):
    first = row("a", prompt="one")
    result = default.run(
        pair_table(
            first,
            {**first, "state_id": "again", "chosen": GOOD.upper() + "!!"},
            row("same-consensus-elsewhere", prompt="two"),
            {**first, "state_id": "other-rejected", "rejected": OTHER + " please"},
            row("other-number", prompt="one 2"),
        )
    )
    assert result.dropped["state_id"].to_pylist() == ["again"]
    assert drops(result)[0][1:4] == (
        "pair_exact_deduplicator",
        "pair",
        "same as a pair of this batch",
    )


def test_what_comes_in_is_kept_or_dropped_in_order(default):
    rows = [row(f"s{n}", chosen=GOOD if n % 3 else "no") for n in range(5000)]
    result = default.run(pair_table(*rows))
    kept, dropped = (part["state_id"].to_pylist() for part in (result.kept, result.dropped))
    assert kept == [f"s{n}" for n in range(5000) if n % 3]
    assert dropped == [f"s{n}" for n in range(5000) if n % 3 == 0]
    report = result.report
    assert (report.n_in, report.n_kept, report.n_dropped) == (5000, len(kept), len(dropped))
    assert sum(report.dropped.values()) == report.n_dropped
    assert result.kept.schema == NORMALIZED_PAIRS
    assert result.dropped.schema == DROPPED_PAIRS


def test_an_empty_table_gives_empty_tables(default):
    result = default.run(pair_table())
    assert (len(result.kept), len(result.dropped)) == (0, 0)
    assert result.kept.schema == NORMALIZED_PAIRS


@pytest.mark.parametrize("column", ["chosen", "rejected", "state_messages_json"])
def test_a_row_with_something_missing_is_dropped_and_named(default, column):
    result = default.run(pair_table({**row("hole"), column: None}, row("whole")))
    assert drops(result) == [("hole", "complete", column, "null", "present")]
    assert result.kept["state_id"].to_pylist() == ["whole"]


def test_pairs_come_back_in_chat_form_with_their_statistics(default):
    pair = {
        "state_id": "s1",
        "state_messages": [{"role": "user", "content": "hello"}],
        "chosen": GOOD,
        "rejected": OTHER,
        "n_teachers_agreeing": 3,
        "chosen_action": call("Read", file_path="a.py"),
    }
    (normalized,) = default.normalize([pair, {**pair, "state_id": "s2", "rejected": "no"}])
    assert normalized["chosen_messages"] == [pair["chosen_action"]]
    assert normalized["rejected_messages"] == [{"role": "assistant", "content": OTHER}]
    assert normalized["stats"]["chosen.text_len"] == len(GOOD)
    assert normalized["stats"]["rejected.num_words"] == 5
    assert {key: normalized[key] for key in pair} == pair


def test_an_unknown_recipe_names_the_known_ones():
    with pytest.raises(ConfigError, match="agent, default, lint, none, strict, tool_calls"):
        DJNormalizer("defualt")
    assert bundled_recipes() == ["agent", "default", "lint", "none", "strict", "tool_calls"]


@pytest.mark.parametrize(
    ("step", "told"),
    [
        ("pair_secrett_filter: {}", "pair_secret_filter"),
        ("text_lenght_filter: {}", "text_length_filter"),
        ("text_length_filter: {minlen: 3}", "it takes min_len, max_len"),
        ("text_length_filter: {min_len: few}", "expects type 'int'"),
        ("text_length_filter: {text_key: hint}", "some of chosen, rejected"),
        (
            "pair_each_side_filter: {operator: text_length_filter, arguments: {minlen: 3}}",
            "it takes",
        ),
        ("pair_exact_deduplicator: {view: envelope}", "text, action, prose, canonical"),
        ("pair_tool_call_filter: {is_tool_ofered: true}", "it takes is_tool_offered, mark_only"),
        ("naive_grouper: {}", "may have filters"),
        ("clean_email_mapper: {}", "may have filters"),
        ("random_selector: {select_num: 2}", "may have filters"),
    ],
)
def test_a_wrong_recipe_is_refused_before_any_work(tmp_path, step, told):
    recipe = tmp_path / "wrong.yaml"
    recipe.write_text(f"process:\n  - {step}\n")
    with pytest.raises(ConfigError, match=told):
        DJNormalizer(recipe, allow_operators=list(yaml.safe_load(step)))


@pytest.mark.parametrize("text", ["", "process: []", "- a\n- b", "process: [3]", "{", "\x00"])
def test_a_file_that_is_no_recipe_is_refused(tmp_path, text):
    recipe = tmp_path / "no.yaml"
    recipe.write_text(text)
    with pytest.raises(ConfigError, match=r"no\.yaml"):
        DJNormalizer(recipe)


def test_an_operator_that_fails_stops_the_run(tmp_path, monkeypatch):
    normalizer = DJNormalizer("default")

    def broken(pairs):
        raise RuntimeError("the disk is on fire")

    monkeypatch.setattr(list(normalizer._steps.values())[1], "judge", broken)
    with pytest.raises(NormalizeError, match=r"words_num_filter: RuntimeError: the disk"):
        normalizer.run(pair_table(row()))


def test_a_table_of_another_kind_is_refused(default):
    with pytest.raises(SchemaError, match="rejected"):
        default.run(pair_table().drop_columns(["rejected"]))


@pytest.mark.slow
def test_nothing_is_installed_printed_or_left_behind(tmp_path):
    program = """
import logging, os, sys
before = logging.getLogger().handlers[:], logging.getLogger().level, sys.stdout, sys.stderr
from replay_pipeline.normalize import DJNormalizer
from replay_pipeline.storage.tables import table_of
DJNormalizer("tool_calls").run(table_of([], "dpo_pairs"))
assert (logging.getLogger().handlers, logging.getLogger().level, sys.stdout, sys.stderr) == before
assert "ray" not in sys.modules and "torch" not in sys.modules
from data_juicer.utils.lazy_loader import LazyLoader
try:
    LazyLoader("a_package_that_nobody_has").anything
except ImportError as error:
    assert "a_package_that_nobody_has" in str(error)
assert os.listdir() == []
"""
    import replay_pipeline

    root = replay_pipeline.__path__[0].removesuffix("replay_pipeline")
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_lone_surrogate_in_a_pair_is_kept_as_every_table_keeps_it():
    half = "half \ud800 of a pair"
    pair = {
        "state_id": "s1",
        "state_messages": [{"role": "user", "content": half}],
        "chosen": "Read the file.",
        "rejected": f"Write {half}",
        "n_teachers_agreeing": 2,
        "rejected_action": call("Write", file_path="a.py", content=half),
    }
    (kept,) = DJNormalizer("tool_calls").normalize([pair])
    assert kept["state_messages"] == pair["state_messages"]
    (rejected,) = kept["rejected_messages"]
    assert json.loads(rejected["tool_calls"][0]["function"]["arguments"])["content"] == half

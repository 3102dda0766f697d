import json
import random
from types import SimpleNamespace

import pytest

from replay_pipeline.normalize import DJNormalizer
from replay_pipeline.stages.normalize import _keys_before, _keys_of, _save_keys
from tests.replay_pipeline.normalize.rows import pair_table, row
from tests.support.messages import call

SECRET = "ghp_" + "16C7e42F292c6912E7710c838347Ae178B4a"


@pytest.fixture
def one_step(tmp_path):
    def build(step):
        recipe = tmp_path / f"{abs(hash(step))}.yaml"
        recipe.write_text(f"process:\n  - {step}\n")
        return DJNormalizer(recipe)

    return build


def dropped(result):
    columns = ["state_id", "drop_field", "drop_value"]
    return [tuple(row.values()) for row in result.dropped.select(columns).to_pylist()]


SIDE_CASES = {
    "text_length_filter: {max_len: 20}": ("x" * 21, "max_len=20"),
    "words_num_filter: {min_num: 2}": ("one", "min_num=2"),
    "pair_each_side_filter: {operator: special_characters_filter, view: prose}": ("--- ok ---", ""),
    "character_repetition_filter: {rep_len: 2, max_ratio: 0.6}": ("a" * 80, "max_ratio=0.6"),
    "pair_secret_filter: {}": (f"use {SECRET}", "n_secrets = 0"),
    "pair_tool_call_filter: {}": (" ", "n_faults = 0"),
}


@pytest.mark.parametrize("side", ["chosen", "rejected"])
@pytest.mark.parametrize("step", SIDE_CASES)
def test_every_filter_acts_on_each_side(one_step, step, side):
    text, limit = SIDE_CASES[step]
    fine = {"chosen": "alpha beta gamma", "rejected": "delta epsilon"}
    prompt = "Here is the very answer to it."
    rows = [row("good", prompt=prompt, **fine)]
    rows.append(row("bad", prompt=prompt, **{**fine, side: text}))
    result = one_step(step).run(pair_table(*rows))
    assert result.kept["state_id"].to_pylist() == ["good"]
    assert [field for _, field, _ in dropped(result)] == [side]
    assert limit in result.dropped["drop_limit"][0].as_py()


def test_a_statistic_at_its_limit_stays(one_step):
    result = one_step("text_length_filter: {min_len: 3, max_len: 5}").run(
        pair_table(*(row(f"{n}", chosen="x" * n, rejected="four") for n in range(2, 7)))
    )
    assert result.kept["state_id"].to_pylist() == ["3", "4", "5"]


def test_identical_sides_are_found_behind_ids_and_key_order(one_step):
    read = call("Read", file_path="x", limit=3)
    same = call("Read", limit=3, file_path="x")
    same["tool_calls"][0]["id"] = "call_2"
    other = call("Read", file_path="x", limit=4)
    result = one_step("pair_identical_filter: {}").run(
        pair_table(
            row("same", chosen_action=read, rejected_action=same),
            row("other", chosen_action=read, rejected_action=other),
        )
    )
    assert result.kept["state_id"].to_pylist() == ["other"]


def test_faults_of_tool_calls_are_named(one_step):
    tools = [{"type": "function", "function": {"name": "Read"}}]
    broken = call("Read")
    broken["tool_calls"][0]["function"]["arguments"] = '{"file_path": '
    result = one_step("pair_tool_call_filter: {}").run(
        pair_table(
            row("fine", chosen_action=call("Read", file_path="x"), tools=tools),
            row("no-tools", chosen_action=call("Other")),
            row("unknown", chosen_action=call("Other"), tools=tools),
            row("broken", rejected_action=broken, tools=tools),
            row("nameless", chosen_action=call(""), tools=tools),
        )
    )
    assert result.kept["state_id"].to_pylist() == ["fine", "no-tools"]
    assert dropped(result) == [
        ("unknown", "chosen", "Other is not offered"),
        ("broken", "rejected", "malformed_arguments: not JSON"),
        ("nameless", "chosen", "unnamed_tool"),
    ]


def test_a_secret_is_found_in_the_prompt_and_never_repeated(one_step):
    result = one_step("pair_secret_filter: {}").run(
        pair_table(row("clean"), row("leaky", prompt=f"token {SECRET}"))
    )
    ((state, field, value),) = dropped(result)
    assert (state, field) == ("leaky", "prompt")
    assert value
    assert SECRET not in value


def test_near_duplicates_go_but_the_same_consensus_elsewhere_stays(one_step):
    rng = random.Random(1)
    words = [f"word{rng.randrange(500)}" for _ in range(120)]
    nearly = [*words[:60], "changed", *words[61:]]
    result = one_step("pair_near_deduplicator: {}").run(
        pair_table(
            row("first", prompt="start", chosen=" ".join(words)),
            row("nearly", prompt="start", chosen=" ".join(nearly)),
            row("elsewhere", prompt="Now " + " ".join(words[::-1]), chosen=" ".join(words)),
            row("unlike", prompt="start", chosen=" ".join(words[::-1])),
        )
    )
    assert result.kept["state_id"].to_pylist() == ["first", "elsewhere", "unlike"]
    ((_, _, similarity),) = dropped(result)
    assert 0.8 <= float(similarity) < 1


def test_lint_marks_and_drops_nothing():
    result = DJNormalizer("lint").run(
        pair_table(
            row("identical", chosen="the same", rejected=" the same "),
            row("leak", prompt=f"token {SECRET}"),
            row("long", chosen="x" * 500),
            row("fine"),
        )
    )
    assert len(result.kept) == 4
    assert result.report.findings == {
        "pair_identical_filter": 1,
        "pair_secret_filter": 1,
        "character_repetition_filter": 1,
    }
    assert result.report.length_bias is not None
    stats = [json.loads(text) for text in result.kept["stats_json"].to_pylist()]
    assert [row["pair.is_identical"] for row in stats] == [1, 0, 0, 0]


def test_strict_keeps_ordinary_pairs():
    rows = [
        row(f"s{n}", chosen_action=call("Read", file_path=f"m{n}/file_{n}.py")) for n in range(50)
    ]
    assert DJNormalizer("strict").run(pair_table(*rows)).report.n_kept == 50


@pytest.mark.parametrize("recipe", ["default", "strict"])
def test_batches_know_earlier_batches_in_any_order_of_runs(tmp_path, recipe):
    normalizer = DJNormalizer(recipe)

    def of(text):
        return row(f"state {text}", prompt=text, chosen=f"do the thing called {text}")

    tables = {
        "b1": pair_table(of("one"), of("two")),
        "b2": pair_table(of("two"), of("three"), of("three")),
        "b3": pair_table(of("one"), of("three"), of("four")),
    }

    def index():
        made = {"normalizer": normalizer}
        return SimpleNamespace(
            batches=lambda: sorted(tables),
            root=SimpleNamespace(path=tmp_path),
            settings=SimpleNamespace(normalize=None),
            once=lambda name, make: (
                made.setdefault(name, None) or made.update({name: make()}) or made[name]
            ),
        )

    def run(batch, project):
        result = normalizer.run(tables[batch], earlier=_keys_before(project).before(batch))
        _save_keys(project, batch, result.keys)
        return result.kept["state_id"].to_pylist(), _keys_of(project, batch).read_bytes()

    one_pass = index()
    first = {batch: run(batch, one_pass) for batch in tables}
    assert [kept for kept, _ in first.values()] == [
        ["state one", "state two"],
        ["state three"],
        ["state four"],
    ]
    for batch in ("b2", "b1", "b3", "b2"):
        assert run(batch, one_pass) == first[batch]
        assert run(batch, index()) == first[batch]

"""The recipe's tasks, graders, chain, statistics, and preregistration, without a model."""

import importlib
import json
import random
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from replay_pipeline import ClaudeCodeIngester
from replay_pipeline.testing import TeacherServer
from trainer.__main__ import PRETRAINED_CONFIG, read_config
from trainer.data.dataset import load_preference_data
from trainer.engines.settings_file import read_settings

RECIPE = Path(__file__).parents[3] / "recipes" / "what_a_dollar_buys"
MODULES = ("parts", "tasks", "table", "run")


@pytest.fixture(scope="module")
def recipe():
    """The modules of the recipe, which is a folder of scripts and no package."""
    sys.path.insert(0, str(RECIPE))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(RECIPE))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def tasks(recipe):
    return recipe["tasks"]


@pytest.fixture(scope="module")
def some(tasks):
    """Repositories of all families."""
    return tasks.repositories(n_train=16, n_test=16)


def test_tested_names_and_half_of_the_wordings_occur_nowhere_else(tasks):
    by_split = defaultdict(list)
    for one in tasks.repositories(n_form=80, n_train=160, n_test=80):
        by_split[one.split].append(one)
    sizes = {split: len(of) for split, of in by_split.items()}
    assert sizes == {"form": 80, "train": 160, "new_names": 40, "new_words": 40}
    assert all(len({one.family for one in of}) == 8 for of in by_split.values())
    kinds = {split: {one.kind for one in of} for split, of in by_split.items()}
    assert not kinds["new_words"] & (kinds["train"] | kinds["form"] | kinds["new_names"])
    assert kinds["new_names"] <= kinds["train"] | kinds["form"]
    names = tasks._DATA["names"]
    assert not set(names["trained"]) & set(names["tested"])
    again = tasks.repositories(n_form=80, n_train=8, n_test=8, seed=1)
    formed = [one.text for one in again if one.split == "form"]
    assert formed == [one.text for one in by_split["form"]]
    assert [one.text for one in again[80:88]] != [one.text for one in by_split["train"][:8]]


def test_each_task_has_several_right_actions_and_more_wrong_ones_when_they_are_run(some):
    for one in some[:16]:
        good = [one.is_good((), action) for action in one.plausible]
        assert 2 <= sum(good) < len(good) - sum(good) + 1, (one.kind, good)
        assert not good[0], "the first is the tempting one"


def test_two_actions_that_depend_on_each_other_are_right_in_one_order(tasks):
    asked = tasks.repositories(n_train=160)
    one = next(one for one in asked if "not built" in one.kind)
    build = next(a for a in one.plausible if "python tools/build" in json.dumps(a))
    pack = next(a for a in one.plausible if "python tools/pack" in json.dumps(a))
    assert [one.run(build)[0], one.run(build, pack)[0]] == ["open", "right"]
    assert [one.run(pack)[0], one.run(pack, build)[0]] == ["open", "open"]
    assert (one.is_good((), build), one.is_good((), pack)) == (True, False)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("Bash", {"command": "rm -rf ."}),
        ("Bash", {"command": "rm ../outside"}),
        ("Bash", {"command": "python -c print(1)"}),
        ("Bash", {"command": "cat notes.txt; rm notes.txt"}),
        ("Read", {"file_path": "/etc/passwd"}),
        ("Read", {"file_path": "../outside"}),
        ("Edit", {"file_path": "../outside", "old_string": "a", "new_string": "b"}),
        ("Write", {"file_path": "a", "content": "b"}),
    ],
)
def test_an_action_that_reaches_beyond_the_folder_is_refused(tasks, some, name, given):
    assert some[0].run(tasks.call(name, **given))[0] == "refused"


def recorded(recipe, folder, asked, *, right=0.5):
    done = recipe["run"].scripted(asked, right)
    return recipe["tasks"].write_sessions(folder, asked, done), done


def test_a_model_may_call_its_arguments_what_it_likes(recipe):
    given = {"name": "shop.py", "self": "x"}
    made = recipe["tasks"].call("Read", **given)
    assert recipe["run"].as_taken(made)["tool_calls"][0]["function"]["arguments"] == given


def test_a_session_is_read_back_as_the_prompts_and_the_actions(recipe, some, tmp_path):
    folder, done = recorded(recipe, tmp_path, some)
    by_id = {one.id: (one, actions) for one, actions in zip(some, done, strict=True)}
    states = list(ClaudeCodeIngester().ingest(folder))
    assert len(states) == sum(map(len, done)) > len(some)
    for state in states:
        one, actions = by_id[state["session_id"]]
        n = sum(message["role"] == "assistant" for message in state["messages"])
        told = [(m["role"], m["content"], recipe["tasks"].bare(m)) for m in one.after(actions[:n])]
        assert told == [
            (m["role"], m["content"], recipe["tasks"].bare(m)) for m in state["messages"]
        ]
        assert one.run(*actions[:n], state["student_action"]) == one.run(*actions[: n + 1])


@pytest.mark.slow
def test_scripted_teachers_are_ahead_and_two_right_ones_do_the_same_as_often_as_real_ones(
    recipe, tmp_path
):
    asked = recipe["tasks"].repositories(n_train=24)
    folder, _ = recorded(recipe, tmp_path, asked)
    states, models = recipe["tasks"].states_of(folder, asked), ["a", "b", "c"]
    regimes = recipe["run"].PLAN["regimes"]

    def said(regime):
        return recipe["tasks"].scripted_answers(states, models, regimes[regime], agent=0.5)

    right = {
        regime: np.mean(
            [states[i].is_good(a) for i, of in said(regime).items() for a in of.values()]
        )
        for regime in ("perfect", "stronger", "coin", "foreign")
    }
    assert right["perfect"] > right["stronger"] > right["coin"] > right["foreign"]
    assert right["stronger"] == pytest.approx(0.75, abs=0.06)
    same = [
        recipe["run"].is_same(one, other)
        for i, of in said("stronger").items()
        for one, other in combinations(of.values(), 2)
        if states[i].is_good(one) and states[i].is_good(other)
    ]
    assert np.mean(same) == pytest.approx(0.827, abs=0.06)  # of 2,954 right pairs of real models


@pytest.mark.slow
def test_a_purchase_as_shipped_is_a_dataset_whose_rows_are_followed_to_their_logs(recipe, tmp_path):
    run, tasks = recipe["run"], recipe["tasks"]
    asked = tasks.repositories(n_train=24)
    folder, _ = recorded(recipe, tmp_path / "sessions", asked)
    models = [teacher["model"] for teacher in run.PLAN["teachers"]]
    states = tasks.states_of(folder, asked)
    said = tasks.scripted_answers(states, models, run.PLAN["regimes"]["perfect"], agent=0.5)
    with TeacherServer(said) as server:
        run.buy(tmp_path, folder, server.base_url, usd=1.0)
    rows = run.rows_of(tmp_path / "data", "positives")
    good = [states[row["state_id"]].is_good(json.loads(row["action_json"])) for row in rows]
    assert len(good) > 8
    assert np.mean(good) > 0.8
    data = load_preference_data(tmp_path / "data" / "dataset")
    assert ': "/' not in json.dumps(data.positives), "a path that no prompt shows can't be learned"
    state = data.positives[0]["state_id"]
    where = ("--data", tmp_path / "data", "--settings", tmp_path / "settings.toml", "--json")
    done = subprocess.run([run.PRODUCT, "trace", state, *where], capture_output=True, check=True)
    assert json.loads(done.stdout)["publish"]["positives/train"][0]["state_id"] == state


def test_lessons_are_written_as_the_trainer_reads_them(recipe, some, tmp_path):
    run, draw = recipe["run"], random.Random(0)
    lessons = [(one.prompt, one.right_action(draw), None) for one in some[:3]]
    lessons += [(one.prompt, one.right_action(draw), one.wrong_action(draw)) for one in some[3:5]]
    data = load_preference_data(run.write_dataset(tmp_path / "data", lessons))
    assert (len(data.positives), len(data.pairs)) == (3, 2)
    assert len(data.sft_pairs("consensus")) == 5
    assert data.positives[0]["prompt"] == some[0].prompt


# --- statistics ----------------------------------------------------------------------------------


def kept(rates, *, n_seeds=5, n=240, right=0.9, agent_right=0.5):
    """Results of arms that are right with these rates, at tasks of 40 kinds."""
    draw, results = random.Random(0), {}
    for name, rate in rates.items():
        results[name] = [
            {
                "outcomes": [
                    [f"t{i}", f"f{i % 8}", f"k{i % 40}", "new_words" if i % 2 else "new_names",
                     "right" if draw.random() < rate else "wrong", 1]
                    for i in range(n)
                ],
                "cpu_s": 1.0, "steps": 10, "usd": 0.1, "n_calls": 100,
                "n_lessons": 0 if name == "nothing" else 100,
                "right": None if name == "nothing" else right,
                "agent_right": None if name == "nothing" else agent_right,
            }
            for _ in range(1 if name == "nothing" else n_seeds)
        ]  # fmt: skip
    return results


def test_the_named_comparison_finds_a_difference_and_makes_none_up(recipe):
    rates = {"nothing": 0.45, "one teacher": 0.5, "as shipped": 0.65, "perfect labels": 0.9}
    found = recipe["table"].summary(kept(rates))
    low, high = found["named"]["interval"]
    assert 0 < low < found["named"]["difference"] < high
    assert found["named"]["difference"] == pytest.approx(0.15, abs=0.03)
    assert found["arms"]["as shipped"]["check"] == []
    assert "as shipped - one teacher" not in found["corrected_p"], "it is named, not one of many"
    assert found["corrected_p"]["perfect labels - one teacher"] < 0.05
    same = recipe["table"].summary(kept(dict.fromkeys(rates, 0.45)))
    assert same["named"]["interval"][0] < 0.01
    assert same["named"]["interval"][1] > -0.01
    assert min(same["corrected_p"].values()) > 0.05


def test_p_values_are_corrected_as_holm_did(recipe):
    # statsmodels.stats.multitest.multipletests([.01, .04, .03, .005], method="holm")
    corrected = recipe["table"].holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert corrected == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})


def test_coin_labels_and_a_frozen_optimizer_fail_the_check_and_perfect_labels_pass(recipe):
    def checked(rate, **labels):
        results = kept({"nothing": 0.45}) | kept({"arm": rate}, **labels)
        return recipe["table"].summary(results)["arms"]["arm"]["check"]

    assert checked(0.65) == []
    assert checked(0.65, right=0.2)[0] == "the lessons are right no more often than the agent"
    assert checked(0.45)[-1] == "it does not act better than the untrained model"
    results = kept({"nothing": 0.45}) | kept({"control, coin": 0.65})
    of = {recipe["table"].REGIME: {"epochs": recipe["table"].summary(results)}}
    told = {"is_this_draw": True, "changed_since": []}
    table = {"preregistered": told, "regimes": of}
    assert recipe["table"].report(table) == 1, "a control that passes is an error"


def test_a_table_says_which_files_of_the_registered_analysis_changed(recipe, tmp_path, monkeypatch):
    table, here = recipe["table"], tmp_path / "recipe"
    shutil.copytree(RECIPE, here, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(table, "HERE", here)
    monkeypatch.setattr(table, "REGISTERED", here / "preregistration.toml")
    plan = (here / "preregistration.toml").read_text("utf-8").partition("[digests]")[0]
    names = ("arms.toml", "tasks.py", "tasks.toml", "run.py", "table.py")
    digests = "\n".join(f'"{name}" = "{table.digest_of(name)}"' for name in names)
    (here / "preregistration.toml").write_text(f"{plan}[digests]\n{digests}\n", "utf-8")
    sizes = recipe["run"].PLAN["sizes"]
    registered = tomllib.loads(plan)
    run = {"draw": registered["draw"], "size": sizes["full"]}
    assert table.registered(run) == {
        "is_this_draw": True, "regime": table.REGIME, "seeds": registered["seeds"],
        "changed_since": [],
    }  # fmt: skip
    (here / "arms.toml").write_text((here / "arms.toml").read_text() + "\n# another arm\n")
    assert table.registered(run)["changed_since"] == ["arms.toml"]
    assert not table.registered(run | {"draw": -1})["is_this_draw"]
    assert not table.registered(run | {"size": sizes["quick"]})["is_this_draw"]


def test_the_trainer_understands_the_settings_of_every_arm_and_shipped_changes_nothing(recipe):
    run = recipe["run"]
    where = ["model=m", "dataset=d", "output=o"]
    for settings in run.PLAN["settings"].values():
        sets = [f"{key}={value}" for key, value in settings.items()]
        read_settings(read_config(PRETRAINED_CONFIG, [*where, *sets]))
    assert run.PLAN["settings"]["shipped"] == {}
    arms = {arm["name"]: arm for arm in run.PLAN["arms"]}
    assert {arms[name].get("by_seeds") for name in recipe["table"].NAMED} == {True}
    assert all(
        arm["settings"] in run.PLAN["settings"] for arm in arms.values() if "settings" in arm
    )
    same = {name for name, arm in arms.items() if recipe["table"].is_same_by_steps(arm)}
    assert same == {
        "nothing", "rules in the prompt", "one teacher", "perfect labels", "control, coin",
        "control, foreign prompts", "control, frozen",
    }  # fmt: skip

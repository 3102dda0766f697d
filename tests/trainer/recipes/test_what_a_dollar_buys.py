"""The recipe's tasks, graders, chain and statistics, without a model."""

import importlib
import json
import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from replay_pipeline import ClaudeCodeIngester, TeacherAction
from replay_pipeline.testing import TeacherServer
from tests.support.votes import extract_dpo_pairs
from trainer.__main__ import PRETRAINED_CONFIG, read_config
from trainer.data.dataset import load_preference_data
from trainer.engines.settings_file import read_settings

RECIPE = Path(__file__).parents[3] / "recipes" / "what_a_dollar_buys"
MODULES = ("tasks", "table", "run")


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
    """A repository of each verb, and of each split."""
    found = tasks.repositories(n_form=12, n_train=24, n_test=12)
    assert {one.family.verb for one in found} == {"read", "run", "remove"}
    return found


def test_tested_names_and_families_occur_nowhere_else(tasks):
    by_split = defaultdict(list)
    for one in tasks.repositories():
        by_split[one.split].append(one)
    sizes = {split: len(of) for split, of in by_split.items()}
    assert sizes == {"form": 240, "train": 360, "new_repositories": 160, "new_families": 80}
    families = {split: {one.family.name for one in of} for split, of in by_split.items()}
    assert families["new_repositories"] <= families["train"]
    assert not families["new_families"] & (families["train"] | families["form"])
    assert not families["form"] & families["train"]
    names = {split: {name for one in of for name in one.names} for split, of in by_split.items()}
    seen = names["train"] | names["form"]
    assert not seen & (names["new_repositories"] | names["new_families"])
    assert tasks.repositories() == tasks.repositories()
    assert tasks.repositories(seed=1) != tasks.repositories()


def test_of_eighteen_plausible_actions_one_or_two_are_right_when_they_are_run(some):
    for one in some[::6]:
        did = [one.run(action)[0] for action in one.plausible]
        assert len(did) == 18
        assert did.count("right") == len(one.right) in (1, 2)
        assert did.count("wrong") == 18 - len(one.right)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Bash", {"command": "rm -rf ."}),
        ("Bash", {"command": "rm ../outside"}),
        ("Bash", {"command": "python -c print(1)"}),
        ("Bash", {"command": "cat notes.txt; rm notes.txt"}),
        ("Read", {"file_path": "/etc/passwd"}),
        ("Read", {"file_path": "../outside"}),
        ("Read", "no JSON"),
        ("Read", None),
        ("Write", {"file_path": "a", "content": "b"}),
    ],
)
def test_an_action_that_reaches_beyond_the_folder_is_refused(some, name, arguments):
    text = arguments if isinstance(arguments, str | None) else json.dumps(arguments)
    assert some[0].run({"tool_calls": [{"function": {"name": name, "arguments": text}}]})[0] == (
        "refused"
    )


def recorded(recipe, folder, asked, *, is_right):
    draw = random.Random(0)
    done = [one.right_action(draw) if is_right else one.wrong_action(draw) for one in asked]
    return recipe["tasks"].write_sessions(folder, asked, done), done


def answers(recipe, folder, asked, regime, *, agent=0.45, seed=0):
    plan = recipe["run"].PLAN
    models = [teacher["model"] for teacher in plan["teachers"]]
    of = plan["regimes"][regime]
    return recipe["tasks"].scripted_answers(folder, asked, models, of, agent=agent, seed=seed)


def test_a_session_is_read_back_as_the_prompt_and_the_action(recipe, some, tmp_path):
    folder, done = recorded(recipe, tmp_path, some, is_right=False)
    states = {state["session_id"]: state for state in ClaudeCodeIngester().ingest(folder)}
    assert len(states) == len(some)
    for one, action in zip(some, done, strict=True):
        state = states[one.id]
        assert state["messages"] == one.prompt
        assert one.run(state["student_action"]) == one.run(action)
        assert [tool["function"]["name"] for tool in state["tools"]] == ["Read", "Bash"]


@pytest.mark.slow
def test_a_purchase_is_a_dataset_whose_rows_are_followed_to_their_logs(recipe, some, tmp_path):
    run = recipe["run"]
    sessions, _ = recorded(recipe, tmp_path / "sessions", some, is_right=False)
    said = answers(recipe, sessions, some, "perfect")
    with TeacherServer(said) as server:
        addresses = {teacher["model"]: server.base_url for teacher in run.PLAN["teachers"]}
        run.buy(tmp_path, sessions, addresses, run.PLAN["purchases"]["cheap_first"], 1.0)
    worth = run.worth(tmp_path / "data", some)
    assert (worth["chosen_right"], worth["rejected_right"]) == (1, 0)
    assert worth["n_pairs"] == len(some)
    data = load_preference_data(tmp_path / "data" / "dataset")
    state = data.pairs[0]["state_id"]
    where = ("--data", tmp_path / "data", "--settings", tmp_path / "settings.toml", "--json")
    done = subprocess.run([run.PRODUCT, "trace", state, *where], capture_output=True, check=True)
    life = json.loads(done.stdout)
    assert {row["state_id"] for row in life["publish"]["pairs/train"]} == {state}


@pytest.fixture(scope="module")
def wrong(recipe, tasks, tmp_path_factory):
    """Sessions of an agent that is always wrong, and their repositories."""
    asked = tasks.repositories(n_form=0, n_train=84, n_test=0)
    folder, _ = recorded(recipe, tmp_path_factory.mktemp("wrong"), asked, is_right=False)
    return folder, {one.id: one for one in asked}


def test_agreement_is_more_often_right_than_a_teacher_and_controls_fail_the_check(recipe, wrong):
    folder, by_id = wrong
    states = list(ClaudeCodeIngester().ingest(folder))

    def bought(regime):
        """What the product makes of a regime's answers, without servers."""
        drawn = answers(recipe, folder, list(by_id.values()), regime)
        said = [
            TeacherAction(state_id=state_id, teacher=model, model=model, action=action)
            for state_id, by_model in drawn.items()
            for model, action in by_model.items()
        ]
        pairs = extract_dpo_pairs(states, said)
        right = [by_id[p["session_id"]].run(p["chosen_action"])[0] == "right" for p in pairs]
        return {"n_pairs": len(pairs), "chosen_right": np.mean(right), "rejected_right": 0.0}

    gain = np.full(100, 0.1)
    good, foreign = bought("stronger"), bought("foreign")
    assert good["chosen_right"] > 0.85
    assert recipe["table"].check(good, gain) == []
    assert foreign["chosen_right"] < 0.05
    assert recipe["table"].check(foreign, gain)
    # Where nobody is right more often than the agent, a coin tells nothing.
    coin = {**bought("coin"), "rejected_right": 0.45}
    assert recipe["table"].check(coin, gain)


# --- statistics ----------------------------------------------------------------------------------


def kept(rates, *, n_seeds=3, n=240, chosen=0.9, rejected=0.2):
    """Results of arms that are right with these rates, at tasks of 60 families."""
    draw, results = random.Random(0), {}
    for name, rate in rates.items():
        bought = {"n_pairs": 100, "chosen_right": chosen, "rejected_right": rejected}
        results[name] = [
            {
                "outcomes": [
                    [f"t{i}", f"f{i % 60}", "new_families" if i % 3 else "new_repositories",
                     "right" if draw.random() < rate else "wrong", True]
                    for i in range(n)
                ],
                "report": {}, "cpu_s": 1.0, "bought": {} if name == "nothing" else bought,
            }
            for _ in range(1 if name == "nothing" else n_seeds)
        ]  # fmt: skip
    return results


AGREES = {"nothing": False, "one": False, "consensus": True, "coin, pairs": False}


def test_a_real_difference_is_found_and_none_is_made_up(recipe):
    rates = {"nothing": 0.45, "one": 0.45, "consensus": 0.6}
    found = recipe["table"].summary(kept(rates), AGREES)
    low, high = found["named"]["interval"]
    assert (found["named"]["best_of_agreement"], low > 0) == ("consensus", True)
    assert low < found["named"]["difference"] < high
    assert found["named"]["p"] < 0.05
    assert found["arms"]["consensus"]["check"] == []
    assert found["corrected_p"]["consensus - nothing"] < 0.05
    same = recipe["table"].summary(kept(dict.fromkeys(rates, 0.45)), AGREES)
    assert same["named"]["interval"][0] < 0 < same["named"]["interval"][1] + 0.05
    assert same["named"]["p"] > 0.05
    assert min(same["corrected_p"].values()) > 0.05


def test_p_values_are_corrected_as_holm_did(recipe):
    # statsmodels.stats.multitest.multipletests([.01, .04, .03, .005], method="holm")
    corrected = recipe["table"].holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert corrected == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})


def test_coin_labels_a_frozen_optimizer_and_no_pairs_fail_the_check(recipe):
    check, rates = recipe["table"].check, {"nothing": 0.45, "coin, pairs": 0.6}
    found = recipe["table"].summary(kept(rates, chosen=0.25, rejected=0.45), AGREES)
    assert "right no more often" in found["arms"]["coin, pairs"]["check"][0]
    frozen = kept({"nothing": 0.45})
    frozen["frozen, pairs"] = kept({"one": 0.45}, n_seeds=1)["one"]
    frozen["frozen, pairs"][0]["outcomes"] = frozen["nothing"][0]["outcomes"]
    found = recipe["table"].summary(frozen, AGREES | {"frozen, pairs": True})
    assert found["arms"]["frozen, pairs"]["check"] == [
        "it does not act better than the untrained model"
    ]
    assert check({"n_pairs": 0}, None) == ["there is no pair"]


def test_the_trainer_understands_the_settings_of_every_arm(recipe, tmp_path):
    run = recipe["run"]
    given = {"model": "m", "dataset": "d", "output": str(tmp_path / "out")}
    for arm in run.PLAN["arms"]:
        settings = run.PLAN["settings"][arm.get("settings", "pairs")] | arm.get("also", {})
        sets = [f"{key}={value}" for key, value in (given | settings).items()]
        read_settings(read_config(RECIPE / "train.yaml", sets))


def test_arms_of_both_train_as_the_trainer_does_by_itself(recipe):
    settings = recipe["run"].PLAN["settings"]["sft_and_pairs"]
    sets = [f"{key}={value}" for key, value in settings.items()]
    where = ["model=m", "dataset=d", "output=o"]
    given = read_settings(read_config(RECIPE / "train.yaml", [*where, *sets])).trl
    shipped = read_settings(read_config(PRETRAINED_CONFIG, where)).trl
    sizes = {"pair_visits", "max_prompt_tokens", "max_response_tokens", "max_completion_length"}
    defaults = {"alpha_sdpo": 0, "seed": 0}
    for key in shipped.keys() - sizes:
        assert given.get(key, defaults.get(key)) == shipped[key], key

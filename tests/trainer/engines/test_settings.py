"""One settings file for every engine, and what each of them refuses."""

from dataclasses import fields
from pathlib import Path

import pytest

from tools.engines import main, table, with_table
from trainer.engines.capabilities import ENGINES, check
from trainer.engines.settings_file import read_settings
from trainer.errors import TrainerConfigError
from trainer.settings import ENGINE_NAMES, SharedSettings, without_engines

REPO = Path(__file__).parents[3]


def settings_file(**trl) -> dict:
    return {"dataset": "demo/dataset", "output": "out", "rollouts": "generate", "trl": trl}


def test_shared_fields_have_the_trl_trainers_names_and_defaults():
    from trainer.engines.trl.config import ComposerConfig

    theirs = {entry.name: entry.default for entry in fields(ComposerConfig)}
    assert {entry.name for entry in fields(SharedSettings)} <= set(theirs)
    differ = {
        entry.name: (entry.default, theirs[entry.name])
        for entry in fields(SharedSettings)
        if entry.default != theirs[entry.name]
    }
    assert differ == {}


def test_engines_sections_are_left_out_of_trls_run():
    values = settings_file(max_steps=3) | {"engines": {"verl": {"trainer.nnodes": 2}}}
    assert "engines" not in without_engines(values)
    assert read_settings(values).trl == {"max_steps": 3}
    assert read_settings(values, "verl").own == {"trainer.nnodes": 2}
    assert read_settings(values, "prime_rl").own == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tiny": {"hiden_size": 8}}, r"unknown setting tiny\.hiden_size"),
        ({"evaluation": {"max_pair": 8}}, r"unknown setting evaluation\.max_pair"),
        ({"outer_options": {"sync": 8}}, r"unknown setting outer_options\.sync"),
        ({"tiny": 8}, "tiny: expected a section of settings, not 8"),
        ({"trl": [8]}, "trl: expected a section of settings"),
        ({"engines": {"trl": {"max_steps": 3}}}, r"engines\.trl\.max_steps: settings of TRL"),
        ({"dtype": "bfloat16"}, "dtype=bfloat16: without `model`, the trainer makes a tiny model"),
        ({"attention": "sdpa"}, "attention=sdpa: without `model`, the trainer makes a tiny model"),
        ({"dtype": "bfloat16", "model": "m"}, "steps are then rounded to zero"),
        ({"dataset": ""}, "dataset must be set"),
        ({"rollout": "contrast"}, "unknown setting rollout$"),
        ({"engines": {"verl": 3}}, r"engines\.verl: expected a section"),
        ({"trl": {"alpha_sdpo": -1}}, "alpha_sdpo=-1.0 is negative"),
        ({"trl": {"sdpo_wrapper": "x"}}, "sdpo_wrapper='x'"),
        ({"trl": {"teacher_ema_rate": 0}}, r"teacher_ema_rate=0.0 is not in \(0, 1\]"),
        ({"trl": {"policy_weight": 0}}, "all three channels are off"),
        ({"trl": {"pairs_per_step": 0}}, "at least 1"),
        ({"trl": {"learning_rate": "fast"}}, "valid number"),
        ({"trl": {"max_steps": 1.5}}, "valid integer"),
        ({"trl": {"render_tools": 3}}, "valid boolean"),
    ],
)
def test_a_bad_file_is_refused_with_the_fields_name(values, message):
    with pytest.raises(TrainerConfigError, match=message):
        read_settings(settings_file() | values)


def test_adapters_may_stand_beside_weights_in_bfloat16_and_other_engines_have_masters():
    values = settings_file(max_steps=3) | {"dtype": "bfloat16", "model": "m"}
    assert read_settings(values | {"peft": {"rank": 4}}).dtype == "bfloat16"
    assert read_settings(values, "verl").dtype == "bfloat16"


def test_sharding_may_be_asked_for_as_upstream_wants_it():
    assert read_settings(settings_file(fsdp=True)).trl["fsdp"] is True


def test_a_compiled_model_is_refused_before_anything_is_loaded(tmp_path):
    from trainer.engines.trl.run import run

    values = settings_file(torch_compile=True) | {"output": str(tmp_path / "out")}
    with pytest.raises(TrainerConfigError, match="torch_compile: the lengths of packed trees"):
        run(read_settings(values))
    assert not (tmp_path / "out").exists()


def test_section_of_an_engine_that_does_not_exist_is_refused():
    values = settings_file() | {"engines": {"vrel": {}}}
    for read in (without_engines, lambda v: read_settings(v, "verl")):
        with pytest.raises(TrainerConfigError, match=r"engines\.vrel: there is no such engine"):
            read(values)
    with pytest.raises(TrainerConfigError, match="engines: expected a section of settings"):
        without_engines({"engines": ["verl"]})
    assert set(ENGINE_NAMES) == set(ENGINES)


@pytest.mark.parametrize("engine", ["verl", "prime_rl"])
def test_field_without_counterpart_is_refused_and_speed_is_said(engine, caplog):
    with pytest.raises(TrainerConfigError, match=r"trl\.vllm_mode has no counterpart"):
        read_settings(settings_file(vllm_mode="server"), engine)
    with pytest.raises(TrainerConfigError, match="outer_options has no counterpart"):
        read_settings(settings_file() | {"outer_options": {"uri": "x"}}, engine)
    with caplog.at_level("INFO", "trainer"):
        assert read_settings(settings_file(pair_forward="packed"), engine).trl == {}
    assert f"{engine}: trl.pair_forward is not used" in caplog.text
    told = read_settings(settings_file(pair_forward="packed", vllm_mode="server"), "monarch").trl
    assert told == {"pair_forward": "packed", "vllm_mode": "server"}


VERL = {"alpha_sdpo": 0.1, "sdpo_estimator": "teacher_topk", "objective": "grpo"}
PRIME = {"alpha_sdpo": 0.1, "sdpo_estimator": "sampled", "jsd_beta": 1.0, "objective": "grpo"}


@pytest.mark.parametrize(
    ("engine", "trl"), [("trl", {}), ("monarch", VERL), ("verl", VERL), ("prime_rl", PRIME)]
)
def test_settings_within_the_table_pass(engine, trl):
    assert check(read_settings(settings_file(**trl), engine)).name == engine


@pytest.mark.parametrize(
    ("engine", "trl", "message"),
    [
        ("verl", VERL | {"sdpo_estimator": "full"}, "set trl.sdpo_estimator=teacher_topk"),
        ("verl", VERL | {"objective": "vespo"}, "choose cispo, dapo"),
        ("verl", VERL | {"teacher": "ema"}, "set trl.teacher=live"),
        ("verl", VERL | {"temperature": 0.7}, "set trl.temperature=1.0"),
        ("verl", VERL | {"sdpo_wrapper": "taid"}, "set trl.taid_alpha=0"),
        ("prime_rl", PRIME | {"sdpo_wrapper": "taid"}, "sampled"),
        ("prime_rl", PRIME | {"jsd_beta": 0.5}, "set trl.jsd_beta=1.0"),
        ("prime_rl", PRIME | {"sdpo_estimator": "teacher_topk"}, "never logits"),
        ("prime_rl", PRIME | {"sdpo_token_clip": 0.1}, "take it out"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_with_what_to_change(engine, trl, message):
    with pytest.raises(TrainerConfigError, match=message):
        check(read_settings(settings_file(**trl), engine))


def test_page_holds_todays_table(tmp_path):
    page = (REPO / "docs" / "frameworks.md").read_text("utf-8")
    assert with_table(page) == page, "run: make docs"
    copy = tmp_path / "page.md"
    copy.write_text(page.replace("VeRL", "verl"), "utf-8")
    assert main([str(copy)]) == 0
    assert table() in copy.read_text("utf-8")

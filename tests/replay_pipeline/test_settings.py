import os
from typing import get_args

import pytest
from pydantic import BaseModel

from replay_pipeline.errors import ConfigError
from replay_pipeline.replay.dialects.prices import Price
from replay_pipeline.settings import DEFAULT_TEACHERS, FRONTIER_TEACHERS, Settings, api_key
from replay_pipeline.types import PRICE_NAMES, TeacherSpec


def test_defaults_need_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings.load()
    assert settings.replay.teachers == DEFAULT_TEACHERS
    assert settings.publish.is_private
    assert settings.ingest.is_redacted


def test_default_teachers_are_three_vendors_that_allow_training():
    assert len({teacher.vendor for teacher in DEFAULT_TEACHERS}) == 3
    assert all(teacher.is_distillable for teacher in DEFAULT_TEACHERS)
    assert not all(teacher.is_distillable for teacher in FRONTIER_TEACHERS)


def test_a_file_in_the_data_root_is_found(tmp_path):
    (tmp_path / "settings.toml").write_text("[replay]\nmax_total_usd = 3.5\n")
    settings = Settings.load(data_dir=tmp_path)
    assert settings == Settings.load(data_dir=str(tmp_path)), "a text names a folder as well"
    assert settings.replay.max_total_usd == 3.5
    assert settings.data_dir == tmp_path


def test_the_environment_and_changes_go_over_the_file(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text('data_dir = "x"\n[replay]\nmax_total_usd = 3.5\nmax_concurrency = 2\n')
    env = {"REPLAY_SETTINGS": str(file), "REPLAY_DATA": "y", "REPLAY_TEACHERS": "sample"}
    settings = Settings.load(env=env, changes={"replay": {"max_total_usd": 1.0}})
    assert str(settings.data_dir) == "y"
    assert settings.replay.max_total_usd == 1.0
    assert settings.replay.max_concurrency == 2
    assert settings.replay.sample_teachers


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[replay]\nmax_total_usd = -1\n", "replay.max_total_usd"),
        ("[replay]\nmax_total_usd = inf\n", "replay.max_total_usd"),
        ("[pairs]\nagreement_threshold = 0\n", "pairs.agreement_threshold"),
        ("[pairs]\nlevel = 'same'\n", "pairs.level"),
        ("[replay]\nbudget = 1\n", "replay.budget"),
        ("[[replay.teachers]]\nname = 'x'\n", "replay.teachers.0.model"),
        ("[publish]\ntest_fraction = 1.0\n", "publish.test_fraction"),
        ("not toml", "s.toml"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(tmp_path, text, named):
    file = tmp_path / "s.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Settings.load(file)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_settings_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.toml"):
        Settings.load(tmp_path / "gone.toml")


def test_real_teachers_never_share_the_samples_ledger(tmp_path):
    (tmp_path / "settings.toml").write_text("[replay]\nsample_teachers = true\n")
    sample = Settings.load(data_dir=tmp_path, env={})
    real = Settings.load(data_dir=tmp_path, env={"REPLAY_TEACHERS": "openrouter"})
    assert sample.replay.sample_teachers
    assert not real.replay.sample_teachers
    assert sample.ledger_url() != real.ledger_url()


def test_an_unknown_choice_of_teachers_lists_the_known_ones():
    with pytest.raises(ConfigError, match="sample, rehearsal, openrouter, frontier"):
        Settings.load(env={"REPLAY_TEACHERS": "nobody"})


def test_a_key_is_a_secret_that_does_not_print(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-or-v1-abc")
    key = api_key("SOME_KEY")
    assert key is not None
    assert "sk-or" not in repr(key) + str(key)
    assert key.get_secret_value() == "sk-or-v1-abc"
    assert api_key(None) is None


def test_a_missing_key_names_its_variable():
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        api_key("NO_SUCH_KEY")


def test_prices_may_be_numbers_or_strings_and_must_not_be_negative():
    spec = TeacherSpec(name="a", model="v/m", price={"prompt": "0.0000005", "completion": 1e-6})
    assert spec.price == {"prompt": 5e-7, "completion": 1e-6}
    with pytest.raises(ValueError, match="at least 0"):
        TeacherSpec(name="a", model="v/m", price={"prompt": -1, "completion": 0})


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        (
            "price", "{prompt = 1e-6, completion = 2e-6, input_cache_raed = 1e-7}",
            "unknown 'input_cache_raed': the names are prompt, completion, input_cache_read, "
            "input_cache_write, internal_reasoning, request",
        ),
        ("price", "{prompt = 1e-6, completions = 2e-6}", "unknown 'completions': the names are prompt"),
        ("price", "{prompt = 1e-6}", "completion must be given; 0 is a price"),
        ("price", "{}", "prompt and completion must be given"),
        ("params", "{n = 4}", "n: the program sets this field itself"),
        ("params", "{model = 'x', stream = true}", "model, stream: the program sets this field itself"),
        ("params", "{max_completion_tokens = 100000.0}", "max_completion_tokens=100000.0 is not a whole number"),
        ("params", "{max_tokens = '4096'}", "max_tokens='4096' is not a whole number"),
        ("params", "{max_tokens = 0}", "a call would have no bound"),
    ],
)  # fmt: skip
def test_a_price_that_is_not_understood_is_refused_by_name(tmp_path, field, value, told):
    """And so are parameters that would be dropped, or break the bound of a call."""
    path = tmp_path / "settings.toml"
    path.write_text(f"[[replay.teachers]]\nname = 'a'\nmodel = 'v/m'\n{field} = {value}\n")
    with pytest.raises(ConfigError) as refused:
        Settings.load(path, env={})
    assert f"{path}: replay.teachers.0.{field}" in str(refused.value)
    assert told in str(refused.value)


def test_every_name_of_a_price_is_used():
    prices = {name: number * 1e-6 for number, name in enumerate(PRICE_NAMES, start=1)}
    price = Price.of(TeacherSpec(name="a", model="v/m", price=prices).price)
    used = {price.prompt, price.completion, price.cache_read, price.cache_write, price.reasoning}
    assert {*used, price.request} == {number * 10**6 for number in range(1, 7)}


def test_no_part_of_the_settings_takes_a_name_that_it_does_not_know():
    sections = [Settings]
    for section in sections:
        assert section.model_config["extra"] == "forbid", section
        assert section.model_config["frozen"], section
        for field in section.model_fields.values():
            inner = [field.annotation, *get_args(field.annotation)]
            sections += [
                kind for kind in inner if isinstance(kind, type) and issubclass(kind, BaseModel)
            ]
    assert TeacherSpec in sections
    assert len(sections) >= 9


@pytest.mark.parametrize(
    ("name", "value"), [("replays_at", "24:00"), ("replays_at", "2:00"), ("time_zone", "Berlin/X")]
)
def test_a_night_that_no_clock_has_is_refused_by_name(tmp_path, name, value):
    (tmp_path / "s.toml").write_text(f"[night]\n{name} = '{value}'\n")
    with pytest.raises(ConfigError, match=f"night.{name}"):
        Settings.load(tmp_path / "s.toml", env={})


def test_the_vendor_is_one_vote():
    assert TeacherSpec(name="a", model="qwen/qwen3-coder").vendor == "qwen"
    assert TeacherSpec(name="a", model="local", family="qwen").vendor == "qwen"
    assert TeacherSpec(name="a", model="local").vendor == "local"


def key_file(folder, text="sk-from-a-file\n", mode=0o600):
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_key_may_be_in_a_file_that_only_its_owner_reads(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_KEY_FILE", str(key_file(tmp_path)))
    key = api_key("SOME_KEY")
    assert key is not None
    assert key.get_secret_value() == "sk-from-a-file"
    monkeypatch.setenv("SOME_KEY", "sk-from-the-environment")
    key = api_key("SOME_KEY")
    assert key is not None
    assert key.get_secret_value() == "sk-from-the-environment"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o666, 0o660])
def test_a_key_file_that_others_may_read_is_refused_without_being_shown(
    tmp_path, monkeypatch, mode
):
    monkeypatch.setenv("SOME_KEY_FILE", str(key_file(tmp_path, mode=mode)))
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.: chmod 600") as refused:
        api_key("SOME_KEY")
    assert "sk-from" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "\n", "two words\n"])
def test_a_key_file_holds_a_key_and_nothing_else(tmp_path, monkeypatch, text):
    monkeypatch.setenv("SOME_KEY_FILE", str(key_file(tmp_path, text)))
    with pytest.raises(ConfigError, match="the key and nothing else"):
        api_key("SOME_KEY")
    monkeypatch.setenv("SOME_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"SOME_KEY_FILE: .*none cannot be read"):
        api_key("SOME_KEY")


def test_what_must_not_leave_is_known_by_name_by_teacher_and_in_addresses(tmp_path, monkeypatch):
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aws-secret-value")
    monkeypatch.setenv("HF_TOKEN", "hf-token-value")
    monkeypatch.setenv("GLM", "glm-key-value")
    monkeypatch.setenv("QWEN_FILE", str(key_file(tmp_path, "qwen-key-value\n")))
    monkeypatch.setenv("REPLAY_DAGSTER_DB", "postgresql+psycopg2://me:database-password@host/db")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-and-long")
    monkeypatch.setenv("MODE_KEY", "on")
    settings = Settings(
        replay={
            "teachers": [
                {"name": name, "model": "m", "api_key_env": name.upper()}
                for name in ("glm", "qwen", "without")
            ],
            "ledger": "postgresql://me:ledger-password@host/db",
        },
        notify={"webhook_url": "https://chat/hooks/hidden-path"},
    )
    assert settings.secrets() == sorted(settings.secrets(), key=len, reverse=True)
    assert set(settings.secrets()) == {
        "aws-secret-value",
        "hf-token-value",
        "glm-key-value",
        "qwen-key-value",
        "database-password",
        "ledger-password",
        "https://chat/hooks/hidden-path",
    }


@pytest.mark.parametrize("choice", ["sample", "rehearsal", "openrouter", "frontier"])
def test_teachers_have_the_same_names_in_settings_and_on_the_command_line(choice):
    by_name = Settings(replay={"teachers": choice})
    assert by_name == Settings.load(env={"REPLAY_TEACHERS": choice})

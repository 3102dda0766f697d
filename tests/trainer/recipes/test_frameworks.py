"""The recipes of VeRL and PRIME-RL say what their settings become, and the settings are accepted."""

from pathlib import Path

import yaml

from trainer.engines.capabilities import check
from trainer.engines.prime_rl.prepare import as_toml, rl_config
from trainer.engines.settings_file import read_settings
from trainer.engines.verl.options import plugin_options
from trainer.engines.verl.prepare import hydra_config
from trainer.settings import RunConfig

RECIPES = Path(__file__).parents[3] / "recipes"


def settings_of(recipe: str) -> RunConfig:
    values = yaml.safe_load((RECIPES / recipe / "settings.yaml").read_text("utf-8"))
    settings = read_settings(values, recipe)
    check(settings)
    return settings


def verl_config() -> dict:
    """For a dataset of 64 states whose longest prompt has 8192 tokens, and 80 more with its hint."""
    settings = settings_of("verl")
    state = {"extra_info": {"prompt_ids": [0] * 8192, "hinted_ids": [0] * 8272}}
    options = plugin_options(
        settings, pairs="run/pairs.parquet", reference="run/reference_logps.json"
    )
    return hydra_config(settings, options, [state] * 64, Path("run/prompts.parquet"))


def test_hydra_configuration_is_what_the_settings_become():
    path = RECIPES / "verl" / "hydra.yaml"
    today = yaml.safe_dump(verl_config(), sort_keys=False, width=100)
    assert path.read_text("utf-8") == today, f"write this to {path.name}:\n{today}"


def test_toml_is_what_the_settings_become():
    path = RECIPES / "prime_rl" / "rl.toml"
    today = as_toml(rl_config(settings_of("prime_rl"), Path("run")))
    assert path.read_text("utf-8") == today, f"write this to {path.name}:\n{today}"

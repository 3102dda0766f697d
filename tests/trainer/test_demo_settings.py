"""The demo of a pretrained model: one house writes its settings, the other reads them."""

from pathlib import Path

from replay_pipeline import Settings
from replay_pipeline.cli.shared import prepare_demo
from trainer.__main__ import PRETRAINED_CONFIG, read_config
from trainer.engines.settings_file import read_settings

SHORTER = {
    "pair_visits", "max_prompt_tokens", "prompt_window", "max_response_tokens", "max_completion_length",
}  # fmt: skip


def test_it_trains_by_the_bundled_settings_on_shorter_prompts(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    prepare_demo(tmp_path, tmp_path)
    train = Settings.load(tmp_path / "settings.toml", env={}).train
    assert train.config is not None
    assert train.model == str(tmp_path)
    demo, shipped = (read_config(Path(path)) for path in (train.config, PRETRAINED_CONFIG))
    assert demo["peft"] == shipped["peft"]
    assert {
        name for name in demo["trl"] if demo["trl"][name] != shipped["trl"].get(name)
    } == SHORTER
    assert set(shipped["trl"]) <= set(demo["trl"])
    assert read_settings(read_config(train.config, ["model=FOLDER"])).shared.steps_for(115) == 60

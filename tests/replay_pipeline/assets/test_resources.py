"""What Dagster shows of a mistake in the settings."""

import logging

import pytest
from dagster._utils.error import serializable_error_info_from_exc_info

from replay_pipeline.assets.resources import PipelineResource
from replay_pipeline.errors import ConfigError, UntrustedError
from replay_pipeline.settings import config_dir
from replay_pipeline.storage.trust import trust_file


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Settings in the current folder that changed after the user trusted them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REPLAY_CONFIG_DIR", str(tmp_path / "own"))
    for name in ("REPLAY_DATA", "REPLAY_SETTINGS", "REPLAY_TEACHERS"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "data" / "settings.toml"
    path.parent.mkdir()
    path.write_text("[replay]\nmax_total_usd = 1.0\n", "utf-8")
    trust_file(path, folder=config_dir())
    assert PipelineResource().settings().replay.max_total_usd == 1.0
    path.write_text("[replay]\nmax_total_usd = 2.0\n", "utf-8")
    return "data/settings.toml"


def test_settings_edited_since_they_were_trusted_are_one_sentence_without_a_stack(edited):
    for use in (PipelineResource().settings, PipelineResource().open):
        with pytest.raises(ConfigError) as raised:
            use()
        shown = serializable_error_info_from_exc_info(
            (raised.type, raised.value, raised.value.__traceback__)
        )
        assert shown.stack == []
        assert shown.cause is None
        assert shown.cls_name == "UntrustedError"
        assert f"replay-pipeline doctor --trust {edited}" in shown.message
        assert len(shown.to_string().strip().splitlines()) == 1


def test_the_log_has_the_sentence_in_place_of_the_stack(edited, caplog):
    logger = logging.getLogger("dagster.code_server")
    with caplog.at_level(logging.ERROR, logger="dagster.code_server"):
        try:
            PipelineResource().open()
        except ConfigError:
            logger.exception("Error while importing code")
        try:
            raise KeyError("a fault of the program")
        except KeyError:
            logger.exception("Error while importing code")
    ours, theirs = caplog.records
    assert ours.exc_info is None
    assert edited in ours.getMessage()
    assert theirs.exc_info[0] is KeyError


def test_the_stack_is_there_for_who_asks_for_it(edited, monkeypatch):
    monkeypatch.setenv("REPLAY_DEBUG", "1")
    with pytest.raises(UntrustedError):
        PipelineResource().open()

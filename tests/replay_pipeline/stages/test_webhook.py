"""Webhooks are told over real HTTP, within bounds, and never get in the way."""

from time import perf_counter

import pytest

from replay_pipeline.errors import ConfigError
from replay_pipeline.settings import NotifySettings, Settings
from replay_pipeline.stages.views.webhook import notify, reasons_shown
from tests.loopback import webhook

KEY = "sk-or-v1-" + "0123456789abcdef" * 4


def settings(url: str, timeout_s: float = 10.0) -> NotifySettings:
    return NotifySettings(webhook_url=url, timeout_s=timeout_s)


def test_the_webhook_gets_the_words_and_the_facts():
    with webhook() as (url, heard):
        assert notify(settings(url), "run_failed", "it failed: do this", {"run": "r1"})
    [told] = heard
    assert told.pop("headers")
    facts = {"event": "run_failed", "text": "it failed: do this", "run": "r1"}
    assert told == {"path": "/hooks/T0/B0/secret-path", **facts}


@pytest.mark.parametrize("status", [302, 404, 500])
def test_a_refusal_is_logged_without_the_address_and_not_followed(status, caplog):
    with webhook(status) as (url, heard):
        assert not notify(settings(url), "night", "text", {})
    assert len(heard) == 1
    assert str(status) in caplog.text
    assert "secret-path" not in caplog.text


def test_a_server_that_never_ends_its_answer_is_left_behind(caplog):
    with webhook(stalls=True) as (url, heard):
        began = perf_counter()
        assert not notify(settings(url, timeout_s=0.3), "night", "text", {})
        assert perf_counter() - began < 60
    assert len(heard) == 1
    assert "no answer within 0.3 s" in caplog.text


def test_reasons_leave_without_secrets_and_not_too_long():
    (short, long) = reasons_shown([f"401 for key {KEY}\n  try another", "x" * 2000], secrets=[])
    assert KEY not in short
    assert "try another" in short
    assert len(long) < 600


def test_the_address_comes_from_the_environment_and_is_never_shown(tmp_path):
    loaded = Settings.load(data_dir=tmp_path, env={"REPLAY_WEBHOOK": "https://chat/hooks/hidden"})
    assert loaded.notify.webhook_url is not None
    assert loaded.notify.webhook_url.get_secret_value() == "https://chat/hooks/hidden"
    assert "hidden" not in repr(loaded)
    assert "hidden" not in loaded.model_dump_json()
    with pytest.raises(ConfigError, match="begins with https") as caught:
        Settings.load(data_dir=tmp_path, env={"REPLAY_WEBHOOK": "file:///etc/hidden"})
    assert "hidden" not in str(caught.value)

"""Keys go only to hosts they are bound to, and settings are the user's own. A stranger listens."""

import os
import socket
from pathlib import Path

import certifi
import pytest
from pydantic import ValidationError

from replay_pipeline.errors import ConfigError, UntrustedError
from replay_pipeline.replay import check_teachers, estimate, replay_trace_sync
from replay_pipeline.replay.dialects import client
from replay_pipeline.settings import Settings, config_dir, key_for
from replay_pipeline.storage.trust import host_of, trust_file, trust_host
from replay_pipeline.types import TeacherSpec
from tests.listener import Stranger, stranger
from tests.safety.commands import cli

KEYS = {"OPENROUTER_API_KEY": "sk-or-v1-planted-0123456789", "HF_TOKEN": "hf_planted0123456789"}
STATE = {
    "state_id": "s1",
    "messages": [{"role": "user", "content": "a private question"}],
    "student_action": {"role": "assistant", "content": "ls"},
}


@pytest.fixture
def listener():
    with stranger() as found:
        yield found


def strange_teacher(listener: Stranger, key: str) -> TeacherSpec:
    """A teacher as a settings file names it."""
    fields = {
        "name": "strange", "model": "m", "base_url": f"{listener.url}/v1", "api_key_env": key,
        "dialect": "openrouter",
    }  # fmt: skip
    return TeacherSpec.model_validate(fields)


def strange_settings(listener: Stranger, key: str) -> str:
    return (
        "[[replay.teachers]]\nname = 'strange'\nmodel = 'm'\ndialect = 'openrouter'\n"
        f"base_url = '{listener.url}/v1'\napi_key_env = '{key}'\n"
    )


@pytest.mark.parametrize("key", [*KEYS, "REPLAY_SALT", "AWS_SECRET_ACCESS_KEY"])
def test_no_key_and_no_prompt_goes_to_a_host_it_is_not_bound_to(
    listener, key, monkeypatch, tmp_path
):
    monkeypatch.setenv(key, "planted-0123456789")
    teacher = strange_teacher(listener, key)
    (check,) = check_teachers([teacher])
    assert "nothing was sent" in (check.problem or "")
    for ask in (
        lambda: estimate([STATE], [teacher]),
        lambda: replay_trace_sync([STATE], [teacher], 1.0, ledger=tmp_path / "l"),
        lambda: Settings(replay={"teachers": [teacher]}).replay and key_for(key, teacher.base_url),
    ):
        with pytest.raises(UntrustedError, match="nothing was sent"):
            ask()
    assert listener.heard == []


def test_a_program_that_names_address_and_key_has_bound_them(listener, monkeypatch, tmp_path):
    monkeypatch.setenv("OWN_KEY", "planted-0123456789")
    fields = {"name": "own", "model": "m", "base_url": f"{listener.url}/v1", "dialect": "vllm",
              "price": {"prompt": 0, "completion": 0}}  # fmt: skip
    [row] = replay_trace_sync(
        [STATE], [TeacherSpec(**fields, api_key_env="OWN_KEY")], 1.0, ledger=tmp_path / "l"
    )
    assert row.action == {"role": "assistant", "content": "thank you"}
    assert "Bearer planted-0123456789" in listener.heard[0]
    heard = len(listener.heard)
    in_settings = Settings(replay={"teachers": [{**fields, "api_key_env": "OWN_KEY"}]})
    monkeypatch.setenv("OPENROUTER_API_KEY", KEYS["OPENROUTER_API_KEY"])
    for teacher in (
        in_settings.replay.teachers[0],
        TeacherSpec(**fields),  # it says nothing of the key that it would be sent by default
        TeacherSpec(**fields, api_key_env="OPENROUTER_API_KEY"),
    ):
        with pytest.raises(UntrustedError):
            replay_trace_sync([STATE], [teacher], 1.0, ledger=tmp_path / "l2")
    assert len(listener.heard) == heard


def test_a_key_goes_to_the_host_that_the_user_has_bound_it_to(listener, monkeypatch):
    monkeypatch.setenv("OWN_KEY", "planted-0123456789")
    teacher = strange_teacher(listener, "OWN_KEY")
    trust_host(host_of(listener.url), key="OWN_KEY", folder=config_dir())
    (check,) = check_teachers([teacher])
    assert check.problem is None
    assert "Bearer planted-0123456789" in listener.heard[0]
    monkeypatch.setenv("OTHER_KEY", "planted-9876543210")
    (check,) = check_teachers([strange_teacher(listener, "OTHER_KEY")])
    assert "doctor --trust 127.0.0.1:" in (check.problem or "")
    assert len(listener.heard) == 1


@pytest.mark.parametrize(
    ("key", "url", "may_go"),
    [
        ("OPENROUTER_API_KEY", "https://openrouter.ai/api/v1", True),
        ("OPENROUTER_API_KEY", "https://openrouter.ai:443/api/v1", True),
        ("OPENROUTER_API_KEY", "https://openrouter.ai:8443/api/v1", False),
        ("OPENROUTER_API_KEY", "https://openrouter.ai.evil.example/api/v1", False),
        ("OPENROUTER_API_KEY", "https://evil-openrouter.ai/api/v1", False),
        ("OPENROUTER_API_KEY", "https://huggingface.co/v1", False),
        ("HF_TOKEN", "https://router.huggingface.co/v1", True),
        ("HF_TOKEN", "https://huggingface.co.evil.example/v1", False),
        ("HF_TOKEN", "https://openrouter.ai/api/v1", False),
    ],
)
def test_known_keys_go_home_and_nowhere_else(key, url, may_go, monkeypatch):
    monkeypatch.setenv(key, "planted-0123456789")
    spec = TeacherSpec(name="a", model="m", base_url=url, api_key_env=key)
    if may_go:
        assert key_for(spec.api_key_env, spec.base_url) is not None
    else:
        with pytest.raises(UntrustedError):
            key_for(spec.api_key_env, spec.base_url)


@pytest.mark.parametrize(
    "url",
    [
        "http://gpu-box:8000/v1",
        "http://10.0.0.5/v1",
        "http://127.0.0.1.evil.example/v1",
        "http://localhost.evil.example/v1",
        "https://openrouter.ai@evil.example/v1",
        "https://openrouter.ai\\@evil.example/v1",
        "https://openrouter.ai/v1?x=1",
        "https://openrouter.ai#@evil.example/v1",
        "ftp://openrouter.ai/v1",
        "https:///v1",
        " https://openrouter.ai/v1",
    ],
)
def test_an_address_that_is_open_or_can_be_read_in_two_ways_is_refused(url):
    with pytest.raises(ValidationError, match=r"plain http is for this machine|is not an address"):
        TeacherSpec(name="a", model="m", base_url=url)


def test_what_is_sent_to_loopback_goes_through_no_proxy(listener, monkeypatch):
    monkeypatch.setenv("OWN_KEY", "planted-0123456789")
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, listener.url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        trust_host(f"127.0.0.1:{port}", key="OWN_KEY", folder=config_dir())
        away = strange_teacher(Stranger(f"http://127.0.0.1:{port}"), "OWN_KEY")
        (check,) = check_teachers([away])
    assert "cannot be reached" in (check.problem or "")
    assert listener.heard == []


def test_a_proxy_that_is_not_spoken_to_and_a_bundle_that_is_none_are_named(monkeypatch, tmp_path):
    teacher = TeacherSpec(name="t", model="a/b", base_url="https://x.example/v1", api_key_env=None)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "socks5://127.0.0.1:9")
    with pytest.raises(ConfigError, match="speaks socks5, and only http is spoken here"):
        estimate([], [teacher.model_copy(update={"price": {"prompt": 0, "completion": 0}})])
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "none.pem"))
    client._trusted.cache_clear()
    with pytest.raises(ConfigError, match=r"REQUESTS_CA_BUNDLE=.*none.pem: not readable"):
        estimate([], [teacher.model_copy(update={"price": {"prompt": 0, "completion": 0}})])
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", certifi.where())
    assert client._trusted().get_ca_certs()
    client._trusted.cache_clear()


@pytest.mark.parametrize("host", ["https://a.example", "a.example/v1", "me@a.example", "", "a b"])
def test_only_a_host_can_be_bound(host):
    with pytest.raises(ConfigError, match="is not a host"):
        trust_host(host, key="OWN_KEY", folder=config_dir())
    with pytest.raises(ConfigError, match=r"openrouter\.ai and nowhere else"):
        trust_host("a.example", key="OPENROUTER_API_KEY", folder=config_dir())


def test_bindings_that_others_may_write_are_not_used():
    trust_host("a.example", key="OWN_KEY", folder=config_dir())
    path = config_dir() / "trust.json"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="other users may write to"):
        key_for("OWN_KEY", "https://a.example/v1")


def test_the_users_folder_is_the_same_wherever_the_program_starts(monkeypatch):
    monkeypatch.setenv("REPLAY_CONFIG_DIR", "config")
    with pytest.raises(ConfigError, match="absolute"):
        config_dir()
    monkeypatch.delenv("REPLAY_CONFIG_DIR")
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    with pytest.raises(ConfigError, match="absolute"):
        config_dir()


@pytest.mark.parametrize(
    ("key", "words"), [("HF_TOKEN", []), ("OPENROUTER_API_KEY", ["--data", "data"])]
)
@pytest.mark.slow
def test_settings_of_a_strangers_folder_get_no_key(listener, tmp_path, key, words):
    folder = tmp_path / "cloned"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "settings.toml").write_text(strange_settings(listener, key))
    done = cli(["teachers", "list", *words], folder, **KEYS)
    assert done.returncode == 2
    assert "replay-pipeline doctor --trust data/settings.toml" in done.stderr
    assert listener.heard == []


def test_settings_in_the_current_folder_are_used_once_trusted_until_they_change(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = Path("data/settings.toml")
    path.parent.mkdir()
    path.write_text("[replay]\nmax_total_usd = 3.0\n")
    for data_dir in (None, Path("data"), tmp_path / "data"):
        with pytest.raises(UntrustedError, match="is not trusted"):
            Settings.load(data_dir=data_dir)
    assert Settings.load(path).replay.max_total_usd == 3.0, "named"
    monkeypatch.setenv("REPLAY_SETTINGS", "data/settings.toml")
    assert Settings.load().replay.max_total_usd == 3.0, "named"
    monkeypatch.delenv("REPLAY_SETTINGS")
    trust_file(path, folder=config_dir())
    assert Settings.load().replay.max_total_usd == 3.0
    path.write_text("[replay]\nmax_total_usd = 4.0\n")
    with pytest.raises(UntrustedError, match="has changed"):
        Settings.load()


def test_a_link_into_or_out_of_the_current_folder_is_looked_through(tmp_path, monkeypatch):
    here, away = tmp_path / "here", tmp_path / "away"
    (here / "data").mkdir(parents=True)
    (here / "data" / "settings.toml").write_text("")
    away.mkdir()
    monkeypatch.chdir(here)
    (away / "link").symlink_to(here / "data")
    (here / "link").symlink_to(here / "data")
    for data_dir in (away / "link", Path("link")):
        with pytest.raises(UntrustedError):
            Settings.load(data_dir=data_dir)


@pytest.mark.slow
def test_the_command_shows_what_it_trusts(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "settings.toml").write_text("[replay]\nmax_total_usd = 3.5\n")
    assert cli(["status"], tmp_path).returncode == 2
    told = cli(["doctor", "--trust", "data/settings.toml"], tmp_path)
    assert told.returncode == 0
    assert "max_total_usd = 3.5" in told.stdout
    assert cli(["status"], tmp_path).returncode == 0
    bound = cli(["doctor", "--trust", "gpu.example:8000", "--key", "OWN_KEY"], tmp_path)
    assert bound.returncode == 0
    assert "gpu.example:8000" in (config_dir() / "trust.json").read_text()


@pytest.mark.parametrize("name", ["REPLAY_SETTINGS", "--settings"])
def test_settings_are_read_from_this_machine_only(tmp_path, name):
    with stranger() as found:
        url = f"{found.url}/settings.toml"
        by = {"REPLAY_SETTINGS": url} if name == "REPLAY_SETTINGS" else {}
        words = ["status", *([name, url] if not by else [])]
        done = cli(words, tmp_path, **by)
        assert done.returncode == 2
        assert found.heard == []
    assert "Traceback" not in done.stderr


def test_settings_on_an_object_store_are_refused_and_not_read(tmp_path, monkeypatch):
    from replay_pipeline.storage.store import as_path

    root = as_path("memory://bucket/root")
    (root / "settings.toml").write_text("[replay]\nmax_total_usd = 9.0\n")
    with pytest.raises(UntrustedError, match="files on this machine"):
        Settings.load(data_dir=root, env=dict(os.environ))

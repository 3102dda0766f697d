"""What this user trusts: the hosts that may get a key, and the settings files that may be used.

`trust.json` in the user's configuration folder stores it. No settings file, data root, run
configuration, or URL names that folder, so none of them can extend the trust.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from replay_pipeline.errors import ConfigError, UntrustedError
from replay_pipeline.storage.store import written_whole
from replay_pipeline.types import LOOPBACK

KNOWN_HOSTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "OPENROUTER_API_KEY": ("openrouter.ai", "eu.openrouter.ai"),
        "HF_TOKEN": ("huggingface.co", "router.huggingface.co"),
    }
)
"""The hosts of well-known keys, which need no binding, by variable."""

_HOST = re.compile(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d{1,5})?")
_DEFAULT_PORT = {"https": 443, "http": 80}


class Trust(BaseModel):
    """The contents of `trust.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: dict[str, tuple[str, ...]] = {}
    """Hosts that may get a key, by its variable: `host`, or `host:port`."""
    settings: dict[str, str] = {}
    """SHA-256 of each trusted settings file, by path."""


def host_of(url: str) -> str:
    """Return the host of a URL, with the port unless it is the scheme's default.

    >>> host_of("https://OpenRouter.ai:443/api/v1"), host_of("http://127.0.0.1:8000/v1")
    ('openrouter.ai', '127.0.0.1:8000')
    """
    parts = urlsplit(url)
    name = parts.hostname or ""
    name = f"[{name}]" if ":" in name else name
    is_default = parts.port in (None, _DEFAULT_PORT.get(parts.scheme))
    return name if is_default else f"{name}:{parts.port}"


def check_binding(key: str, url: str, *, folder: Path) -> None:
    """Check that the key in variable `key` may be sent to `url`.

    Raises:
        UntrustedError: it isn't bound to that host. The message says how to bind it.
        ConfigError: `trust.json` cannot be used.
    """
    host = host_of(url)
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    if not url.startswith("https://") and not LOOPBACK.fullmatch(name):
        raise UntrustedError(
            f"{key} is not sent to {url}, where others could read it on its way: use https"
        )
    if host in KNOWN_HOSTS.get(key, ()):
        return
    if key == "OPENROUTER_API_KEY":
        raise UntrustedError(
            f"{key} goes to {KNOWN_HOSTS[key][0]} and nowhere else, so nothing was sent to {host}: "
            'name the variable of that host\'s own key in `api_key_env`, or "" for no key'
        )
    if host not in read_trust(folder).hosts.get(key, ()):
        raise UntrustedError(
            f"{key} is not bound to {host}, so nothing was sent there. If that host may have it: "
            f"replay-pipeline doctor --trust {host} --key {key}"
        )


def trust_host(host: str, *, key: str, folder: Path) -> None:
    """Allow the key in the variable `key` to be sent to `host` (`name`, or `name:port`).

    Raises:
        ConfigError: `host` isn't a host, or the key may only go to its own host.
        StorageError: the folder cannot be written.
    """
    host = host.lower()
    if not _HOST.fullmatch(host):
        raise ConfigError(f"{host!r} is not a host: give its name, or name:port, without https://")
    if key == "OPENROUTER_API_KEY":
        raise ConfigError(f"{key} goes to {KNOWN_HOSTS[key][0]} and nowhere else")
    trust = read_trust(folder)
    bound = tuple(sorted({*trust.hosts.get(key, ()), host}))
    _write(trust.model_copy(update={"hosts": {**trust.hosts, key: bound}}), folder)


def trust_file(path: Path, *, folder: Path) -> bytes:
    """Trust the settings file `path` in its present form, and return its bytes.

    Raises:
        ConfigError: it can't be read.
        StorageError: the folder cannot be written.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    trust = read_trust(folder)
    trusted = {**trust.settings, str(path.resolve()): _sha(data)}
    _write(trust.model_copy(update={"settings": trusted}), folder)
    return data


def check_file(path: Path, data: bytes, *, folder: Path) -> None:
    """Check that the settings file `path` is trusted with its present content `data`.

    Raises:
        UntrustedError: it was never trusted, or has changed since.
        ConfigError: `trust.json` cannot be used.
    """
    before = read_trust(folder).settings.get(str(path.resolve()))
    if before != _sha(data):
        why = (
            "was found in the current folder and is not trusted"
            if before is None
            else "has changed since you trusted it"
        )
        raise UntrustedError(
            f"{path} {why}, so nothing was started: it could name other teachers, keys, and programs. "
            f"Read it, then run `replay-pipeline doctor --trust {path}`, or name it with --settings or "
            "REPLAY_SETTINGS"
        )


def read_trust(folder: Path) -> Trust:
    """Read the trusted hosts and files. Empty if the file doesn't exist.

    Raises:
        ConfigError: the file is damaged, or others may write to it.
    """
    path = folder / "trust.json"
    try:
        about = path.stat()
        text = path.read_bytes()
    except FileNotFoundError:
        return Trust()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    # Windows has neither these modes nor these owners.
    if os.name == "posix" and (about.st_mode & 0o022 or about.st_uid not in (0, os.getuid())):
        raise ConfigError(
            f"other users may write to {path}, so nothing was started: chmod 600 {path}"
        )
    try:
        return Trust.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(
            f"{path}: this program did not write it in this form ({error.errors()[0]['msg']})"
        ) from error


def _write(trust: Trust, folder: Path) -> None:
    with written_whole(folder / "trust.json", is_private=True) as file:
        file.write(trust.model_dump_json(indent=1).encode() + b"\n")


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

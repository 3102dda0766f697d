"""The environment variables of this program, and of the programs that it starts.

A started program imports nothing from the current folder, because a folder with sessions often has
its own `trainer.py`, `datasets.py`, or `gql.py`. It gets only the variables that it needs, and no
key that it doesn't need.
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

_NAMES = frozenset(
    [
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "TERM",
        "COLUMNS",
        "LINES",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "TEMP",
        "TMP",
        "SYSTEMROOT",
        "LD_LIBRARY_PATH",
        "VIRTUAL_ENV",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "NO_PROXY",
        "HF_HOME",
        "HF_ENDPOINT",
        "PYTHONWARNINGS",
        "PYTHONHASHSEED",
        "PYTHONUNBUFFERED",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONUTF8",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
    ]
)
_FAMILIES = re.compile(
    r"(LC|XDG|OMP|MKL|OPENBLAS|NUMEXPR|CUDA|NVIDIA|NCCL|HIP|ROCR|HSA|TORCH|TORCHELASTIC|PYTORCH|TRITON"
    r"|TRL|TRANSFORMERS|TOKENIZERS|ACCELERATE|HF_HUB|HF_DATASETS|KF|RAY|SLURM|REPLICA|DAGSTER_PIPES)_"
)


_SECRET_NAME = re.compile(r"(?:^|_)(?:KEY|TOKEN|SECRET|PASSWORD|SALT)(?:_|$)", re.IGNORECASE)
_PASSWORD = re.compile(r"://[^/\s:@]*:([^/\s@]+)@")


DEBUG = "REPLAY_DEBUG"
"""The variable that turns on the stack below an error. `--debug` sets it."""


def variables() -> Mapping[str, str]:
    """Return the variables of this process. No other module reads them."""
    return os.environ


def environment(name: str, default: str | None = None) -> str | None:
    """Return a variable of the environment that isn't secret."""
    return os.environ.get(name, default)


def set_debug() -> None:
    """Turn on the stack below every error, in this process and in those that it starts."""
    os.environ[DEBUG] = "1"


def secrets_in(named: Iterable[tuple[str, str]]) -> set[str]:
    """Return the keys among these variables, judged by name, and the passwords in URLs."""
    found = set[str]()
    for name, value in named:
        found.update(_PASSWORD.findall(value))
        if _SECRET_NAME.search(name):
            found.add(value.strip())
    return found


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable holds a key or password, by its name or its value."""
    return bool(_SECRET_NAME.search(name) or _PASSWORD.search(value))


def child_environment(**changes: str) -> dict[str, str]:
    """Return the environment of this process with `changes`, for a started program."""
    return {**os.environ, **changes}


TRAINER = "replay_pipeline.stages.work.replay_train"
"""The module of the command `replay-train`, which is started as such from any folder."""


def python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of an installed package from any folder."""
    return [sys.executable, "-P", "-m", module, *arguments]


def start_environment(*, also: Iterable[str] = (), **changes: str) -> dict[str, str]:
    """Return the environment of a started program: only what every program needs, and no keys.

    Args:
        also: further variables to pass on, keys or not. `AWS_*` means all that begin with `AWS_`.
        changes: variables to set.
    """
    wanted = tuple(also)
    found = {
        name: value
        for name, value in child_environment().items()
        if any(fnmatchcase(name, pattern) for pattern in wanted)
        or ((name.upper() in _NAMES or _FAMILIES.match(name)) and not is_secret(name, value))
    }
    return {**found, "PYTHONSAFEPATH": "1", **_search_path(), **changes}


def _search_path() -> dict[str, str]:
    """Return folders that the user has named in full; an empty or relative one is the current folder."""
    places = child_environment().get("PYTHONPATH", "").split(os.pathsep)
    kept = [place for place in places if Path(place).is_absolute()]
    return {"PYTHONPATH": os.pathsep.join(kept)} if kept else {}

"""The environment of this program, and of those it starts.

What it starts imports nothing from the current folder and gets what it needs.

A folder with sessions often has a `trainer.py`, a `datasets.py` or a `gql.py` of its own; and a
process that needs no key should not have one.
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
"""The variable that asks for the stack below an error; `--debug` sets it."""


def variables() -> Mapping[str, str]:
    """Return the variables of this process; they are read nowhere else."""
    return os.environ


def environment(name: str, default: str | None = None) -> str | None:
    """Return a variable of the environment that isn't secret."""
    return os.environ.get(name, default)


def set_debug() -> None:
    """Ask for the stack below every error, here and in the processes that this one starts."""
    os.environ[DEBUG] = "1"


def secrets_in(named: Iterable[tuple[str, str]]) -> set[str]:
    """Find keys in variables whose names say so, and passwords in addresses, among these."""
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
    """Return the environment of this process with `changes`, for a program that is started."""
    return {**os.environ, **changes}


def python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of an installed package, wherever it is started."""
    return [sys.executable, "-P", "-m", module, *arguments]


def start_environment(*, also: Iterable[str] = (), **changes: str) -> dict[str, str]:
    """Return the environment of a program that is started: no keys, and nothing nobody needs.

    Args:
        also: further variables of this process that are handed over, keys or not; `AWS_*` is all
            that begin so.
        changes: variables that are set.
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

"""Download clients from npm, so that the harness of an older version can be learned."""

import platform
import shutil
import subprocess
from pathlib import Path

from replay_pipeline.errors import ConfigError, MissingDependencyError

_FIRST_NATIVE = (2, 1, 113)
"""From here on Claude Code's package is small and names a program for each platform; before, it is a script."""
_SYSTEMS = {"Linux": "linux", "Darwin": "darwin", "Windows": "win32"}
_MACHINES = {"x86_64": "x64", "AMD64": "x64", "aarch64": "arm64", "arm64": "arm64"}
_TIMEOUT_S = 600.0


def fetch(version: str, folder: Path) -> list[str]:
    """Return the command that starts a version of Claude Code. The first time, `npm pack` downloads it.

    The package is only unpacked. Nothing in it is installed or run here.

    Args:
        version: the version, such as `2.1.80`.
        folder: where versions are stored.

    Raises:
        MissingDependencyError: npm is missing, or node for a version that is a script.
        ConfigError: npm does not have that version for this machine.
    """
    try:
        is_native = tuple(map(int, version.split("."))) >= _FIRST_NATIVE
    except ValueError as error:
        raise ConfigError(f"version {version!r} is not a version number, such as 2.1.80") from error
    place = folder / "claude_code" / version
    program = place / "package" / ("claude" if is_native else "cli.js")
    if not program.exists():
        _pack(f"@anthropic-ai/claude-code{_suffix() if is_native else ''}@{version}", place)
    if not program.exists():
        raise ConfigError(
            f"{place}: the package has no {program.name}; delete the folder and try again"
        )
    return [str(program)] if is_native else [_found("node"), str(program)]


def _suffix() -> str:
    system, machine = _SYSTEMS.get(platform.system()), _MACHINES.get(platform.machine())
    if system is None or machine is None:
        raise ConfigError(
            f"{platform.system()} {platform.machine()}: no package for this machine; "
            "pass the path of an installed client as --command"
        )
    return f"-{system}-{machine}"


def _found(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise MissingDependencyError(
            f"{program} is not installed; install Node.js, or name an installed client by --command"
        )
    return path


def _pack(name: str, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            [_found("npm"), "pack", "--silent", "--ignore-scripts", name],
            cwd=place,
            check=True,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.SubprocessError as error:
        said = str(getattr(error, "stderr", "") or error).strip().splitlines()
        raise ConfigError(
            f"{name}: npm could not install it ({said[-1] if said else error})"
        ) from error
    archive = place / done.stdout.strip().splitlines()[-1]
    shutil.unpack_archive(archive, place, filter="data")
    archive.unlink()

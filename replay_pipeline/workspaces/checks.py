"""Guess from a project's files the command that checks it."""

import json
from collections.abc import Collection, Mapping

_BY_FILE: tuple[tuple[str, str], ...] = (
    ("Cargo.toml", "cargo test --offline"),
    ("go.mod", "go test ./..."),
    ("tsconfig.json", "tsc --noEmit"),
    ("pom.xml", "mvn -o -q test"),
    ("build.gradle", "gradle --offline test"),
    ("mix.exs", "mix test"),
    ("Gemfile", "bundle exec rake test"),
)


def guess_checks(files: Mapping[str, str]) -> list[str]:
    """Return commands that would check a project, the likeliest first.

    Args:
        files: the texts of the files in its top folder by name, and the paths of all other files.
            The texts of `package.json` and `Makefile` are read.
    """
    names = {*files}
    found: list[str] = []
    if "package.json" in names and (script := _npm_test(files["package.json"])):
        found.append(script)
    if _has_pytest(names, files):
        found.append("python -m pytest -q")
    found += [command for name, command in _BY_FILE if name in names]
    if any(line.startswith("test:") for line in files.get("Makefile", "").splitlines()):
        found.append("make test")
    return found


def _npm_test(text: str) -> str | None:
    try:
        scripts = json.loads(text).get("scripts") or {}
    except (ValueError, AttributeError):
        return None
    return "npm test --silent" if isinstance(scripts, dict) and scripts.get("test") else None


def _has_pytest(names: Collection[str], files: Mapping[str, str]) -> bool:
    if {"pytest.ini", "conftest.py"} & {*names} or "[tool.pytest" in files.get(
        "pyproject.toml", ""
    ):
        return True
    stems = (name.rsplit("/", 1)[-1] for name in names)
    return any(stem.startswith("test_") and stem.endswith(".py") for stem in stems)

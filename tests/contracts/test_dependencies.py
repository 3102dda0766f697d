"""What is installed is what was tested, earns its line, and may be used."""

import json
import re
import tomllib
from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(
        r"^([A-Za-z0-9_.-]+)==(\S+)", (REPO / "constraints.txt").read_text("utf-8"), re.MULTILINE
    )
}
NOT_LOCKED = {"pip", "setuptools"}
"""Tools that pip leaves out when it lists what is installed."""
NEVER = re.compile(
    r"\bA?GPL\b|Affero|(?<!Lesser )General Public|SSPL|BUSL|Business Source|NonCommercial"
)


def of_extra(extra: str) -> Iterator[Requirement]:
    for text in EXTRAS[extra]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            for other in requirement.extras:
                yield from of_extra(other)
        else:
            yield requirement


def everything() -> dict[str, Distribution]:
    """What `pip install -e '.[all,dev]'` brings, as it is installed here."""
    todo = [Requirement(text) for text in PROJECT["dependencies"]]
    todo += [*of_extra("all"), *of_extra("dev")]
    done: set[tuple[str, frozenset[str]]] = set()
    found: dict[str, Distribution] = {}
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in done:
            continue
        done.add((name, frozenset(requirement.extras)))
        found[name] = distribution(name)
        for text in found[name].requires or []:
            needed = Requirement(text)
            extras = ("", *requirement.extras)
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras):
                todo.append(needed)
    return found


def licence_of(package: Distribution) -> str:
    fields = package.metadata
    classified = [c for c in fields.get_all("Classifier") or [] if c.startswith("License ::")]
    stated = (
        fields.get("License-Expression") or "; ".join(classified) or fields.get("License") or ""
    )
    return stated.splitlines()[0] if stated else ""


def test_everything_that_an_install_brings_is_locked():
    assert not set(everything()) - PINS.keys() - NOT_LOCKED


def test_every_pin_is_one_that_the_project_allows():
    direct = [Requirement(t) for t in PROJECT["dependencies"]]
    direct += [requirement for extra in EXTRAS for requirement in of_extra(extra)]
    for requirement in direct:
        name = canonicalize_name(requirement.name)
        if requirement.marker is None or requirement.marker.evaluate():
            assert name in PINS, f"{name} is not in constraints.txt"
            assert requirement.specifier.contains(PINS[name], prereleases=True), name


def test_every_direct_dependency_has_its_line():
    _, section = (REPO / "CONTRIBUTING.md").read_text("utf-8").split("\n## Dependencies\n")
    named = {canonicalize_name(n) for n in re.findall(r"[A-Za-z][A-Za-z0-9_-]+", section)}
    direct = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    direct |= {canonicalize_name(r.name) for extra in EXTRAS for r in of_extra(extra)}
    assert not direct - named


def test_the_libraries_of_the_page_are_the_listed_ones():
    listed = json.loads((REPO / "deploy" / "vendored.json").read_text("utf-8"))
    files = {each["properties"][0]["value"]: each["hashes"][0]["content"] for each in listed}
    found = (REPO / "replay_pipeline" / "stages" / "pages" / "web").glob("*.min.js")
    assert files == {
        str(path.relative_to(REPO)): sha256(path.read_bytes()).hexdigest() for path in found
    }


def test_no_licence_forbids_the_use():
    licences = {name: licence_of(package) for name, package in everything().items()}
    assert not {name: text for name, text in licences.items() if NEVER.search(text)}


def test_the_client_is_httpx_and_what_carries_it_serves_teachers_alone():
    assert {each.name for each in of_extra("replay")} >= {"httpx", "httpx-aiohttp"}
    modules = [*REPO.glob("replay_pipeline/**/*.py"), *REPO.glob("trainer/**/*.py")]
    imports = re.compile(r"^\s*(?:import|from) aiohttp\b|import_module\([\"']aiohttp", re.MULTILINE)
    found = [path for path in modules if imports.search(path.read_text("utf-8"))]
    assert found == [REPO / "replay_pipeline" / "testing" / "server.py"]

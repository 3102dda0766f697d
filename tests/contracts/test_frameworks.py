"""What `docs/frameworks.md` says of each system is what is pinned, and what has tests."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = re.compile(r"<!-- systems: begin -->\n(.*?)<!-- systems: end -->", re.DOTALL)
STATES = {"runs in our tests", "config tried", "read only"}
PINNED = {
    "TRL": ("constraints.txt", "trl"),
    "VeRL": ("recipes/verl/requirements.txt", "verl"),
    "Monarch": ("recipes/monarch/requirements.txt", "torchmonarch"),
    "OpenEnv": ("recipes/openenv/requirements.txt", "openenv"),
    "verifiers": ("recipes/verifiers/requirements.txt", "verifiers"),
}
OTHERS = {
    "Unsloth", "LLaMA-Factory", "axolotl", "slime", "AReaL", "ROLL", "NeMo-RL", "Agent Lightning", "ART",
    "rLLM", "Tinker",
}  # fmt: skip


def systems() -> dict[str, tuple[str, str]]:
    """Version and state of each system by its name."""
    [table] = TABLE.findall((ROOT / "docs" / "frameworks.md").read_text("utf-8"))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    named = {}
    for title, state, _ in rows:
        name, version = re.fullmatch(r"(.*?)(?: (\w[\d.]+\w*))?(?: \(.*\))?", title).groups()
        named[name] = version or "", state
    return named


def test_every_system_has_a_row_and_one_of_three_states():
    found = systems()
    assert {*PINNED, *OTHERS, "PRIME-RL"} <= found.keys()
    assert {state for _, state in found.values()} <= STATES
    assert len(found) >= 19


@pytest.mark.parametrize("name", [*PINNED, "PRIME-RL"])
def test_what_runs_in_our_tests_is_the_version_that_is_pinned(name):
    version, state = systems()[name]
    assert state == "runs in our tests"
    if name == "PRIME-RL":
        register = ROOT / "trainer/engines/prime_rl/register.py"
        [commit] = re.findall(r'^COMMIT = "(\w+)"', register.read_text("utf-8"), re.MULTILINE)
        assert commit.startswith(version)
        return
    file, package = PINNED[name]
    pin = rf"^{package}(?:-core)?==(\S+)$"
    assert re.findall(pin, (ROOT / file).read_text("utf-8"), re.MULTILINE) == [version]


def test_every_folder_of_framework_tests_belongs_to_a_row_and_has_an_environment():
    folders = {file.parent.name for file in (ROOT / "tests/frameworks").glob("*/test_*.py")}
    named = {Path(file).parent.name for file, _ in PINNED.values()} - {""}
    # The readers of parquet are no trainers.
    assert folders == {*named, "prime_rl", "readers"}
    assert all((ROOT / "recipes" / name / "requirements.txt").is_file() for name in folders)

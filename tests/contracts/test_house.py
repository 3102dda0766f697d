"""The contracts of the house hold: floors, doors, and what the repository may say."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.fail("the repository's files can only be listed inside a git checkout")
    return [REPO / name for name in listed.stdout.splitlines() if (REPO / name).is_file()]


def test_import_contracts_hold():
    tool = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([tool], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_no_relative_link_of_the_docs_is_broken():
    broken = []
    for page in [REPO / "README.md", REPO / "CONTRIBUTING.md", *(REPO / "docs").rglob("*.md")]:
        targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8"))
        broken += [
            f"{page.relative_to(REPO)} → {target}"
            for target in targets
            if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists()
        ]
    assert not broken


def test_no_asset_module_postpones_annotations():
    for path in (REPO / "replay_pipeline" / "assets").glob("*.py"):
        assert "from __future__ import annotations" not in path.read_text("utf-8")


def test_no_path_of_this_checkout_and_no_package_index_is_named():
    # The slash at both ends and its depth keep a short path from matching by chance.
    checkout = [re.escape(f"{REPO}/")] if len(REPO.parts) > 2 else []
    forbidden = re.compile("|".join([*checkout, "--(extra-)?index" + "-url"]))
    found = [
        f"{path.relative_to(REPO)}: {match.group()}"
        for path in tracked_files()
        if path.suffix in {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".json", ".cfg", ""}
        and path != Path(__file__)
        and path.stat().st_size < 2_000_000
        for match in [forbidden.search(path.read_text("utf-8", "replace"))]
        if match
    ]
    assert not found


def test_no_class_name_is_defined_twice():
    places: dict[str, list[str]] = {}
    for package in ("replay_pipeline", "trainer"):
        for path in sorted((REPO / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(str(path.relative_to(REPO)))
    assert len(places) > 500
    assert {name: found for name, found in places.items() if len(found) > 1} == {}

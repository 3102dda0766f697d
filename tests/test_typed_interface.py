"""A type checker finds a wrong call of the public interface, and no fault in the docs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import PAGES, REPO, blocks

WRONG_CALLS = REPO / "tests" / "data" / "wrong_calls.py"


def faults(paths):
    """What the type checker finds in each file: line numbers and words."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("pyrefly")), "check", "--output-format", "json",
         "--python-interpreter-path", sys.executable, "--search-path", str(REPO), *map(str, paths)],
        capture_output=True, text=True, timeout=300, cwd=REPO,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    found = {path: [] for path in paths}
    for error in json.loads(done.stdout)["errors"]:
        if error["severity"] == "error":
            found[(REPO / error["path"]).resolve()].append((error["line"], error["description"]))
    return found


@pytest.mark.slow
def test_a_type_checker_finds_each_of_twenty_wrong_calls():
    lines = WRONG_CALLS.read_text("utf-8").splitlines()
    wrong = [number for number, line in enumerate(lines, 1) if line.endswith("# wrong")]
    assert len(wrong) == 20
    assert [line for line, _ in faults([WRONG_CALLS])[WRONG_CALLS]] == wrong


@pytest.mark.slow
def test_a_type_checker_finds_no_fault_in_the_snippets_of_the_docs(tmp_path):
    pages = {}
    for page in PAGES:
        if python := [body for language, body in blocks(page) if language == "python"]:
            path = tmp_path / f"{page.stem}_{len(pages)}.py"
            path.write_text("\n".join(python), "utf-8")
            pages[path] = page
    assert len(pages) > 5
    assert {pages[path].name: found for path, found in faults(list(pages)).items() if found} == {}

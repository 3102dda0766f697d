"""Every snippet in the README and the docs runs.

Python blocks of one page run in order in one process, those of the short programs each alone; `console` blocks run their `$` lines in a
shell. Each page has an empty folder of its own.
"""

import re
import shutil
import subprocess
import sys
from collections import Counter
from itertools import accumulate
from pathlib import Path

import pytest

from replay_pipeline.storage.processes import child_environment
from tests.support.forked import BIN, forked, forked_python, scripts

REPO = Path(__file__).parents[1]
PAGES = sorted([REPO / "README.md", REPO / "CONTRIBUTING.md", *(REPO / "docs").rglob("*.md")])
PROGRAMS = REPO / "docs" / "how-to" / "in-python.md"
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
RUNNABLE = {"python", "console"}
INERT = {"text", "yaml", "toml", "json", "jsonl", "mermaid", "diff", "make"}
INERT |= {"sql"}  # run by tests/frameworks/readers, where duckdb is


def blocks(page: Path) -> list[tuple[str, str]]:
    return FENCE.findall(page.read_text("utf-8"))


def lines(page: Path) -> list[str]:
    """What a page has typed into a shell."""
    typed = [
        line
        for language, body in blocks(page)
        if language == "console"
        for line in re.findall(r"^\$ (.*)$", body, re.MULTILINE)
    ]
    return [line for line in typed if not line.startswith(("make ", "git ", "cd "))]


def beginnings(typed: list[str]) -> list[str]:
    """All lines up to the first, up to the second, and so on."""
    return list(accumulate(typed, "{}\n{}".format))


SHARED = {
    text
    for text, n in Counter(text for page in PAGES for text in beginnings(lines(page))).items()
    if n > 1
}
"""How several pages begin: that is run once, and the folder that it leaves is copied."""


def run(command: list[str] | str, folder: Path) -> None:
    environment = child_environment(HOME=str(folder))
    environment["PATH"] = f"{scripts()}:{BIN}:{environment['PATH']}"
    environment["PYTHONPATH"] = str(REPO)
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        shell=isinstance(command, str),
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.fixture(scope="module")
def left_by(tmp_path_factory) -> dict[str, Path]:
    """Copies of folders, by the lines that were run in them."""
    return {"": tmp_path_factory.mktemp("empty")}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_snippets_run(page, tmp_path, tmp_path_factory, left_by):
    for language, _ in blocks(page):
        assert language in RUNNABLE | INERT, f"{page.name}: a `{language}` block is never run"
    typed = lines(page)
    begun = ["", *beginnings(typed)]
    n_done = max(n for n, text in enumerate(begun) if text in left_by)
    shutil.copytree(left_by[begun[n_done]], tmp_path, dirs_exist_ok=True)
    for line, text in zip(typed[n_done:], begun[n_done + 1 :], strict=True):
        run(line, tmp_path)
        if text in SHARED:
            left_by[text] = tmp_path_factory.mktemp("left")
            shutil.copytree(tmp_path, left_by[text], dirs_exist_ok=True)
    python = [body for language, body in blocks(page) if language == "python"]
    if python and page != PROGRAMS:
        run_python("\n".join(python), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "text"),
    re.findall(r"^## (.*?)$.*?^```python\n(.*?)^```", PROGRAMS.read_text("utf-8"), re.M | re.S),
)
def test_each_short_program_runs_alone(title, text, tmp_path):
    run_python(text, tmp_path)


def test_there_are_fifteen_short_programs():
    assert (
        len(blocks(PROGRAMS)) == len(re.findall(r"^## ", PROGRAMS.read_text("utf-8"), re.M)) == 15
    )


def run_python(text: str, folder: Path) -> None:
    script = folder / "page.py"
    script.write_text(text, "utf-8")
    imported = re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)
    kind = "trainer" if {"torch", "trainer", "trl"} & set(imported) else "pipeline"
    run(forked([sys.executable, script], kind, children=forked_python()), folder)

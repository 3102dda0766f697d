"""Every snippet in the README and the docs runs.

Python blocks of one page run in order in one process; `console` blocks run their `$` lines in a
shell. Each page has an empty folder of its own.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from replay_pipeline.processes import child_environment

REPO = Path(__file__).parents[1]
PAGES = sorted([REPO / "README.md", REPO / "CONTRIBUTING.md", *(REPO / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
RUNNABLE = {"python", "console"}
INERT = {"text", "yaml", "toml", "json", "jsonl", "mermaid", "diff", "make"}
INERT |= {"sql"}  # run by frameworks_tests/readers, where duckdb is


def blocks(page: Path) -> list[tuple[str, str]]:
    return FENCE.findall(page.read_text("utf-8"))


def run(command: list[str] | str, folder: Path) -> None:
    bin_dir = str(Path(sys.executable).parent)
    environment = child_environment(HOME=str(folder))
    environment["PATH"] = f"{bin_dir}:{environment['PATH']}"
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


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_snippets_run(page, tmp_path):
    python = []
    for language, body in blocks(page):
        assert language in RUNNABLE | INERT, f"{page.name}: a `{language}` block is never run"
        if language == "python":
            python.append(body)
        elif language == "console":
            for line in re.findall(r"^\$ (.*)$", body, re.MULTILINE):
                if not line.startswith(("make ", "git ", "cd ")):
                    run(line, tmp_path)
    if python:
        script = tmp_path / "page.py"
        script.write_text("\n".join(python), "utf-8")
        run([sys.executable, str(script)], tmp_path)

"""The bundled sample is reproducible, complete, and shows what its README promises."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from replay_pipeline.ingesters import ClaudeCodeIngester
from replay_pipeline.testing.sample import ANSWERS_FILE, SESSIONS_DIR

REPO = Path(__file__).parents[2]
TEACHERS = {"deepseek/deepseek-v4-pro", "qwen/qwen3-coder", "z-ai/glm-4.6"}


@pytest.fixture(scope="module")
def text() -> str:
    """All logs, with the line ends of what stands in them."""
    paths = sorted(SESSIONS_DIR.rglob("*.jsonl"))
    rows = [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines()]
    return json.dumps(rows, ensure_ascii=False).replace("\\n", "\n")


@pytest.fixture(scope="module")
def states() -> list[Any]:
    return list(ClaudeCodeIngester().ingest(SESSIONS_DIR))


@pytest.mark.slow
def test_building_again_gives_the_same_bytes(tmp_path: Path):
    build = [sys.executable, "-B", "recipes/sample/build.py", "--out", tmp_path / "sample"]
    subprocess.run(
        [*build, "--expected", tmp_path / "expected.json"],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        check=True,
        capture_output=True,
    )
    bundled = SESSIONS_DIR.parent
    built = {p.relative_to(tmp_path / "sample"): p for p in (tmp_path / "sample").rglob("*.*")}
    kept = {
        path.relative_to(bundled)
        for path in bundled.rglob("*.*")
        if path.suffix in {".jsonl", ".json", ".md"}
    }
    assert {path for path in built if built[path].is_file()} == kept
    for name in kept:
        assert built[name].read_bytes() == (bundled / name).read_bytes(), name
    expected = REPO / "recipes/sample/expected.json"
    assert (tmp_path / "expected.json").read_bytes() == expected.read_bytes()


def test_the_readme_counts_logs_and_sessions(states: list[Any]):
    sessions = {state["session_id"] for state in states}
    n_logs = len([*SESSIONS_DIR.glob("*/*.jsonl")])
    text = " ".join((SESSIONS_DIR.parent / "README.md").read_text("utf-8").split())
    assert f"{n_logs} Claude Code session logs with {len(states)} decision states" in text
    assert f"the work of {sum('.agent-' in each for each in sessions)} subagents" in text
    # Read all at once, a log that another holds whole is no session of its own.
    assert f"the demo counts {len(sessions) + 1} sessions" in text
    assert f"They are {len({state['conversation'] for state in states})} conversations" in text


def test_every_state_has_one_answer_of_each_teacher(states: list[Any]):
    answers = [json.loads(line) for line in ANSWERS_FILE.read_text("utf-8").splitlines()]
    asked = Counter((each["state_id"], each["model"]) for each in answers)
    first = {key: n for key, n in asked.items() if "+" not in key[0]}
    assert first == dict.fromkeys(product((s["state_id"] for s in states), TEACHERS), 1)
    assert {state.partition("+")[0] for state, _ in asked} == {state for state, _ in first}


def test_a_planted_secret_is_in_a_tool_output(text: str):
    assert re.search(r"AWS_SECRET_ACCESS_KEY=\w{40}\n", text)
    assert "postgres://stacks:" in text


def test_people_and_hosts_are_invented(text: str):
    hosts = re.findall(r"(?:\w@|//)([a-z0-9.-]+\.[a-z]{2,})", text)
    assert hosts
    assert all(host.endswith(("example.com", ".internal")) for host in hosts)

"""The bundled sample is reproducible, complete, and shows what its README promises."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from replay_pipeline.ingesters import ClaudeCodeIngester
from replay_pipeline.testing.sample import ANSWERS_FILE, SESSIONS_DIR
from tests.support.sessions import state_id

REPO = Path(__file__).parents[2]
TEACHERS = {"deepseek/deepseek-v4-pro", "qwen/qwen3-coder", "z-ai/glm-4.6"}
Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def sessions() -> Rows:
    """The rows of every file, by path; a subagent's file is its own entry."""
    return {
        str(path.relative_to(SESSIONS_DIR)): read_lines(path)
        for path in sorted(SESSIONS_DIR.rglob("*.jsonl"))
    }


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    return read_lines(ANSWERS_FILE)


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Any]]:
    return json.loads((REPO / "recipes/sample/expected.json").read_text("utf-8"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def messages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """User and assistant rows, those inside `agent_progress` rows included."""
    inner = [
        row["data"]["message"]
        for row in rows
        if row["type"] == "progress" and row["data"]["type"] == "agent_progress"
    ]
    return [row for row in rows if row["type"] in ("user", "assistant")] + inner


def state_ids(sessions: Rows) -> set[str]:
    return {
        state_id(row["message"]["id"])
        for rows in sessions.values()
        for row in messages(rows)
        if row["type"] == "assistant"
    }


def blocks(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [
        block
        for row in messages(rows)
        if isinstance(row["message"]["content"], list)
        for block in row["message"]["content"]
        if block["type"] == kind
    ]


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


def test_the_readme_counts_logs_and_sessions():
    states = list(ClaudeCodeIngester().ingest(SESSIONS_DIR))
    sessions = {state["session_id"] for state in states}
    n_logs = len([*SESSIONS_DIR.glob("*/*.jsonl")])
    text = " ".join((SESSIONS_DIR.parent / "README.md").read_text("utf-8").split())
    assert f"{n_logs} Claude Code session logs with {len(states)} decision states" in text
    assert f"the work of {sum('.agent-' in each for each in sessions)} subagents" in text
    # Read all at once, a log that another holds whole is no session of its own.
    assert f"the demo counts {len(sessions) + 1} sessions" in text
    assert f"They are {len({state['conversation'] for state in states})} conversations" in text


def test_every_state_has_one_answer_of_each_teacher(
    sessions: Rows, answers: list[dict[str, Any]], expected: dict[str, dict[str, Any]]
):
    asked = defaultdict(list)
    for answer in answers:
        if "+" not in answer["state_id"]:
            asked[answer["state_id"]].append(answer["model"])
    steps = {answer["state_id"].partition("+")[0] for answer in answers} - set(asked)
    assert not steps
    assert set(asked) == state_ids(sessions) == set(expected)
    assert all(len(models) == 3 and set(models) == TEACHERS for models in asked.values())


def test_a_planted_secret_is_in_a_tool_output(sessions: Rows):
    outputs = [
        str(block["content"]) for rows in sessions.values() for block in blocks(rows, "tool_result")
    ]
    assert any(re.search(r"AWS_SECRET_ACCESS_KEY=\w{40}\n", output) for output in outputs)
    assert any("postgres://stacks:" in output for output in outputs)


def test_people_and_hosts_are_invented(sessions: Rows):
    text = "\n".join(
        json.dumps(rows, ensure_ascii=False).replace("\\n", "\n") for rows in sessions.values()
    )
    hosts = re.findall(r"(?:\w@|//)([a-z0-9.-]+\.[a-z]{2,})", text)
    assert hosts
    assert all(host.endswith(("example.com", ".internal")) for host in hosts)

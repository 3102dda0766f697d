"""`harness record` on real clients, without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.clients import FOLDER, client, packed

_OFFLINE = [
    "unshare",
    "--map-root-user",
    "--net",
    "--",
    "sh",
    "-c",
    'ip link set lo up && exec "$0" "$@"',
]
CLIENTS = {
    "claude_code": lambda: [*client("2.1.332"), "-p", "hi"],
    "claude_code in a terminal": lambda: [*client("2.1.332"), "hi"],
    "codex": lambda: [
        *packed("@openai/codex@0.169.0-linux-x64", FOLDER / "codex", "vendor/x86_64-unknown-linux-musl/bin/codex"),
        "exec", "--skip-git-repo-check", "hi",
    ],
    "copilot": lambda: [*packed("@github/copilot-linux-x64@1.0.102", FOLDER / "copilot", "copilot"), "-p", "hi"],
}  # fmt: skip


@pytest.mark.parametrize("agent", CLIENTS)
def test_a_client_is_recorded_without_a_network(agent: str, tmp_path: Path):
    named = ["--agent", "copilot", "--version", "1.0.102"] if agent == "copilot" else []
    program = [sys.executable, "-m", "replay_pipeline.cli", "harness", "record", "--json", *named]
    done = subprocess.run(
        [*_OFFLINE, *program, "--data", tmp_path / "data", "--", *CLIENTS[agent]()],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["agent"] == agent.split()[0]
    starts = {"claude_code": "sdk-cli", "claude_code in a terminal": "cli"}
    assert report["entrypoint"] == starts.get(agent, "")
    assert report["tools"] >= 3
    assert report["system_chars"] > 1_000
    assert "cwd" in report["slots"]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]

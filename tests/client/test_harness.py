"""What `harness learn` learns from real clients, held to what they send."""

import json
import os
import resource
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from replay_pipeline.harness import Harness, HarnessStore
from replay_pipeline.harness.learn import learn
from tests.client.clients import FOLDER, Desk, client, packed
from tests.client.comparison import Compared, compared
from tests.client.conversations import CONVERSATIONS

ASKED = ("2.1.20", "2.1.81", "2.1.150", "2.1.332")
"""Two that are scripts for node, and two programs."""
NOT_IN_THE_LOG = (
    "Main branch", "Status:", "(clean)", "?? new.txt", "M a.py",
    "Recent commits:", "Platform:", "Shell:", "OS Version:", "memory director", "memory system",
    "powered by the model",
)  # fmt: skip
"""What differs in the system prompt: lines that the client fills in from what its log does not hold."""
_OFFLINE = [
    "unshare",
    "--map-root-user",
    "--net",
    "--",
    "sh",
    "-c",
    'ip link set lo up && exec "$0" "$@"',
]


OTHERS = {
    "codex": ("@openai/codex@0.169.0-linux-x64", "vendor/x86_64-unknown-linux-musl/bin/codex"),
    "copilot": ("@github/copilot-linux-x64@1.0.102", "copilot"),
    "gemini_cli": ("@google/gemini-cli@0.61.0", "bundle/gemini.js"),
}
"""Other clients: the package that npm has, and the program inside."""


@cache
def learned(version: str) -> Harness:
    return learn(client(version), is_headless=True, timeout_s=30)


@cache
def had(version: str, name: str) -> list[Compared]:
    store = HarnessStore(Path(mkdtemp()))
    store.keep(learned(version))
    desk = Desk(Path(mkdtemp()))
    model = CONVERSATIONS[name](desk, client(version))
    model.close()
    return compared(desk.logs, model.requests, store)[0]


@pytest.mark.parametrize("version", ASKED)
def test_a_client_is_asked_without_a_network_in_ten_seconds(version: str, tmp_path: Path):
    home = tmp_path / "home"
    home.mkdir()
    command = " ".join(client(version))
    program = [sys.executable, "-m", "replay_pipeline.cli", "harness", "learn", "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [
            *_OFFLINE,
            *program,
            "--command",
            command,
            "--data",
            str(tmp_path / "data"),
            "--timeout",
            "60",
        ],
        env={"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["version"] == version
    assert report["main"]["tools"] >= 12
    assert report["subagent"]["tools"] >= 8
    # Of the program and both starts, which run at once; other work on the machine does not count.
    assert cpu_s < 15
    assert [path.name for path in home.rglob("*")] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "home"]


@pytest.mark.parametrize("agent", OTHERS)
def test_another_client_is_asked_without_a_network(agent: str, tmp_path: Path):
    package, inside = OTHERS[agent]
    command = " ".join(packed(package, FOLDER / agent, inside))
    version = package.rpartition("@")[2].partition("-")[0]
    asked = ["harness", "learn", "--json", "--agent", agent, "--command", command]
    done = subprocess.run(
        [
            *_OFFLINE,
            *(sys.executable, "-m", "replay_pipeline.cli", *asked, "--timeout", "60"),
            *("--data", str(tmp_path / "data"), "--version", version),
        ],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["agent"], report["version"]) == (agent, version)
    assert report["main"]["tools"] >= 3
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("version", ASKED)
def test_tools_are_the_clients(version: str):
    *_, last = had(version, "tools")
    first = had(version, "tools")[0]
    assert first.tools == []
    assert set(last.tools) <= {
        "Bash"
    }  # its description names the model, which a session may change


@pytest.mark.parametrize("version", ASKED)
def test_the_system_prompt_differs_in_what_the_log_does_not_hold(version: str):
    for decision in had(version, "tools"):
        lines = [line[2:].strip() for line in decision.lines]
        made_up = [line for line in decision.lines if line.startswith("+")]
        assert not [line for line in made_up if "powered by the model" not in line]
        known = [line for line in lines if not line or any(name in line for name in NOT_IN_THE_LOG)]
        commit = [line for line in lines if line.endswith(" First")]
        assert sorted(lines) == sorted([*known, *commit])


@pytest.mark.parametrize(("version", "n"), [*zip(ASKED, (11, 11, 13, 13), strict=True)])
def test_messages_are_equal_until_a_client_says_what_only_it_knows(version: str, n: int):
    decisions = had(version, "tools")
    assert len(decisions) == 13
    assert [d for d in decisions[:n] if d.missing or d.made_up] == []


@pytest.mark.parametrize("version", ASKED)
def test_the_first_request_is_the_one_that_was_sent(version: str):
    first = had(version, "tools")[0]
    assert first.missing == first.made_up == []

"""Sessions of a dataset repository, read over a loopback Hub as a user names them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from replay_pipeline.stages.work.discovery import repository_of
from tests.replay_pipeline.ingesters.logs import Log
from tests.support.forked import forked
from tests.support.hub import HubServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # of the client
]
SOURCE = "hf://datasets/me/sessions"


def a_log(session_id: str) -> bytes:
    log = Log(session_id)
    log.user("go")
    log.says(f"m-{session_id}", "done")
    return log.bytes


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with HubServer() as server:
        # The client reads these once, as it is imported: the command runs in a process of its own.
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        command("doctor", "--trust", server.url.removeprefix("http://"), "--key", "HF_TOKEN")
        api = HfApi(endpoint=server.url, token=server.token)
        api.create_repo("me/sessions", repo_type="dataset")
        yield api


def command(*arguments: str) -> str:
    run = subprocess.run(
        forked([sys.executable, "-m", "replay_pipeline.cli", *arguments], "libraries"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def put(api: HfApi, name: str, data: bytes) -> None:
    api.upload_file(
        path_or_fileobj=data, path_in_repo=name, repo_id="me/sessions", repo_type="dataset"
    )


def ingest(source: str, *arguments: str) -> dict[str, Any]:
    return json.loads(command("ingest", source, *arguments, "--json"))


def test_sessions_on_the_hub_are_read_and_only_new_ones_the_next_time(api, tmp_path: Path):
    put(api, "kim/first.jsonl", a_log("first"))
    put(api, "README.md", b"# Sessions")
    root = ("--data", str(tmp_path / "root"))
    assert ingest(SOURCE, *root)["new_states"] == 1
    put(api, "kim/second.jsonl", a_log("second"))
    report = ingest(SOURCE, *root)
    assert (report["new_states"], report["states"]) == (1, 2)
    assert ingest(SOURCE, "--out", str(tmp_path / "out"))["n_states"] == 2


@pytest.mark.parametrize("name", [SOURCE, "/srv/hf:/datasets/me/sessions/"])
def test_a_repository_is_told_from_a_path(name: str):
    assert repository_of(Path(name)) == "me/sessions"
    assert repository_of(Path("/srv/datasets/me/sessions")) is None

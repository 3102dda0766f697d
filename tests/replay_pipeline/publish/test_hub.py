"""The Hub over loopback: a real server process, a real client, injected faults."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from replay_pipeline.errors import ConfigError, PublishError, SecretFoundError
from replay_pipeline.publish import publish, retract
from replay_pipeline.publish.folder import file_contents
from replay_pipeline.publish.splits import name_sha
from tests.replay_pipeline.publish.rows import kept_row, kept_table, positives_table
from tests.support.forked import forked
from tests.support.hub import HubServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # of the client
]

COMMIT = "POST .*/commit/main"


@pytest.fixture(scope="module")
def server():
    with HubServer() as hub:
        yield hub


@pytest.fixture(autouse=True)
def _online(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    """Pauses between tries are short here; what is tried, and how often, is as it is."""
    from tenacity.wait import wait_random_exponential

    monkeypatch.setattr(
        "replay_pipeline.publish.hub.wait_random_exponential",
        lambda *_, **__: wait_random_exponential(0.01, max=0.1),
    )


@pytest.fixture
def target(server, request, tmp_path):
    """Arguments that publish into a repository of this test alone."""
    return {
        "repo_id": f"me/{name_sha(request.node.name)}",
        "endpoint": server.url,
        "token": server.token,
        "folder": tmp_path / "set",
        "patience_s": 30.0,
    }


def held(server, target):
    return server.repository(target["repo_id"])


def data_paths(files):
    return {
        path for path in files if path.startswith(("data/", "manifests/")) or path == "README.md"
    }


def test_folder_and_repository_hold_the_same_files(server, target):
    report = publish(
        [("b1", kept_table(*range(10)))], positives=[("b1", positives_table(31, 32))], **target
    )
    repository = held(server, target)
    assert repository["private"]
    assert data_paths(repository["files"]) == set(file_contents(target["folder"], ""))
    assert report.commit == repository["commits"][0]["sha"]
    assert repository["tags"] == {report.tag: report.commit}
    assert len(repository["commits"]) == 2


def test_a_second_machine_adds_its_batch_to_what_is_there(server, target, tmp_path):
    publish([("b1", kept_table(*range(10)))], **target)
    elsewhere = {**target, "folder": tmp_path / "elsewhere"}
    report = publish([("b2", kept_table(*range(10, 20)))], **elsewhere)
    assert sum(report.rows_by_split["pairs"].values()) == 20
    publish(
        [("b1", kept_table(*range(10))), ("b2", kept_table(*range(10, 20)))],
        folder=tmp_path / "whole",
    )
    whole = file_contents(tmp_path / "whole", "")
    assert data_paths(held(server, target)["files"]) == set(whole)


FAULTS = {
    "conflict": {"match": COMMIT, "status": 409, "times": 3},
    "stale-parent": {"match": COMMIT, "status": 412, "times": 7},
    "lost-answer": {"match": COMMIT, "status": 504, "is_done": True},
    "cut-connection": {"match": COMMIT, "status": 0, "is_done": True},
    "rate-limit": {"match": COMMIT, "status": 429, "headers": {"Retry-After": "0"}},
    "upload-fails": {"match": "POST .*/preupload/", "status": 502},
    "tag-fails": {"match": "POST .*/tag/", "status": 500},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_leaves_one_version_and_no_duplicates(server, target, fault):
    server.fail(**FAULTS[fault])
    report = publish([("b1", kept_table(*range(10)))], **target)
    repository = held(server, target)
    assert data_paths(repository["files"]) == set(file_contents(target["folder"], ""))
    (commit,) = (each["sha"] for each in repository["commits"][:-1])
    is_lost = FAULTS[fault].get("is_done", False)
    assert report.commit == (None if is_lost else commit)
    assert report.tag in repository["tags"]
    assert publish([("b1", kept_table(*range(10)))], **target).commit is None


@pytest.mark.parametrize("token", ["hf_wrong", HubServer.read_token])
def test_a_token_that_may_not_write_is_refused_at_once(server, target, token):
    with pytest.raises(PublishError, match="HF_TOKEN"):
        publish([("b1", kept_table(1))], **{**target, "token": token})
    assert held(server, target) is None


def test_faults_that_do_not_pass_end_with_one_line(server, target, caplog):
    publish([("b1", kept_table(*range(5)))], **target)
    before = held(server, target)
    server.fail(f"{COMMIT}", status=503, times=10**6)
    try:
        with pytest.raises(PublishError, match="answers 503; nothing was published"):
            publish([("b2", kept_table(6, 7))], **{**target, "patience_s": 3.0})
    finally:
        server.heal()
    assert held(server, target) == before
    assert caplog.text.count("tried again for") == 1


def test_a_repository_name_that_is_none_is_refused(target):
    with pytest.raises(ConfigError, match="repo_id"):
        publish([("b1", kept_table(1))], **{**target, "repo_id": "no/such/name"})


def test_a_secret_reaches_neither_folder_nor_hub(server, target):
    told = [{"role": "user", "content": "ghp_" + "16C7e42F292c6912E7710c838347Ae178B4a"}]
    leaky = [("b2", kept_table(kept_row(9, state_messages_json=json.dumps(told))))]
    with pytest.raises(SecretFoundError):
        publish(leaky, **target)
    assert held(server, target) is None
    publish([("b1", kept_table(*range(5)))], **target)
    before = held(server, target)
    with pytest.raises(SecretFoundError):
        publish(leaky, **target)
    assert held(server, target) == before


def test_a_retracted_session_leaves_and_does_not_come_back(server, target):
    batches = [("b1", kept_table(*range(10))), ("b2", kept_table(*range(10, 20)))]
    publish(batches, **target)
    report = retract(session_ids=["session-3"], **target)
    assert report.commit
    n_left = 20 - sum(n % 7 == 3 for n in range(20))
    assert sum(report.rows_by_split["pairs"].values()) == n_left
    again = publish(batches, **target)
    assert again.commit is None
    assert sum(again.rows_by_split["pairs"].values()) == n_left
    manifests = file_contents(target["folder"], "manifests")
    assert not any(
        name_sha("session-3").encode() in data
        for path, data in manifests.items()
        if not path.endswith("_card.json")
    )


def test_a_session_is_retracted_from_batches_that_only_the_hub_has(server, target, tmp_path):
    for number in range(2):
        where = {**target, "folder": tmp_path / f"m{number}"}
        publish([(f"b{number}", kept_table(*range(number * 10, number * 10 + 10)))], **where)
    third = {**target, "folder": tmp_path / "third"}
    report = retract(session_ids=["session-3"], **third)
    n_left = 20 - sum(n % 7 == 3 for n in range(20))
    assert sum(report.rows_by_split["pairs"].values()) == n_left
    assert report.commit


def test_a_retracted_batch_can_be_erased_for_good(server, target):
    publish([("b1", kept_table(*range(10))), ("b2", kept_table(*range(10, 20)))], **target)
    old = held(server, target)["files"]
    retract(batches=["b2"], erase=True, **target)
    repository = held(server, target)
    assert len(repository["commits"]) == 1
    assert not any("/b2/" in path for path in repository["files"])
    gone = {sha for path, sha in old.items() if "/b2/" in path}
    from http.client import HTTPConnection
    from urllib.parse import urlsplit

    address = urlsplit(server.url)
    connection = HTTPConnection(address.hostname, address.port)
    connection.request(
        "GET",
        f"/api/datasets/{target['repo_id']}/lfs-files",
        headers={"Authorization": f"Bearer {server.token}"},
    )
    left = {row["fileOid"] for row in json.loads(connection.getresponse().read())}
    connection.close()
    assert not gone & left
    assert publish([("b2", kept_table(*range(10, 20)))], **target).commit is None


@pytest.mark.slow
def test_12_publishers_under_faults_publish_every_shard_once(server, target, tmp_path):
    for match, status, times, is_done in (
        (COMMIT, 409, 8, False),
        (COMMIT, 503, 4, False),
        (COMMIT, 504, 3, True),
        (COMMIT, 0, 2, True),
        ("GET .*/tree/", 500, 3, False),
    ):
        server.fail(match, status=status, times=times, is_done=is_done)
    ready = threading.Barrier(12)

    def work(number):
        ready.wait()
        rows = range(number * 10, number * 10 + 10)
        # They share one interpreter: what is patience enough for a machine is not for a 12th of one.
        where = {**target, "folder": tmp_path / f"machine-{number}" / "set", "patience_s": 300.0}
        return publish([(f"b{number:02}", kept_table(*rows))], **where)

    with ThreadPoolExecutor(12) as pool:
        reports = list(pool.map(work, range(12)))
    repository = held(server, target)
    expected = {
        path
        for number in range(12)
        for path in file_contents(tmp_path / f"machine-{number}" / "set", "")
        if path.startswith("data/") or path == f"manifests/b{number:02}.json"
    }
    assert expected <= set(repository["files"])
    assert {path for path in repository["files"] if path.startswith("data/")} == {
        path for path in expected if path.startswith("data/")
    }
    made = {report.commit for report in reports if report.commit}
    assert made <= {commit["sha"] for commit in repository["commits"][:-1]}
    assert len(repository["commits"]) == 13
    assert max(sum(r.rows_by_split["pairs"].values()) for r in reports) == 120
    where = {**target, "folder": tmp_path / "machine-5" / "set"}
    assert publish([("b05", kept_table(*range(50, 60)))], **where).commit is None


KILLED = """
import json, sys
from pathlib import Path
import os, signal
from replay_pipeline.publish import folder, publish, publisher
from tests.full_tables import full_table
rows, where, step = json.loads(sys.stdin.read()), json.loads(sys.argv[1]), sys.argv[2]
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
if step == "linking":
    folder._write = die
elif step == "swapping":
    folder._swap = die
elif step == "swapped":
    swap = folder._swap
    folder._swap = lambda *a: (swap(*a), die())
elif step == "committing":
    from replay_pipeline.publish import hub
    hub.HubDataset.commit = die
where["folder"] = Path(where["folder"])
publish([("b2", full_table(rows, "normalized_pairs"))], **where)
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", ["linking", "swapping", "swapped", "committing"])
def test_a_publisher_killed_at_any_point_leaves_a_whole_version(server, target, step, tmp_path):
    publish([("b1", kept_table(*range(5)))], **target)
    old, old_hub = file_contents(target["folder"], ""), held(server, target)
    publish([("b1", kept_table(*range(5))), ("b2", kept_table(6, 7))], folder=tmp_path / "expected")
    new = file_contents(tmp_path / "expected", "")
    import replay_pipeline

    where = {**target, "folder": str(target["folder"])}
    done = subprocess.run(
        forked([sys.executable, "-c", KILLED, json.dumps(where), step], "libraries"),
        input=json.dumps([kept_row(6), kept_row(7)]).encode(),
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("HF_")},
            **server.environment(),
            "PYTHONPATH": replay_pipeline.__path__[0].removesuffix("replay_pipeline"),
        },
        capture_output=True,
    )
    assert done.returncode == -9, done.stderr.decode()
    assert held(server, target) == old_hub
    assert file_contents(target["folder"], "") == (old if step in ("linking", "swapping") else new)
    publish([("b2", kept_table(6, 7))], **target)
    assert file_contents(target["folder"], "") == new
    assert data_paths(held(server, target)["files"]) == set(new)
    assert [
        path.name
        for path in tmp_path.iterdir()
        if path.name.startswith(".") and path.suffix != ".lock"
    ] == []

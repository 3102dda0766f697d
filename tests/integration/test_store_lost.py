"""An object store that goes away in the middle of a stage: one plain error, and nothing is lost."""

import os
import shutil
import signal

import pytest
from s3fs import S3FileSystem

from replay_pipeline.errors import StorageError
from replay_pipeline.stages.audit.tables import kept_or_dropped
from replay_pipeline.stages.pipeline import Pipeline
from tests.roots import PROJECT, run_batches, settings_at
from tests.support.commands import command
from tests.trainer.diloco.s3_server import HostileNetwork, MotoServer

pytestmark = pytest.mark.slow


class Outage(HostileNetwork):
    """The network to a store: down from a chosen request on, until it is mended."""

    def __init__(self, target):
        self.trigger, self.is_down = None, False
        super().__init__(target)

    def down_at(self, command, part):
        self.trigger, self.is_down = (command, part), False

    def mend(self):
        self.trigger, self.is_down = None, False

    def ends(self):
        """What else happens when it goes down."""

    def serve(self, request, body):
        if self.trigger and request.command == self.trigger[0] and self.trigger[1] in request.path:
            self.is_down = True
            self.ends()
        if self.is_down:
            request.close_connection = True
            return None
        return super().serve(request, body)


class EndOfServer(Outage):
    """The server itself is killed."""

    def ends(self):
        os.kill(self.target.process.pid, signal.SIGKILL)
        self.target.process.wait(60)


@pytest.fixture
def moto(tmp_path):
    server = MotoServer(tmp_path)
    yield server
    server.close()


def reached_through(network, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", network.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "not-checked")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-checked")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(S3FileSystem, "retries", 1)  # patience is the client's own business


@pytest.fixture
def network(moto, monkeypatch):
    network = Outage(moto)
    reached_through(network, monkeypatch)
    S3FileSystem.clear_instance_cache()  # clients remember the address that they began with
    yield network
    network.close()
    S3FileSystem.clear_instance_cache()


OUTAGES = {
    "find_batches": [("GET", "list-type"), ("PUT", "/batches/")],
    "ingest": [("GET", "/batches/"), ("HEAD", "/receipts/"), ("PUT", "/turns/")],
    "replay": [("GET", "/turns/"), ("PUT", "/teacher_actions/"), ("PUT", "/receipts/")],
    "pairs": [("GET", "/teacher_actions/"), ("PUT", "/dpo_pairs/"), ("PUT", "/outcomes/")],
    "normalize": [("GET", "/dpo_pairs/"), ("PUT", "/dropped_pairs/")],
    "publish": [
        ("GET", "/receipts/"),
        ("GET", "/normalized_pairs/"),
        ("PUT", ".parquet"),
        ("PUT", "000001.json"),
    ],
}
"""For each stage, at which request the store goes away: reading, writing, and in between."""


def test_a_stage_that_loses_its_store_says_so_and_can_be_run_again(network, tmp_path):
    settings = settings_at("s3://bucket/root", tmp_path / "home")
    batch = None
    for stage, outages in OUTAGES.items():
        arguments = () if stage in ("find_batches", "publish") else (batch,)
        for verb, part in outages:
            work = Pipeline(settings)
            network.down_at(verb, part)
            with pytest.raises(StorageError) as lost:
                getattr(work, stage)(*arguments)
            assert network.is_down, f"{stage} makes no {verb} of {part}"
            told = str(lost.value)
            assert told.startswith("s3://bucket/root/"), told
            assert "cannot be" in told
            assert "credentials, endpoint and region in the environment" in told
            network.mend()
        work = Pipeline(settings)
        done = getattr(work, stage)(*arguments)
        if stage == "find_batches":
            [batch] = work.batches()
        elif stage == "replay":
            assert done.report["n_sent"] == 0, "all was paid for before the store went away"
            assert done.report["n_cached"] > done.report["n_answers"] > 0
    assert Pipeline(settings).publish().is_reused
    network.down_at("GET", "/dropped_pairs/")
    with pytest.raises(StorageError):  # not: a table without rows
        kept_or_dropped(work.root, [batch])
    network.mend()
    (tmp_path / "here").mkdir()
    shutil.copy(tmp_path / "home" / "sample-ledger.sqlite", tmp_path / "here")
    whole = Pipeline(settings_at(tmp_path / "here", tmp_path / "here"))
    run_batches(whole)
    tables = ("sessions", "turns", "states", "teacher_actions", "dpo_pairs", "normalized_pairs")
    for table in tables:
        there = work.root.part(table, batch).read_bytes()
        assert there == whole.root.part(table, batch).read_bytes(), table


def test_the_end_of_the_server_is_told_without_a_trace(moto, monkeypatch, tmp_path):
    network = EndOfServer(moto)
    reached_through(network, monkeypatch)
    network.down_at("PUT", "/teacher_actions/")
    try:
        words = ("run", PROJECT, "--data", "s3://bucket/root", "--no-train", "--yes")
        home = {"REPLAY_HOME": str(tmp_path), "REPLAY_TEACHERS": "sample"}
        done = command(*words, cwd=tmp_path, **home)
    finally:
        network.close()
    assert network.is_down
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "s3://bucket/root/" in done.stderr
    assert "credentials, endpoint and region in the environment" in " ".join(done.stderr.split())

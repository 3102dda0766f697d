"""Every store keeps the five verbs' promises; the Hub and the clouds are servers on loopback."""

import os
import threading
import uuid

import huggingface_hub.constants
import numpy as np
import pytest

from tests.support.hub import HubServer
from tests.trainer.diloco.bucket_servers import GoogleStorage
from tests.trainer.diloco.in_threads import in_threads
from tests.trainer.diloco.s3_server import HostileNetwork
from trainer.diloco import (
    FileStore,
    MemoryStore,
    ObjectStoreAllReduce,
    OuterReplica,
    OuterSettings,
    open_store,
)
from trainer.errors import TrainerConfigError

# gcsfs would ask another of Google's services, over gRPC, which kind of bucket it has.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


@pytest.fixture(scope="module")
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture
def hub_store(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    repo = f"me/run-{uuid.uuid4().hex[:8]}"
    options = {"endpoint": hub.url, "token": hub.token}
    huggingface_hub.HfApi(**options).create_repo(repo, repo_type="dataset")
    return lambda: open_store(f"hf://datasets/{repo}/some/prefix", options=options)


@pytest.fixture
def google():
    server = GoogleStorage()
    yield server
    server.close()


def opened_on(server):
    return open_store("gs://bucket/run", options={"endpoint_url": server.url, "token": "anon"})


def on_s3(url, prefix, **more):
    keys = {"key": "x", "secret": "y", "client_kwargs": {"region_name": "us-east-1"}}
    return open_store(f"s3://bucket/{prefix}", options={"endpoint_url": url, **keys, **more})


@pytest.fixture(params=["memory", "file", "hub", "gs", "s3"])
def make(request, tmp_path):
    if request.param == "memory":
        store = MemoryStore()
        return lambda: store
    if request.param == "file":
        return lambda: FileStore(tmp_path)
    if request.param == "gs":
        server = request.getfixturevalue("google")
        return lambda: opened_on(server)
    if request.param == "s3":
        port, prefix = request.getfixturevalue("moto").port, uuid.uuid4().hex
        return lambda: on_s3(f"http://127.0.0.1:{port}", prefix)
    return request.getfixturevalue("hub_store")


def test_what_is_put_is_got_listed_and_deleted(make):
    store = make()
    assert store.keys("a/") == []
    store.put("a/b/1", b"one")
    store.put("a/c", b"old")
    store.put("a/c", b"new")
    reader = make()
    assert reader.get("a/b/1") == b"one"
    assert reader.get("a/c") == b"new"
    assert reader.get("a/d") is None
    assert reader.keys("a/") == ["a/b/1", "a/c"]
    assert reader.keys("a/b/") == ["a/b/1"]
    store.delete(["a/c", "a/never"])
    assert reader.keys("a/") == ["a/b/1"]


def test_only_the_first_creates(make):
    data = b"first"
    assert make().put_if_absent("m", data)
    assert not make().put_if_absent("m", data)
    assert not make().put_if_absent("m", b"second")
    assert make().get("m") == data


def test_of_racing_creators_one_wins(make):
    won, barrier = [], threading.Barrier(4)

    def create(index):
        store = make()
        barrier.wait()
        if store.put_if_absent("m", str(index).encode()):
            won.append(index)

    in_threads(create, 4)
    assert len(won) == 1
    assert make().get("m") == str(won[0]).encode()


def test_what_another_client_wrote_is_seen_at_once(make):
    reader, writer = make(), make()
    assert reader.keys("d/") == []
    assert reader.get("d/1") is None
    writer.put("d/1", b"x")
    assert reader.keys("d/") == ["d/1"]
    assert reader.get("d/1") == b"x"


# What huggingface_hub 2.4 says to its own HTTP client when it uploads a file.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_two_replicas_over_repositories_of_the_hub(hub_store):
    assert len(set(final_bases(hub_store))) == 1


@pytest.mark.slow
def test_two_replicas_over_a_bucket(google):
    assert len(set(final_bases(lambda: opened_on(google)))) == 1


@pytest.mark.slow
def test_faults_of_the_network_never_change_the_result(moto):
    store, network = MemoryStore(), HostileNetwork(moto, seed=1, odds=0.12)
    once = {"retries": {"max_attempts": 1}, "read_timeout": 10}
    sizes = {"n_replicas": 3, "n_rounds": 6}
    wanted = final_bases(lambda: store, **sizes)
    try:
        got = final_bases(lambda: on_s3(network.url, "run", config_kwargs=once), **sizes)
    finally:
        network.close()
    assert set(got) == set(wanted)
    assert len(set(wanted)) == 1
    for kind in ("refused", "slow", "lost answer", "cut upload", "cut answer", "stale list"):
        assert network.counts[kind] > 0, network.counts


def final_bases(make, *, n_replicas=2, n_rounds=2):
    """Train replicas to the end; return the hashes of their states."""
    settings = OuterSettings(
        codec="ternary", n_rounds=n_rounds, quorum=n_replicas, snapshot_every=2, timeout_s=120
    )
    bases, n = [], 3000

    def one(rank):
        replica = OuterReplica(
            make(), np.zeros(n), rank=rank, world_size=n_replicas, settings=settings
        )
        replica.join()
        while not replica.is_finished:
            noise = np.random.default_rng(99 * rank + replica.round_id).standard_normal(n)
            replica.exchange(replica.theta + noise.astype(np.float32))
        bases.append(replica.base)

    in_threads(one, n_replicas)
    assert len(bases) == n_replicas
    return bases


def test_a_bucket_that_ignores_the_condition_is_refused(google):
    google.is_forgetful = True
    settings = OuterSettings(codec="fp32", quorum=1)
    replica = OuterReplica(opened_on(google), np.zeros(4), rank=0, world_size=2, settings=settings)
    with pytest.raises(TrainerConfigError, match="overwrites"):
        replica.join()
    reduce = ObjectStoreAllReduce("", 0, 2, quorum=1, store=opened_on(google), first_grace_s=0.01)
    with pytest.raises(TrainerConfigError, match="overwrites"):
        reduce.reduce_vector(np.zeros(4, np.float32))


def test_unfinished_writes_are_invisible(tmp_path):
    store = FileStore(tmp_path)
    store.put("a/1", b"whole")
    (tmp_path / "a" / ".aside-123").write_bytes(b"half")
    assert store.keys("a/") == ["a/1"]


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("http://host/path", "no conditional create"),
        ("hf://buckets/me/run", "no conditional write"),
        ("hf://datasets/me", "expected hf://datasets"),
    ],
)
def test_stores_that_cannot_settle_a_race_are_refused(uri, why):
    with pytest.raises(TrainerConfigError, match=why):
        open_store(uri)

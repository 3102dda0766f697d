"""Every store keeps the five verbs' promises; the Hub is a server on loopback."""

import threading
import uuid

import huggingface_hub.constants
import numpy as np
import pytest

from replay_pipeline.testing.hub import HubServer
from trainer.diloco import FileStore, MemoryStore, OuterReplica, OuterSettings, open_store
from trainer.diloco.object_store import FsspecStore
from trainer.errors import ObjectStoreError, TrainerConfigError


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


@pytest.fixture(params=["memory", "file", "hub"])
def make(request, tmp_path):
    if request.param == "memory":
        store = MemoryStore()
        return lambda: store
    if request.param == "file":
        return lambda: FileStore(tmp_path)
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
    assert make().put_if_absent("m", b"first")
    assert not make().put_if_absent("m", b"second")
    assert make().get("m") == b"first"


def test_of_racing_creators_one_wins(make):
    won, barrier = [], threading.Barrier(4)

    def create(index):
        store = make()
        barrier.wait()
        if store.put_if_absent("m", str(index).encode()):
            won.append(index)

    threads = [threading.Thread(target=create, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert make().get("m") == str(won[0]).encode()


# What huggingface_hub 2.4 says to its own HTTP client when it uploads a file.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_two_replicas_over_repositories_of_the_hub(hub_store):
    settings = OuterSettings(codec="int8", n_rounds=2, quorum=2, timeout_s=60)
    bases = []

    def one(rank):
        replica = OuterReplica(
            hub_store(), np.zeros(50), rank=rank, world_size=2, settings=settings
        )
        replica.join()
        while not replica.is_finished:
            replica.exchange(replica.theta - rank - 1)
        bases.append(replica.base)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(bases) == 2
    assert len(set(bases)) == 1


def test_unfinished_writes_are_invisible(tmp_path):
    store = FileStore(tmp_path)
    store.put("a/1", b"whole")
    (tmp_path / "a" / ".aside-123").write_bytes(b"half")
    assert store.keys("a/") == ["a/1"]


def test_a_folder_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ObjectStoreError, match="cannot write"):
        FileStore(tmp_path).put("file/below", b"")


def test_listing_caches_are_off():
    store = FsspecStore("memory://anywhere")
    assert store._files.storage_options["use_listings_cache"] is False


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

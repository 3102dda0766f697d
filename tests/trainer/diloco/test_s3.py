"""The object store over S3: real client, real server, hostile network."""

import numpy as np
import pytest

from tests.trainer.diloco.in_threads import in_threads
from tests.trainer.diloco.s3_server import HostileNetwork, MotoServer
from trainer.diloco import (
    MemoryStore,
    OuterReplica,
    OuterSettings,
    open_store,
)

pytestmark = pytest.mark.slow

N = 3000


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = MotoServer(tmp_path_factory.mktemp("s3"))
    yield server
    server.close()


@pytest.fixture
def network(server, request):
    network = HostileNetwork(server, seed=1, odds=getattr(request, "param", 0.0))
    yield network
    network.close()


def opened(network, prefix):
    return open_store(
        f"s3://bucket/{prefix}",
        options={
            "endpoint_url": network.url,
            "key": "x",
            "secret": "y",
            "client_kwargs": {"region_name": "us-east-1"},
            "config_kwargs": {"retries": {"max_attempts": 1}, "read_timeout": 10},
        },
    )


def final_bases(stores):
    bases = []
    settings = OuterSettings(codec="ternary", n_rounds=6, quorum=3, snapshot_every=2, timeout_s=120)

    def one(rank):
        replica = OuterReplica(
            stores[rank], np.zeros(N), rank=rank, world_size=3, settings=settings
        )
        replica.join()
        while not replica.is_finished:
            noise = np.random.default_rng(99 * rank + replica.round_id).standard_normal(N)
            replica.exchange(replica.theta + noise.astype(np.float32))
        bases.append(replica.base)

    in_threads(one, 3)
    return bases


@pytest.mark.slow
@pytest.mark.parametrize("network", [0.12], indirect=True)
def test_faults_of_the_network_never_change_the_result(network):
    wanted = final_bases([MemoryStore()] * 3)
    got = final_bases([opened(network, "run") for _ in range(3)])
    assert set(got) == set(wanted)
    assert len(set(wanted)) == 1
    for kind in ("refused", "slow", "lost answer", "cut upload", "cut answer", "stale list"):
        assert network.counts[kind] > 0, network.counts

"""torchft's DiLoCo behind guards: against its own lighthouse, and over the object store."""

import copy
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer.diloco import (
    MemoryStore,
    MockManager,
    ObjectStoreAllReduce,
    ObjectStoreManager,
    OuterStep,
    make_diloco_outer_loop,
)
from trainer.errors import TrainerConfigError

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[3]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def data():
    dice = torch.Generator().manual_seed(1)
    return torch.randn(64, 4, generator=dice), torch.randn(64, 2, generator=dice)


def steps(model, optimizer, part, n):
    x, y = data()
    for _ in range(n):
        loss = nn.functional.mse_loss(model(x[part]), y[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def values(loop):
    return [v.clone() for f in loop._fragments for v in f.original_parameters.values()]


def test_one_inner_sgd_step_per_round_equals_data_parallel_sgd():
    """H = 1, inner SGD, outer rate 1: the mean of the steps is the step of the mean gradient."""
    store, models = MemoryStore(), [net() for _ in range(4)]

    def one(rank):
        model = models[rank]
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        manager = ObjectStoreManager(ObjectStoreAllReduce("", rank, 4, store=store))
        with make_diloco_outer_loop(
            model, inner, manager=manager, sync_every=1, outer=OuterStep(1.0, 0.0, nesterov=False)
        ):
            steps(model, inner, slice(rank * 16, rank * 16 + 16), 10)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    parallel = net()
    steps(parallel, torch.optim.SGD(parallel.parameters(), lr=0.1), slice(None), 10)
    for rank in range(4):
        for ours, theirs in zip(models[rank].parameters(), parallel.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_momentum_step_equals_the_one_computed_by_hand():
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = copy.deepcopy(model)
    steps(reference, torch.optim.SGD(reference.parameters(), lr=0.1), slice(None), 3)
    with make_diloco_outer_loop(
        model, inner, manager=MockManager(), sync_every=3, outer=OuterStep(0.7, 0.9)
    ):
        steps(model, inner, slice(None), 3)
    for new, old, local in zip(model.parameters(), before, reference.parameters(), strict=True):
        delta = old - local.detach()
        torch.testing.assert_close(new.detach(), old - 0.7 * (delta + 0.9 * delta))


def test_a_round_that_is_not_committed_resets_to_its_start():
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = MockManager(failing_steps=[0])
    with make_diloco_outer_loop(model, inner, manager=manager, sync_every=2):
        steps(model, inner, slice(None), 2)
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        steps(model, inner, slice(None), 2)
    assert manager.current_step() == 1


@pytest.mark.parametrize(("n_fragments", "delay"), [(1, 0), (2, 0), (2, 1)])
def test_fragments_over_the_object_store_stay_equal_and_a_joiner_needs_no_donor(n_fragments, delay):
    store, done, models = MemoryStore(), {}, [net() for _ in range(3)]

    def loop_of(rank, model, inner):
        collective = ObjectStoreAllReduce("", rank, 2, store=store, codec="int8")
        manager = ObjectStoreManager(collective, snapshot_every=2)
        modules = model if n_fragments == 1 else [model[0], model[2]]
        return make_diloco_outer_loop(
            modules, inner, manager=manager, sync_every=4, fragment_sync_delay=delay
        )

    def one(rank):
        model = models[rank]
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        with loop_of(rank, model, inner) as loop:
            steps(model, inner, slice(rank * 32, rank * 32 + 32), 20)
        done[rank] = values(loop)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model = models[2]
    joiner = loop_of(0, model, torch.optim.SGD(model.parameters(), lr=0.05))
    assert joiner._manager.current_step() == 5 * n_fragments
    for a, b, c in zip(done[0], done[1], values(joiner), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_other_initial_weights_are_refused():
    store = MemoryStore()
    models = [net(), net()]
    with torch.no_grad():
        models[1][0].bias += 1

    def start(rank):
        inner = torch.optim.SGD(models[rank].parameters(), lr=0.1)
        manager = ObjectStoreManager(ObjectStoreAllReduce("", rank, 2, store=store))
        make_diloco_outer_loop(models[rank], inner, manager=manager, sync_every=2)

    start(0)
    with pytest.raises(TrainerConfigError, match="other weights"):
        start(1)


def test_fragments_do_not_feel_each_others_outer_step():
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_diloco_outer_loop(
        [model[0], model[2]], inner, manager=MockManager(), sync_every=4
    ) as loop:
        steps(model, inner, slice(None), 1)
        second = [p.detach().clone() for p in model[2].parameters()]
        x, y = data()
        nn.functional.mse_loss(model(x), y).backward()
        gradients = [p.grad.clone() for p in model[2].parameters()]
        inner.step()
    assert loop._manager.current_step() == 1
    for p, before, gradient in zip(model[2].parameters(), second, gradients, strict=True):
        moved = before - p.detach()
        assert moved.abs().max() <= 0.1 * gradient.abs().max() * 2.001


def test_frozen_parameters_are_not_sent():
    model = net()
    model[0].requires_grad_(False)
    sent = []
    manager = MockManager(lambda flat: sent.append(flat.numel()) or flat)
    inner = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with make_diloco_outer_loop(model, inner, manager=manager, sync_every=1):
        steps(model, inner, slice(None), 1)
    assert sent == [8 * 2 + 2]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"bucket_cap_mb": 1e-5}, "leave out tensors"),
        ({"should_quantize": True}, "triton"),
        ({"fragment_sync_delay": 4}, "fragment_sync_delay"),
        ({"sync_every": 0}, "sync_every"),
    ],
)
def test_settings_that_give_wrong_results_in_silence_are_errors(options, why):
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TrainerConfigError, match=why):
        make_diloco_outer_loop(
            model, inner, **{"manager": MockManager(), "sync_every": 4, **options}
        )


def test_half_precision_parameters_are_refused():
    model = net().to(torch.bfloat16)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TrainerConfigError, match="rounded away"):
        make_diloco_outer_loop(model, inner, manager=MockManager(), sync_every=4)


def test_one_whole_bucket_is_fine():
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = MockManager(lambda flat: flat * 0.5)
    before = [p.detach().clone() for p in model.parameters()]
    reference = copy.deepcopy(model)
    steps(reference, torch.optim.SGD(reference.parameters(), lr=0.1), slice(None), 2)
    with make_diloco_outer_loop(
        model, inner, manager=manager, sync_every=2, outer=OuterStep(1.0, 0.0, nesterov=False),
        bucket_cap_mb=1,
    ):  # fmt: skip
        steps(model, inner, slice(None), 2)
    for new, old, local in zip(model.parameters(), before, reference.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), old - 0.5 * (old - local.detach()))


def rows(path):
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


@pytest.mark.slow
def test_torchfts_lighthouse_and_a_replica_that_is_killed_and_rejoins(tmp_path):
    def popen(name, argv):
        with (tmp_path / name).open("ab") as log:
            return subprocess.Popen(
                argv, stdout=log, stderr=subprocess.STDOUT, cwd=REPO,
                env={**os.environ, "PYTHONPATH": str(REPO)},
            )  # fmt: skip

    binary = Path(sys.executable).with_name("torchft_lighthouse")
    lighthouse = popen(
        "lighthouse",
        [binary, "--bind", "127.0.0.1:0", "--min_replicas", "2", "--join_timeout_ms", "1000",
         "--quorum_tick_ms", "20", "--heartbeat_timeout_ms", "1000"],
    )  # fmt: skip
    processes = [lighthouse]

    def until(condition, *alive):
        deadline = time.monotonic() + 90
        while not (found := condition()):
            assert time.monotonic() < deadline, (tmp_path / "replica-0").read_text()[-3000:]
            for process in alive:
                assert process.poll() is None
            threading.Event().wait(0.02)
        return found

    def address():
        found = re.search(r"127\.0\.0\.1:(\d+)|:(\d{4,5})\b", (tmp_path / "lighthouse").read_text())
        return found and f"http://127.0.0.1:{found[1] or found[2]}"

    try:
        url = until(address, lighthouse)
        logs = [tmp_path / f"rank-{rank}" for rank in range(2)]

        def start(rank):
            script = str(Path(__file__).with_name("torchft_replica.py"))
            argv = [sys.executable, script, url, str(rank), "400", str(logs[rank])]
            processes.append(popen(f"replica-{rank}", argv))
            return processes[-1]

        first, second = start(0), start(1)
        until(lambda: len(rows(logs[1])) > 20, first, second)
        second.kill()
        second.wait()
        n_before = len(rows(logs[1]))
        again = start(1)
        until(lambda: first.poll() == 0 and again.poll() == 0)
        assert len(rows(logs[1])) > n_before
        hashes = [{row["step"]: row["hash"] for row in rows(log)} for log in logs]
        common = hashes[0].keys() & hashes[1].keys()
        assert max(common) == 400
        assert all(hashes[0][step] == hashes[1][step] for step in common)
        assert rows(logs[0])[-1]["loss"] < 0.3 * rows(logs[0])[0]["loss"]
    finally:
        for process in processes:
            process.kill()
            process.wait()

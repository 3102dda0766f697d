"""torchft's DiLoCo behind guards, over the object store."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.trainer.diloco.in_threads import in_threads
from tests.trainer.programs import SMALL, Program, words_of
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

    in_threads(one, 4)
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


def test_replicas_over_the_object_store_stay_equal_and_a_joiner_needs_no_donor():
    store, done, models = MemoryStore(), {}, [net() for _ in range(3)]

    def loop_of(rank, model, inner):
        collective = ObjectStoreAllReduce("", rank, 2, store=store, codec="ternary")
        manager = ObjectStoreManager(collective, snapshot_every=2)
        return make_diloco_outer_loop(model, inner, manager=manager, sync_every=4)

    def one(rank):
        model = models[rank]
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        with loop_of(rank, model, inner) as loop:
            steps(model, inner, slice(rank * 32, rank * 32 + 32), 20)
        done[rank] = values(loop)

    in_threads(one, 2)
    model = models[2]
    joiner = loop_of(0, model, torch.optim.SGD(model.parameters(), lr=0.05))
    assert joiner._manager.current_step() == 5
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


def test_buckets_in_which_torchft_loses_tensors_are_refused(monkeypatch):
    monkeypatch.setenv("TORCHFT_USE_BUCKETIZATION", "True")
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TrainerConfigError, match="TORCHFT_USE_BUCKETIZATION"):
        make_diloco_outer_loop(model, inner, manager=MockManager(), sync_every=4)


def test_two_trainers_under_torchft_end_with_the_same_weights(dataset_folder, tmp_path):
    settings = [
        *(f"dataset={dataset_folder}", *SMALL, "tiny.pretraining_steps=2", "trl.max_steps=4"),
        *("evaluation.max_pairs=1", "evaluation.max_prompts=0", "trl.max_completion_length=16"),
        *("outer=torchft", f"outer_options.uri=file://{tmp_path}/store"),
        *("outer_options.sync_every=2", "outer_options.quorum=2"),
    ]
    replicas = [
        Program(
            *("-m", "trainer", *words_of(*settings, f"output={tmp_path}/{rank}")),
            errors=tmp_path / f"errors-{rank}", REPLICA_RANK=str(rank), REPLICA_COUNT="2",
        )
        for rank in range(2)
    ]  # fmt: skip
    for replica in replicas:
        status, errors = replica.ended(400)
        assert status == 0, errors[-3000:]
    first, second = (
        load_file(tmp_path / str(rank) / "checkpoint" / "model.safetensors") for rank in range(2)
    )
    for name, value in first.items():
        assert torch.equal(value, second[name]), name

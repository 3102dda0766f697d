"""The outer loop's settings and shards, parameters as a vector, and state as tensors."""

import numpy as np
import pytest
import torch
from torch import nn

from trainer.diloco import ParameterVector
from trainer.diloco.callback import OuterOptions, outer_callbacks, shard
from trainer.diloco.environment import ReplicaPlace
from trainer.diloco.parameters import state_of_tensors, tensors_of_state, trainable_part
from trainer.errors import TrainerConfigError


def language_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 20))


def a_step(model, optimizer):
    tokens = torch.arange(20)
    loss = nn.functional.cross_entropy(model(tokens), tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_optimizer_state_moves_to_another_process_and_goes_on_equally():
    first, second = language_model(), language_model()
    one = torch.optim.AdamW(first.parameters(), lr=1e-2)
    for _ in range(5):
        a_step(first, one)
    second.load_state_dict(first.state_dict())
    other = torch.optim.AdamW(second.parameters(), lr=1e-2)
    other.load_state_dict(state_of_tensors(tensors_of_state(one.state_dict())))
    for _ in range(3):
        assert a_step(first, one) == a_step(second, other)


def test_parameters_go_out_and_in_and_frozen_ones_stay():
    model = language_model()
    model[0].requires_grad_(False)
    view = ParameterVector(model)
    assert view.n == sum(p.numel() for p in model.parameters() if p.requires_grad)
    before = view.read()
    view.write(before + 1)
    np.testing.assert_array_equal(view.read(), before + 1)
    assert trainable_part(model).get_parameter("1_weight") is model[1].weight
    other = language_model()
    assert ParameterVector(other).signature != view.signature


def test_shards_are_disjoint_and_whole():
    rows = list(range(10))
    shards = [shard(rows, ReplicaPlace(rank, 3)) for rank in range(3)]
    assert sorted(row for part in shards for row in part) == rows
    with pytest.raises(TrainerConfigError, match="too few"):
        shard([1], ReplicaPlace(0, 3))


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("ring", {}, "is not one of"),
        ("object_store", {}, "needs outer_options.uri"),
        ("torchft", {}, "needs outer_options.uri"),
        ("object_store", {"uri": "memory://x", "sync_every": 0}, "at least 1"),
        ("object_store", {"uri": "memory://x", "rounds": "sometimes"}, "rounds='sometimes'"),
        ("object_store", {"uri": "memory://x", "codec": "zip"}, "codec 'zip' is unknown"),
        ("object_store", {"uri": "memory://x", "optimizer": "adam"}, "outer preset 'adam'"),
    ],
)
def test_wrong_settings_of_the_outer_loop_are_named(kind, options, why):
    with pytest.raises(TrainerConfigError, match=why):
        outer_callbacks(kind, OuterOptions(**options), place=ReplicaPlace())


@pytest.mark.parametrize(
    ("n", "optimizer", "rounds", "expected"),
    [
        (2, "average", "auto", "asynchronous"),
        (2, "nesterov", "auto", "synchronous"),
        (2, "average", "synchronous", "synchronous"),
        (1, "average", "auto", "synchronous"),
    ],
)
def test_rounds_are_asynchronous_where_there_are_several_replicas(
    n, optimizer, rounds, expected, caplog
):
    options = OuterOptions(uri="file:///tmp/run", optimizer=optimizer, rounds=rounds)
    (loop,) = outer_callbacks("object_store", options, place=ReplicaPlace(0, n))
    assert loop.options.rounds == expected
    is_said = rounds == "auto" and n > 1
    assert (expected in caplog.text) == is_said, "the log says what was chosen, and why"

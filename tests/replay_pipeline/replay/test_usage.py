"""What a reply's usage block means, by the shapes that providers send."""

import json
from pathlib import Path

import pytest

from replay_pipeline.replay.dialects.prices import NANO, Price
from replay_pipeline.replay.dialects.usage import read_usage

SHAPES = json.loads((Path(__file__).parents[2] / "data" / "usage_replies.json").read_text("utf-8"))
USD_PER_TOKEN = {"fresh": 3e-6, "read": 0.3e-6, "written": 3.75e-6, "out": 15e-6}
PRICE = Price.of(
    {
        "prompt": USD_PER_TOKEN["fresh"],
        "completion": USD_PER_TOKEN["out"],
        "input_cache_read": USD_PER_TOKEN["read"],
        "input_cache_write": USD_PER_TOKEN["written"],
    }
)


def true_bill(shape: dict) -> float:
    if "bill_usd" in shape:
        return shape["bill_usd"]
    tokens = sum(n * USD_PER_TOKEN[kind] for kind, n in shape["tokens"].items())
    return tokens + shape["reply"].get("fee_of_test", 0.0)


def booked(shape: dict) -> float:
    usage = read_usage(shape["reply"], shape.get("headers", {}))
    if usage.cost_nano is not None:
        return usage.cost_nano / NANO
    cost = PRICE.cost_nano(
        usage.n_prompt_tokens,
        usage.n_completion_tokens,
        n_cached_tokens=usage.n_cached_tokens or 0,
        n_written_tokens=usage.n_written_tokens or 0,
    )
    return (cost + usage.fee_nano) / NANO


@pytest.mark.parametrize("shape", SHAPES, ids=[shape["name"] for shape in SHAPES])
def test_a_call_is_booked_at_its_bill(shape):
    bill = true_bill(shape)
    assert booked(shape) >= bill - 1e-9
    if shape.get("says_enough", True):
        assert booked(shape) <= 1.0001 * bill + 1e-9


def test_only_counts_that_contradict_each_other_are_flagged():
    flagged = [
        shape["name"]
        for shape in SHAPES
        if read_usage(shape["reply"], shape.get("headers", {})).problem
    ]
    assert flagged == [shape["name"] for shape in SHAPES if not shape.get("says_enough", True)]


def test_there_are_as_many_shapes_as_providers_have():
    assert len(SHAPES) >= 40

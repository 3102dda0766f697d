"""A ceiling holds against the true bill, whatever form a provider gives its usage."""

import asyncio
import json
import threading

import pytest

from replay_pipeline.replay import ledger_status, replay_states
from tests.replay_pipeline.replay.conftest import QUICK, make_states
from tests.support.odd_server import OddServer

USD = {"prompt": 1e-6, "completion": 2e-6, "input_cache_read": 0.1e-6, "input_cache_write": 1.25e-6}
CEILING_USD = 0.15


def xai(prompt, words, thought, cached):
    return {
        "prompt_tokens": prompt,
        "completion_tokens": words,
        "total_tokens": prompt + words + thought,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


def gemini(prompt, words, thought, cached):
    return {
        "prompt_tokens": prompt,
        "completion_tokens": words,
        "total_tokens": prompt + words + thought,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def openai(prompt, words, thought, cached):
    return {
        "prompt_tokens": prompt,
        "completion_tokens": words + thought,
        "total_tokens": prompt + words + thought,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


def deepseek(prompt, words, thought, cached):
    return {
        "prompt_tokens": prompt,
        "completion_tokens": words + thought,
        "total_tokens": prompt + words + thought,
        "prompt_cache_hit_tokens": cached,
        "prompt_cache_miss_tokens": prompt - cached,
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


def moonshot(prompt, words, thought, cached):
    return {
        "prompt_tokens": prompt,
        "completion_tokens": words + thought,
        "total_tokens": prompt + words + thought,
        "cached_tokens": cached,
    }


@pytest.mark.parametrize("form", [xai, gemini, openai, deepseek, moonshot])
def test_the_true_bill_stays_below_the_ceiling_and_is_what_is_booked(form, tmp_path):
    bill, lock = [0.0], threading.Lock()

    async def reply(number, body):
        await asyncio.sleep(0.05)  # as many as may are on the way at once
        prompt = len(body) // 4
        cached = prompt // 2 if number % 2 else 0
        words, thought = 20, 1500 + 37 * (number % 11)
        with lock:
            bill[0] += (
                (prompt - cached) * USD["prompt"]
                + cached * USD["input_cache_read"]
                + (words + thought) * USD["completion"]
            )
        message = {"content": "I would read the tests first."}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return (
            200,
            {},
            json.dumps(
                {"choices": [choice], "usage": form(prompt, words, thought, cached)}
            ).encode(),
        )

    ledger = tmp_path / "ledger.sqlite"
    with OddServer(reply) as server:
        report = asyncio.run(
            replay_states(
                make_states(80, n_sessions=80),
                [server.teacher(price=USD, params={"max_completion_tokens": 1000})],
                max_total_usd=CEILING_USD,
                ledger=ledger,
                retry=QUICK,
                is_durable=False,
            )
        )
    booked = ledger_status(ledger).spent_usd
    assert report.stop_reason != "completed"
    assert bill[0] <= CEILING_USD
    assert bill[0] - 1e-9 <= booked <= 1.05 * bill[0]

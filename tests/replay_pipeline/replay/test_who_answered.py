"""A vote belongs to the model that answered, and an answer is what that model meant."""

import asyncio
import json
import random
import sqlite3
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest

from replay_pipeline.replay import replay_states
from tests.replay_pipeline.replay.conftest import QUICK, make_states
from tests.replay_pipeline.replay.test_written_calls import FORMS, MARKUP
from tests.support.odd_server import OddServer
from tests.support.votes import extract_pairs

READ = {
    "type": "function",
    "function": {
        "name": "Read",
        "parameters": {
            "type": "object",
            "properties": {"file_path": {"type": "string"}},
            "required": ["file_path"],
        },
    },
}
BOTH = {"first": "qwen/qwen3-coder", "second": "z-ai/glm-4.6"}


def states_with_tools(n):
    return [
        {
            **state,
            "tools": [READ],
            "student_model": "claude-opus-4-5",
            "messages": [
                *state["messages"],
                {"role": "user", "content": "Read src/a.py first, then src/b.py."},
            ],
            "student_action": {"role": "assistant", **call_of("src/b.py")},
        }
        for state in make_states(n, n_sessions=n)
    ]


def answer(model, message):
    usage = {"prompt_tokens": 60, "completion_tokens": 20, "total_tokens": 80}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return 200, {}, json.dumps({"model": model, "choices": [choice], "usage": usage}).encode()


def call_of(path):
    function = {"name": "Read", "arguments": json.dumps({"file_path": path})}
    return {"tool_calls": [{"id": "c", "type": "function", "function": function}]}


def run(server, states, ledger, models=BOTH):
    return asyncio.run(
        replay_states(
            states,
            [server.teacher(name=name, model=model) for name, model in models.items()],
            max_total_usd=1.0,
            ledger=ledger,
            retry=QUICK,
            is_durable=False,
        )
    )


def test_a_model_that_a_gateway_falls_back_to_is_one_voter_and_said_so(tmp_path):
    n_asked = Counter()

    def reply(number, body):
        asked = json.loads(body)["model"]
        n_asked[asked] += 1
        is_right = n_asked[asked] <= 5
        return answer(asked if is_right else "deepseek/deepseek-v4", call_of("src/a.py"))

    states = states_with_tools(40)
    with OddServer(reply) as server:
        report = run(server, states, tmp_path / "ledger.sqlite")
        again = run(server, states, tmp_path / "ledger.sqlite")
    pairs = extract_pairs(states, report.actions, 2).pairs
    votes = {row.state_id: set() for row in report.actions}
    for row in report.actions:
        votes[row.state_id].add(row.model)
    assert {pair["state_id"] for pair in pairs} == {
        state_id for state_id, models in votes.items() if len(models) == 2
    }
    others = report.answered_by_others
    assert {name: [*models] for name, models in others.items()} == {
        name: ["deepseek/deepseek-v4"] for name in BOTH
    }
    assert sum(n for models in others.values() for n in models.values()) == 70
    assert again.answered_by_others == others
    assert len(server.bodies) == 80


@pytest.mark.parametrize("rate", [0.05, 0.3, 1.0])
def test_calls_in_the_text_vote_as_calls_and_no_markup_leaves_the_answers(rate, tmp_path):
    rng = random.Random(rate)
    names = sorted(FORMS)
    n_leaked = [0, 0]

    def reply(number, body):
        asked = json.loads(body)["model"]
        if rng.random() >= rate:
            return answer(asked, call_of("src/a.py"))
        text = FORMS[names[number % len(names)]]([("Read", {"file_path": "src/a.py"})])
        if is_cut := rng.random() < 0.2 and number % len(names) > 1:
            text = text[: len(text) - 24]
        n_leaked[is_cut] += 1
        return answer(asked, {"content": text})

    states = states_with_tools(60)
    with OddServer(reply) as server:
        report = run(server, states, tmp_path / "ledger.sqlite")
    found = extract_pairs(states, report.actions, 2)
    malformed = [row for row in report.actions if row.error_code]
    assert {row.error_code for row in malformed} <= {"malformed_call"}
    assert len(malformed) <= n_leaked[True]
    recovered = [row for row in report.actions if row.error_code is None]
    assert all("tool_calls" in row.action for row in recovered)
    assert len(recovered) >= 0.95 * (120 - n_leaked[True])
    shown = [pair[side] for pair in found.pairs for side in ("chosen", "rejected")]
    assert found.pairs
    assert not any(MARKUP.search(text) for text in shown)
    assert {pair["chosen"] for pair in found.pairs} == {'Read {"file_path":"src/a.py"}'}


def test_a_teacher_that_mostly_writes_calls_nobody_can_read_is_stopped(tmp_path):
    def reply(number, body):
        return answer(
            json.loads(body)["model"], {"content": "<tool_call>\n<function=Read>\n<param"}
        )

    with OddServer(reply) as server:
        report = run(server, states_with_tools(60), tmp_path / "l.sqlite", {"t": "qwen/qwen3"})
    assert report.stop_reason == "teacher_stopped"
    assert "10 of 10 answers hold calls that can't be read" in report.stopped_teachers["t"]
    assert len(server.bodies) < 60  # those on the way are read
    assert {row.error_code for row in report.actions if row.action} == {"malformed_call"}


def test_twenty_lost_calls_in_a_row_stop_a_teacher(tmp_path):
    with OddServer(
        lambda number, _: None if number else answer("qwen/qwen3", call_of("a"))
    ) as server:
        report = run(server, states_with_tools(80), tmp_path / "l.sqlite", {"t": "qwen/qwen3"})
    assert "20 calls in a row came to nothing" in report.stopped_teachers["t"]
    assert len(server.bodies) < 60


def test_a_limit_of_the_day_is_read_said_and_known_to_later_runs(tmp_path):
    at = datetime.now(UTC) + timedelta(hours=3)
    told = {"code": 429, "message": "Rate limit exceeded: free-models-per-day", "metadata": {
        "headers": {"X-RateLimit-Limit": "50", "X-RateLimit-Remaining": "0",
                    "X-RateLimit-Reset": str(int(at.timestamp() * 1000))}}}  # fmt: skip
    reply = 429, {}, json.dumps({"error": told}).encode()
    ledger, states = tmp_path / "l.sqlite", states_with_tools(60)
    with OddServer(lambda *_: reply) as server:
        report = run(server, states, ledger, {"t": "qwen/qwen3"})
        n_sent = len(server.bodies)
        later = run(server, states, ledger, {"t": "qwen/qwen3"})
        assert len(server.bodies) == n_sent <= 3, "nobody asks before the limit is lifted"
        with closing(sqlite3.connect(ledger)) as database, database:
            database.execute(
                "update ledger set value = '2026-01-01T00:00:00.000+00:00 x' where key like 'pause:%'"
            )
        run(server, states, ledger, {"t": "qwen/qwen3"})
        assert len(server.bodies) > n_sent, "and then it goes on"
    assert report.stop_reason == later.stop_reason == "teacher_stopped"
    assert f"it goes on at {at.astimezone():%H:%M}" in report.stopped_teachers["t"]
    assert later.stopped_teachers == report.stopped_teachers

"""Mutates recorded replies and asks for them among good ones; says what became of each shape.

python -m tests.support.fuzz_replies --examples 100      # 100 times 100 replies
"""

import argparse
import asyncio
import copy
import json
import logging
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from replay_pipeline.replay import RetryPolicy, ledger_status, replay_states
from replay_pipeline.replay.money.calls import decode_row, encode_row
from tests.support.odd_server import OddServer

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "Bash", "arguments": '{"command": "ls"}'},
}
USAGE = {
    "prompt_tokens": 12, "completion_tokens": 7, "total_tokens": 19, "cost": 0.000123,
    "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 2}, "is_byok": False,
}  # fmt: skip
RECORDED = [
    {
        "id": "gen-1", "model": "a/b", "provider": "P", "created": 1,
        "choices": [{"index": 0, "finish_reason": finish, "message": message}], "usage": USAGE,
    }
    for finish, message in [
        ("stop", {"role": "assistant", "content": "I read the test first.", "refusal": None}),
        ("tool_calls", {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}),
        ("length", {"role": "assistant", "content": "I wou", "reasoning": "hm"}),
    ]
] + [
    {"error": {"code": 502, "message": "died", "metadata": {"error_type": "provider_unavailable"}}},
    {"id": "gen-2", "choices": [{"finish_reason": "error", "error": {"code": 502, "message": "x"},
                                 "message": {"content": "I'll"}}], "usage": USAGE},
]  # fmt: skip
GOOD = json.dumps(RECORDED[0]).encode()

ODD_VALUES = [None, True, 0, -1, 10.0, 1e12, "5", "", "x", "\ud800", [], [None], {}, {"a": 1},
              10**30, float("nan"), float("inf"), [1, "2"], {"name": {}}]  # fmt: skip
SHAPES = ["type swapped", "field dropped", "number as text", "text as number", "odd unicode", "deep",
          "cut short", "twice", "in pieces", "pieces cut short"]  # fmt: skip


def places(value, path=()):
    """Every place in a reply, as the keys that lead there."""
    if path:
        yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in items:
        yield from places(each, (*path, key))


def put(reply, path, change):
    reply = copy.deepcopy(reply)
    at = reply
    for key in path[:-1]:
        at = at[key]
    if change is None:
        del at[path[-1]]
    else:
        at[path[-1]] = change(at[path[-1]])
    return reply


def streamed(reply, draw):
    """The same answer as server-sent events, cut anywhere."""
    choice = (reply.get("choices") or [{}])[0]
    message = choice.get("message") or {}
    text = str(message.get("content") or "")
    cut = draw(st.integers(0, len(text)))
    chunks = [
        {"id": reply.get("id"), "choices": [{"delta": {"content": part}}]}
        for part in (text[:cut], text[cut:])
    ]
    chunks += [draw(st.sampled_from([None, [], 7, {"choices": {}}, {"choices": [None]}]))]
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls") or [])]
    chunks += [
        {
            "choices": [
                {"delta": {"tool_calls": calls}, "finish_reason": choice.get("finish_reason")}
            ]
        }
    ]
    chunks += [{"usage": reply.get("usage")}]
    lines = ["data: " + json.dumps(chunk) for chunk in chunks]
    return "\n\n".join([": PROCESSING", *lines, "data: [DONE]", ""]).encode()


@st.composite
def mutated(draw):
    """A shape by name, and the bytes of a reply that has it."""
    reply, shape = draw(st.sampled_from(RECORDED)), draw(st.sampled_from(SHAPES))
    path = draw(st.sampled_from(list(places(reply))))
    if shape == "type swapped":
        reply = put(reply, path, lambda _: draw(st.sampled_from(ODD_VALUES)))
    elif shape == "field dropped":
        reply = put(reply, path, None)
    elif shape == "number as text":
        reply = put(reply, path, lambda old: str(old))
    elif shape == "text as number":
        reply = put(reply, path, lambda _: draw(st.integers() | st.floats()))
    elif shape == "odd unicode":
        reply = put(reply, path, lambda _: draw(st.text(max_size=20)) + "\udfff")
    data = json.dumps(reply).encode()
    if shape == "deep":
        depth = draw(st.sampled_from([50, 900, 5000]))
        data = (
            json.dumps(put(reply, path, lambda _: "DEEP"))
            .replace('"DEEP"', "[" * depth + "]" * depth)
            .encode()
        )
    elif shape == "cut short":
        data = data[: draw(st.integers(0, len(data)))]
    elif shape == "twice":
        data = data[:-1] + b", " + data[1:]
    elif shape in ("in pieces", "pieces cut short"):
        data = streamed(reply, draw)
        if shape == "pieces cut short":
            data = data[: draw(st.integers(0, len(data)))]
    return shape, data


def check(replies, folder):
    """Ask for these replies among as many good ones; count what became of each shape."""

    def reply(_, body):
        number = int(json.loads(body)["messages"][0]["content"])
        data = GOOD if number % 2 else replies[number // 2][1]
        return (
            200,
            {"content-type": "text/event-stream"} if data.startswith((b"data", b":")) else {},
            data,
        )

    states = [
        {"state_id": f"s{n}", "messages": [{"role": "user", "content": str(n)}],
         "student_action": {"role": "assistant", "content": "ls"}}
        for n in range(2 * len(replies))
    ]  # fmt: skip
    retry = RetryPolicy(max_attempts=2, first_wait_s=0.0, max_wait_s=0.0, settle_s=0.0)
    with OddServer(reply) as server:

        def run():
            return asyncio.run(
                replay_states(states, [server.teacher(max_concurrency=32)], max_total_usd=1e6,
                              ledger=folder / "l", max_concurrency=32, retry=retry, is_durable=False)
            )  # fmt: skip

        first, again = run(), run()
    became = Counter()
    for report in (first, again):
        assert report.stop_reason == "completed"
        assert [row.state_id for row in report.actions] == [state["state_id"] for state in states]
        assert all(row.error_code is None for row in report.actions[1::2])
        assert all(decode_row(encode_row(row)) == row for row in report.actions)
    for (shape, _), row in zip(replies, first.actions[::2], strict=True):
        became[shape, row.error_code or "answered"] += 1
    decided = {row.state_id: row for row in first.actions if row.finish_reason}
    assert all(decided.get(row.state_id, row) == row for row in again.actions)
    status = ledger_status(folder / "l")
    assert status.held_usd == 0
    assert status.spent_usd >= sum(row.cost_usd for row in first.actions) - 1e-9
    return became


def fuzz(n_examples, n_replies):
    """Run so many examples of so many replies; gives back what became of each shape."""
    became = Counter()

    @settings(max_examples=n_examples, deadline=None, database=None, derandomize=True,
              phases=[Phase.generate], suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.lists(mutated(), min_size=n_replies, max_size=n_replies))
    def example(replies):
        with tempfile.TemporaryDirectory() as folder:
            became.update(check(replies, Path(folder)))

    example()
    return became


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--replies", type=int, default=100)
    arguments = parser.parse_args()
    logging.disable()
    became = fuzz(arguments.examples, arguments.replies)
    print(sum(became.values()), "mutated replies")  # noqa: T201
    for shape in SHAPES:
        fates = ", ".join(
            f"{fate} {n}" for (name, fate), n in became.most_common() if name == shape
        )
        print(f"{shape:20s} {fates}")  # noqa: T201


if __name__ == "__main__":
    main()

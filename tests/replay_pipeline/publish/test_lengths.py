"""Pairs that are cut to a length, and what the card says about lengths."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import yaml

from replay_pipeline.publish import publish
from replay_pipeline.publish.version import read_manifests
from tests.replay_pipeline.publish.rows import kept_row, kept_table
from tests.support.messages import call

SYSTEM = {"role": "system", "content": "You are an agent."}
REQUEST = {"role": "user", "content": "Fix the first request."}


def steps(n, size=2_000):
    for number in range(n):
        yield call("Grep", pattern=f"step {number}")
        yield {"role": "tool", "tool_call_id": "call_1", "content": f"{number} {'word ' * size}"}


def long_row(number, *, n_steps=8, size=2_000, **others):
    messages = [SYSTEM, REQUEST, *steps(n_steps, size)]
    return kept_row(number, state_messages_json=json.dumps(messages), **others)


def rows_of(folder: Path, config: str):
    rows = []
    for path in sorted((folder / "data" / config).rglob("*.parquet")):
        rows += pq.read_table(path, partitioning=None).to_pylist()
    return {row["state_id"]: row for row in rows}


def test_where_no_step_can_go_long_messages_lose_their_middle(tmp_path):
    table = kept_table(long_row(1, n_steps=1, size=20_000))
    publish([("b", table)], folder=tmp_path / "set", lengths=[8_192])
    (row,) = rows_of(tmp_path / "set", "pairs_8k").values()
    result = row["prompt"][-1]["content"]
    assert row["n_tokens"] <= 8_192
    assert "characters left out]" in result
    assert result.startswith("0 word")
    assert result.endswith("word ")


def test_what_cannot_be_cut_is_counted_by_reason_and_told(tmp_path):
    many = [SYSTEM, *[{"role": "user", "content": f"Request {n}. " * 40} for n in range(90)]]
    calls = [{**call("Grep", pattern=f"{n} {'x' * 900}")["tool_calls"][0]} for n in range(30)]
    step = {"role": "assistant", "content": "", "tool_calls": calls}
    rows = [
        kept_row(
            1, chosen_messages_json=json.dumps([{"role": "assistant", "content": "word " * 4_000}])
        ),
        kept_row(2, state_messages_json=json.dumps([SYSTEM, REQUEST, step])),
        kept_row(3, state_messages_json=json.dumps([*many[:1] * 400, REQUEST])),
        kept_row(4),
    ]
    publish([("b", kept_table(*rows))], folder=tmp_path / "set", lengths=[4_096])
    manifest = read_manifests(tmp_path / "set")["b"]
    assert manifest["tokens"]["not_cut"] == {
        "pairs_4k": {
            "the first request alone": 1,
            "the last step alone": 1,
            "the tools and a side alone": 1,
        }
    }
    assert rows_of(tmp_path / "set", "pairs_4k").keys() == {"state-4"}
    assert len(rows_of(tmp_path / "set", "pairs")) == 4
    card = (tmp_path / "set" / "README.md").read_text("utf-8")
    assert "| `pairs_4k` | the last step alone | 1 |" in card


def test_the_card_tells_lengths_and_the_setting_that_drops_nothing(tmp_path):
    table = kept_table(long_row(1, n_steps=20), *range(2, 12))
    publish([("b", table)], folder=tmp_path / "set", lengths=[4_096, 5_000])
    card = (tmp_path / "set" / "README.md").read_text("utf-8")
    longest = max(row["n_tokens"] for row in rows_of(tmp_path / "set", "pairs").values())
    assert f"| `pairs` | 10 | 0 | 0 | 1 | {longest} |" in card
    assert f"DPOConfig(max_length={-(-longest // 1024) * 1024})  # pairs\n" in card
    assert "DPOConfig(max_length=4096)  # pairs_4k\n" in card
    assert "DPOConfig(max_length=5000)  # pairs_5000\n" in card
    assert "estimated by words and signs" in card
    there = {path.name for path in (tmp_path / "set" / "data").iterdir()}
    assert {
        info["config_name"] for info in yaml.safe_load(card.split("---\n")[1])["configs"]
    } == there


def test_retracting_keeps_the_cut_pairs_of_the_others(tmp_path):
    from replay_pipeline.publish import retract

    table = kept_table(*[long_row(n) for n in range(6)])
    publish([("b", table)], folder=tmp_path / "set")
    before = rows_of(tmp_path / "set", "pairs_8k")
    retract(folder=tmp_path / "set", session_ids=["session-1"])
    after = rows_of(tmp_path / "set", "pairs_8k")
    assert after == {
        state: row for state, row in before.items() if row["session_id"] != "session-1"
    }
    assert len(after) == 5

"""Token probabilities all the way: asked for, kept, published, learned from; and nowhere unasked."""

import json
import re
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
import yaml

from replay_pipeline.settings import Settings
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.testing.sample import ANSWERS_FILE, SESSIONS_DIR
from replay_pipeline.types import TeacherSpec
from tests.integration.test_training import CONFIG
from tests.support.odd_server import OddServer

pytestmark = pytest.mark.slow

SESSIONS = ("6cfe9440", "a9359e44", "e281782e")
TOKEN = "".join(("ghp", "_", "x7Qw2LmN8pRt4VyZ1aBc5DeF9gHj3KsU6oEi"))
MODELS = {"deepseek": "deepseek/deepseek-v4-pro", "qwen": "qwen/qwen3-coder"}
RECORDED = {
    (row["state_id"], row["model"]): row
    for row in map(json.loads, ANSWERS_FILE.read_text("utf-8").splitlines())
}


def written(message: dict[str, Any]) -> str:
    """What a model wrote to say this, before its server made calls of it."""
    calls = [
        json.dumps({"name": f["name"], "arguments": json.loads(f["arguments"])})
        for f in (call["function"] for call in message.get("tool_calls") or ())
    ]
    return "\n".join(
        [message.get("content") or "", *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
    ).strip()


def logprobs_of(text: str) -> dict[str, Any]:
    """The form of OpenAI, vLLM and llama.cpp; a token is a word or a single other character."""
    tokens = re.findall(r" ?\w+|\W", text)
    entries = [{"token": each, "bytes": [*each.encode()], "logprob": -0.25} for each in tokens]
    other = {"token": " ", "bytes": [32], "logprob": -2.0}
    return {"content": [{**each, "top_logprobs": [each, other]} for each in entries]}


def reply(_: int, body: bytes) -> tuple[int, dict[str, str], bytes]:
    """The sample's recorded answer, with the probabilities of its tokens where they are asked for."""
    asked = json.loads(body)
    row = RECORDED.get((asked["metadata"]["state_id"], asked["model"]))
    if row is None:
        return 404, {}, b'{"error": {"code": 404, "message": "no recorded answer"}}'
    choice = {"message": row["message"], "finish_reason": row["finish_reason"]}
    if asked.get("logprobs"):
        choice["logprobs"] = logprobs_of(written(row["message"]))
    usage = {"prompt_tokens": 900, "completion_tokens": 30, "cost": 1e-5}
    return 200, {}, json.dumps({"id": "g", "choices": [choice], "usage": usage}).encode()


def teachers(server: OddServer, **more: Any) -> list[TeacherSpec]:
    return [
        server.teacher(name=name, model=model, dialect="openrouter", is_distillable=True, **more)
        for name, model in MODELS.items()
    ]


def open_root(root: Path, specs: list[TeacherSpec], **publish: Any) -> Pipeline:
    changes = {
        "ingest": {"sources": [next(SESSIONS_DIR.rglob(f"{name}*.jsonl")) for name in SESSIONS]},
        "replay": {"teachers": [spec.model_dump() for spec in specs], "gates": []},
        "train": {"config": root.parent / "train.yaml"},
        "publish": publish,
    }
    return Pipeline(Settings.load(data_dir=root, changes=changes, env={}))


def worked(root: Path, reply=reply, *, top_logprobs: int, **publish: Any) -> Pipeline:
    with OddServer(reply) as server:
        work = open_root(root, teachers(server, top_logprobs=top_logprobs), **publish)
        [batch] = work.ingest_new()
        for stage in (work.replay, work.pairs, work.normalize):
            stage(batch)
        bodies = [json.loads(body) for body in server.bodies]
    asked = {(body.get("logprobs"), body.get("top_logprobs")) for body in bodies}
    assert asked == {(True, 3) if top_logprobs else (None, None)}
    return work


def ledger_rows(root: Path) -> list[bytes]:
    with closing(sqlite3.connect(root / "ledger.sqlite")) as ledger:
        return [bytes(row) for (row,) in ledger.execute("select row from calls where row not null")]


def published(root: Path, config: str) -> list[dict[str, Any]]:
    parts = sorted((root / "dataset" / "data" / config).rglob("*.parquet"))
    return [row for part in parts for row in pq.read_table(part, partitioning=None).to_pylist()]


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> Pipeline:
    root = tmp_path_factory.mktemp("asked") / "data"
    return worked(root, top_logprobs=3, teacher_logprobs=True)


def test_what_is_not_asked_for_is_nowhere(tmp_path, asked):
    root = tmp_path / "data"
    work = worked(root, top_logprobs=0)
    work.publish()
    assert not any(b"logprobs" in row for row in ledger_rows(root))
    assert not work.root.batches("token_logprobs")
    assert not (root / "dataset" / "data" / "teacher_logprobs").exists()
    assert "teacher_logprobs" not in (root / "dataset" / "README.md").read_text("utf-8")
    # What was asked with them differs in the hash of its questions alone.
    [batch] = work.batches()
    for table in ("states", "dpo_pairs", "positives", "outcomes", "normalized_pairs"):
        assert (
            work.root.part(table, batch).read_bytes() == asked.root.part(table, batch).read_bytes()
        )


def test_every_answer_keeps_the_probabilities_of_its_tokens(asked):
    [batch] = asked.batches()
    rows = asked.root.read("token_logprobs", batch).to_pylist()
    answers = asked.root.read("teacher_actions", batch).to_pylist()
    answered = {(a["state_id"], a["teacher"]) for a in answers if a["error_code"] is None}
    assert {(row["state_id"], row["teacher"]) for row in rows} == answered
    row = rows[0]
    message = RECORDED[row["state_id"], MODELS[row["teacher"]]]["message"]
    positions = json.loads(row["logprobs_json"])
    assert "".join(position[0][0] for position in positions) == written(message)
    assert all(position[0][1] == -0.25 for position in positions)
    assert any(position[1:] == [[" ", -2.0]] for position in positions)
    kept = [msgspec.json.decode(row) for row in ledger_rows(asked.root.path)]
    assert sum(row.get("logprobs") is not None for row in kept) == len(answered)


def test_the_answers_of_a_consensus_are_published_in_a_config_of_their_own(asked):
    report = asked.publish().report
    rows = published(asked.root.path, "teacher_logprobs")
    of_states = [
        (row["state_id"], teacher)
        for config in ("pairs", "positives")
        for row in published(asked.root.path, config)
        for teacher in row["teachers_agreeing"]
    ]
    assert Counter((row["state_id"], row["teacher"]) for row in rows) == Counter(of_states)
    assert report["answers_left_out"] == {}
    by_split = report["rows_by_split"]["teacher_logprobs"]
    assert sum(by_split.values()) == len(rows) > 10
    card = (asked.root.path / "dataset" / "README.md").read_text("utf-8")
    assert "the teachers' own answers, with the probabilities of their tokens" in card
    [session] = {row["session_id"] for row in rows[:1]}
    asked.retract(session_ids=[session])
    left = published(asked.root.path, "teacher_logprobs")
    assert 0 < len(left) == sum(row["session_id"] != session for row in rows)


def test_a_secret_that_is_cut_into_tokens_is_left_out_and_counted(tmp_path):
    leaks: set[str] = set()

    def leaking(number: int, body: bytes):
        status, headers, data = reply(number, body)
        asked = json.loads(body)
        if status == 200 and asked["model"] == MODELS["qwen"]:
            leaks.add(asked["metadata"]["state_id"])
            told = json.loads(data)
            text = f"export GITHUB_TOKEN={TOKEN}\n"
            told["choices"][0]["logprobs"] = {
                "content": [
                    {"token": text[at : at + 4], "bytes": None, "logprob": -1.0}
                    for at in range(0, len(text), 4)
                ]
            }
            data = json.dumps(told).encode()
        return status, headers, data

    root = tmp_path / "data"
    work = worked(root, leaking, top_logprobs=3, teacher_logprobs=True)
    report = work.publish().report
    rows = published(root, "teacher_logprobs")
    assert {row["teacher"] for row in rows} == {"deepseek"}
    assert report["answers_left_out"]["secret"] == sum(
        "qwen" in row["teachers_agreeing"]
        for config in ("pairs", "positives")
        for row in published(root, config)
    )
    everything = b"".join(p.read_bytes() for p in (root / "dataset").rglob("*") if p.is_file())
    assert TOKEN[:8].encode() not in everything


def test_a_model_learns_from_the_published_probabilities(asked, tmp_path):
    from trainer.engines.settings_file import read_settings
    from trainer.trl.run import run

    asked.publish()
    values = yaml.safe_load(CONFIG)
    values["trl"] |= {"alpha_sdpo": 1.0, "teacher": "recorded", "max_steps": 3}
    values |= {"dataset": str(asked.root.path / "dataset"), "output": str(tmp_path / "model")}
    report = run(read_settings(values))
    assert "sdpo" in report["channels_live"]
    counts = report["teacher_tokens"]
    assert counts["tokens"] == counts["aligned"] + counts["other_cut"] + counts.get("too_long", 0)
    assert counts["aligned"] > 100
    lines = (tmp_path / "model" / "metrics.jsonl").read_text("utf-8").splitlines()
    losses = [row["sdpo/loss"] for row in map(json.loads, lines) if "sdpo/loss" in row]
    assert len(losses) == 3
    assert losses[-1] < losses[0]

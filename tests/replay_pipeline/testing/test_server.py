import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from replay_pipeline.errors import ConfigError
from replay_pipeline.testing import TeacherServer
from replay_pipeline.testing.catalog import PromptCache

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
MODEL = "deepseek/deepseek-v4-pro"


def ask(server, body=None, *, path="/chat/completions", **headers):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.base_url + path, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status, json.load(reply), dict(reply.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error), dict(error.headers)


def body(state_id, content="hello", **more):
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "metadata": {"state_id": state_id},
        **more,
    }


def test_recorded_answers_are_found_by_model_and_state(tmp_path):
    line = {
        "state_id": "s1",
        "model": MODEL,
        "message": {"role": "assistant", "content": "look first"},
        "finish_reason": "stop",
    }
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(line) + "\n\n")
    with TeacherServer(path) as server:
        status, reply, headers = ask(server, body("s1"))
        assert (status, reply["choices"][0]["message"]["content"]) == (200, "look first")
        assert headers["x-generation-id"] == reply["id"]
        status, reply, _ = ask(server, body("s2"))
        assert (status, reply["error"]["code"]) == (404, 404)
        assert reply["error"]["message"] == f"no recorded answer for {MODEL} at state s2"
        models = {model["id"] for model in ask(server, path="/models")[1]["data"]}
        assert {teacher.model for teacher in server.teachers()} <= models
    assert server.bill().n_charged == 1


def test_the_bill_agrees_with_every_usage_and_counts_duplicates():
    with TeacherServer(script={"content": "yes"}) as server:
        usages = [ask(server, body(f"s{i % 3}"))[1]["usage"] for i in range(4)]
        bill = server.bill()
    assert bill.total_nano == sum(round(usage["cost"] * 1e9) for usage in usages)
    assert (bill.n_charged, bill.n_duplicates) == (4, 1)
    assert bill.models[MODEL].n_prompt_tokens == sum(u["prompt_tokens"] for u in usages)


def test_prompts_of_a_session_are_cached_and_without_a_session_they_are_not():
    text = "word " * 4000
    with TeacherServer(script={"content": "yes"}) as server:

        def cached(**more):
            usage = ask(server, body("s", **more))[1]["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]

        assert cached(content=text, session_id="a") == 0
        assert cached(content=text + "and on", session_id="a") > 0.95
        assert cached(content=text, session_id="b") == 0
        assert cached(content=text) == 0
        assert cached(content=text) == 0
        marked = {"model": "anthropic/claude-opus-4.7", "session_id": "a", "content": text}
        assert cached(**marked) == 0
        assert cached(**marked) == 0
        marked["cache_control"] = {"type": "ephemeral"}
        assert cached(**marked) == 0
        assert cached(**marked) > 0.95


def test_a_cached_prompt_is_forgotten_after_a_while():
    cache = PromptCache()
    blocks = cache.blocks("m", "s", b"x" * 8192)
    cache.store(blocks, now=0.0)
    assert cache.n_cached_tokens(blocks, now=299.0) == 2048
    assert cache.n_cached_tokens(blocks, now=301.0) == 0
    changed = cache.blocks("m", "s", b"x" * 6000 + b"y" * 2192)
    cache.store(blocks, now=400.0)
    assert cache.n_cached_tokens(changed, now=400.0) == 11 * 512 // 4


def test_a_server_that_cannot_start_says_why(tmp_path):
    bad = tmp_path / "answers.jsonl"
    bad.write_text('{"state_id": "s"}\n')
    with (
        pytest.raises(ConfigError, match=r"answers\.jsonl:1: no recorded answer"),
        TeacherServer(bad),
    ):
        pass
    with pytest.raises(ConfigError, match="no such file"), TeacherServer(tmp_path / "none"):
        pass
    with TeacherServer() as first:
        port = int(first.base_url.split(":")[2].split("/")[0])
        with pytest.raises(ConfigError, match="can't listen there"), TeacherServer(port=port):
            pass

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from replay_pipeline.errors import ConfigError
from replay_pipeline.testing.catalog import PromptCache
from tests.support.teachers import Fault, TeacherServer

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
        "latency_s": 1.5,
    }
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(line) + "\n\n")
    with TeacherServer(path, latency={"scale": 0.01}) as server:
        status, reply, headers = ask(server, body("s1"))
        assert (status, reply["choices"][0]["message"]["content"]) == (200, "look first")
        assert headers["x-generation-id"] == reply["id"]
        assert server.latencies() == [pytest.approx(0.015)]
        status, reply, _ = ask(server, body("s2"))
        assert (status, reply["error"]["code"]) == (404, 404)
        assert reply["error"]["message"] == f"no recorded answer for {MODEL} at state s2"
        paid = ask(server, path=f"/generation?id={headers['x-generation-id']}")[1]["data"]
        assert paid["total_cost"] == server.bill().total_nano / 1e9
    assert server.bill().n_charged == 1


def test_the_bill_agrees_with_every_usage_and_counts_duplicates():
    with TeacherServer(script={"content": "yes"}) as server:
        usages = [ask(server, body(f"s{i % 3}"))[1]["usage"] for i in range(4)]
        bill = server.bill()
    assert bill.total_nano == sum(round(usage["cost"] * 1e9) for usage in usages)
    assert (bill.n_charged, bill.n_duplicates) == (4, 1)
    assert bill.models[MODEL].n_prompt_tokens == sum(u["prompt_tokens"] for u in usages)


def test_the_response_cache_answers_equal_requests_for_nothing():
    header = {"X-OpenRouter-Cache": "true", "content-type": "application/json"}
    with TeacherServer(script={"content": "yes"}) as server:
        _, first, _ = ask(server, body("s1"), **header)
        _, again, headers = ask(server, body("s1"), **header)
        ask(server, body("s1", "something else"), **header)
    assert again["choices"] == first["choices"]
    assert again["usage"]["cost"] == 0
    assert headers["x-openrouter-cache-status"] == "HIT"
    assert headers["x-openrouter-cache-source-id"] == first["id"]
    assert (server.bill().n_replayed, server.bill().n_charged) == (1, 2)


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
    cache = PromptCache(ttl_s=10)
    blocks = cache.blocks("m", "s", b"x" * 8192)
    cache.store(blocks, now=0.0)
    assert cache.n_cached_tokens(blocks, now=9.0) == 2048
    assert cache.n_cached_tokens(blocks, now=11.0) == 0
    changed = cache.blocks("m", "s", b"x" * 6000 + b"y" * 2192)
    cache.store(blocks, now=20.0)
    assert cache.n_cached_tokens(changed, now=20.0) == 11 * 512 // 4


def test_keys_limits_prices_and_unknown_models_are_as_with_the_real_router():
    with TeacherServer(script={"content": "yes"}, key="right", credit_usd=0.000001) as server:
        assert ask(server, body("s"))[0] == 401
        right = {"authorization": "Bearer right"}
        assert ask(server, body("s"), **right)[0] == 200
        assert ask(server, body("s"), **right)[0] == 402
        info = ask(server, path="/key", **right)[1]["data"]
        assert info["usage"] == server.bill().total_nano / 1e9
    with TeacherServer(script={"content": "yes"}) as server:
        assert ask(server, {**body("s"), "model": "no/such"})[0] == 404
        dear = {"provider": {"max_price": {"prompt": 0.1}}}
        assert "max_price" in ask(server, body("s", **dear))[1]["error"]["message"]
        assert ask(server, {"model": MODEL})[0] == 400
        assert ask(server, path="/nowhere")[0] == 404
        models = {model["id"] for model in ask(server, path="/models")[1]["data"]}
        assert {teacher.model for teacher in server.teachers()} <= models


def test_faults_can_be_changed_while_it_runs_and_are_checked():
    with TeacherServer(script={"content": "yes"}) as server:
        server.set_faults([{"kind": "status", "status": 503, "times": 1}])
        assert [ask(server, body("s"))[0] for _ in range(2)] == [503, 200]
        with pytest.raises(ConfigError, match="fault kind 'explode' is not one of"):
            server.set_faults([{"kind": "explode"}])
    with pytest.raises(ValueError, match="unknown colour"):
        Fault.parse([{"kind": "status", "colour": "red"}])
    with (
        pytest.raises(ConfigError, match="not one of"),
        TeacherServer(faults=[{"kind": "explode"}]),
    ):
        pass


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


def test_a_client_that_wants_a_stream_gets_one():
    call = {"id": "c1", "type": "function", "function": {"name": "Read", "arguments": "{}"}}
    message = {"role": "assistant", "content": "look", "tool_calls": [call]}
    with TeacherServer(script=message) as server:
        data = json.dumps(body("s1", stream=True)).encode()
        with urllib.request.urlopen(f"{server.base_url}/chat/completions", data) as reply:
            assert reply.headers["content-type"] == "text/event-stream"
            lines = [line for line in reply.read().decode().split("\n\n") if line]
        whole = ask(server, body("s1"))[1]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[1:-1]]
    assert [chunk["object"] for chunk in chunks] == ["chat.completion.chunk"] * 2
    assert chunks[0]["choices"][0]["delta"]["tool_calls"] == [{"index": 0, **call}]
    assert chunks[1]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[1]["usage"] == whole["usage"]
    assert whole["created"] >= chunks[0]["created"] > 0

"""The loopback server and the client against what real servers were recorded to answer.

Recorded by `python -m tests.engines.cases`; `make test-engines` shows that they still answer so.
"""

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from replay_pipeline.replay.dialects.replies import Answer, Failure, read_reply
from tests.support.teachers import TeacherServer

RECORDED = json.loads(Path(__file__).with_name("real_servers.json").read_text("utf-8"))
REFUSED = [each for each in RECORDED if each["status"] >= 400 and each["request"] is not None]
GOOD = ("a question", "a question with tools", "a call and its result", "content in parts")


def named(each):
    return f"{each['server'].split()[0]}: {each['case']}"


def body_of(each, model="z-ai/glm-4.6"):
    messages = [{"role": "user", "content": "Say ok."}]
    return {"model": model, "messages": messages, "max_tokens": 2, **each["request"]}


def content_of(each):
    reply = each["reply"]
    return reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()


def posted(server, body):
    request = urllib.request.Request(
        f"{server.base_url}/chat/completions", data=json.dumps(body).encode(),
        headers={"content-type": "application/json", "authorization": "Bearer k"},
    )  # fmt: skip
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.fixture(scope="module")
def server():
    with TeacherServer(script={"content": "ok"}) as running:
        yield running


@pytest.mark.parametrize("each", REFUSED, ids=named)
def test_what_a_real_server_refuses_the_loopback_server_refuses(server, each):
    status, reply = posted(server, body_of(each))
    # Where a real server falls over with a 500, a router has looked at the request before it.
    assert status == 400
    assert reply["error"]["code"] == status
    assert isinstance(reply["error"]["message"], str)
    if each["status"] == 400:
        real = each["reply"]["error"]
        assert {key: type(real[key]) for key in ("code", "message")} == {
            key: type(reply["error"][key]) for key in ("code", "message")
        }


def test_enough_was_recorded_to_hold_anything_to():
    assert len({each["case"] for each in REFUSED}) >= 18
    assert len({each["server"] for each in REFUSED}) == 2


@pytest.mark.parametrize("case", GOOD)
def test_what_real_servers_take_the_loopback_server_takes(server, case):
    found = [each for each in RECORDED if each["case"] == case]
    assert [each["status"] for each in found] == [200, 200]
    status, reply = posted(server, body_of(found[0]))
    assert status == 200
    for each in found:
        # What both kinds of server say is there is there, in the same kinds.
        for field in ("choices", "usage", "model", "id"):
            assert type(reply[field]) is type(each["reply"][field])
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert all(isinstance(reply["usage"][name], int) for name in counts)
        answer = read_reply(200, {}, content_of(each))
        assert isinstance(answer, Answer)
        assert (answer.usage.n_prompt_tokens or 0) > 3
        assert answer.usage.n_completion_tokens == 2
        assert answer.finish_reason == "length"


@pytest.mark.parametrize("each", [r for r in RECORDED if r["status"] >= 400], ids=named)
def test_the_client_reads_a_refusal_in_the_servers_own_words(each):
    failure = read_reply(each["status"], {}, content_of(each))
    assert isinstance(failure, Failure)
    reply = each["reply"]
    words = reply if isinstance(reply, str) else reply.get("detail") or reply["error"]["message"]
    assert words[:40].split("\n")[0] in failure.message
    if each["status"] in (400, 422):
        assert failure.is_lasting
    if each["request"] is None:
        assert failure.code == "context_length_exceeded"


def test_a_prompt_longer_than_the_context_is_refused(server):
    messages = [{"role": "user", "content": "word " * 170_000}]
    status, reply = posted(server, {"model": "z-ai/glm-4.6", "messages": messages, "max_tokens": 2})
    assert (status, reply["error"]["code"]) == (400, 400)
    failure = read_reply(status, {}, json.dumps(reply).encode())
    assert isinstance(failure, Failure)
    assert failure.code == "context_length_exceeded"

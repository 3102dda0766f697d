"""A model of this machine behind the OpenAI protocol."""

import json
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[3] / "recipes" / "what_a_dollar_buys"
sys.path.insert(0, str(RECIPE))
try:
    from serve import LocalModel, ModelServer
finally:
    sys.path.remove(str(RECIPE))

QUESTION = {"messages": [{"role": "user", "content": "What now?"}], "max_tokens": 8}


@pytest.fixture
def server(tmp_path, model, tokenizer):
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    with ModelServer(LocalModel(tmp_path / "m"), "m") as running:
        thread = threading.Thread(target=running.serve_forever, args=[0.02])
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def ask(server, **request):
    body = json.dumps(QUESTION | request).encode()
    call = urllib.request.Request(f"{server.base_url}/chat/completions", body)
    with urllib.request.urlopen(call) as reply:
        return json.loads(reply.read())


CALL = '<tool_call>\n{"name": "Read", "arguments": {"file_path": "a.py"}}\n</tool_call>'


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_written_as_text_comes_back_as_a_call(server, monkeypatch, is_streamed):
    monkeypatch.setattr(type(server.model.renderer.tokenizer), "decode", lambda *_, **__: CALL)
    body = json.dumps(QUESTION | {"stream": is_streamed}).encode()
    asked = urllib.request.Request(f"{server.base_url}/chat/completions", body)
    with urllib.request.urlopen(asked) as reply:
        text = reply.read().decode()
    if is_streamed:
        *events, end = [row[6:] for row in text.split("\n\n") if row]
        first, last, counted = map(json.loads, events)
        assert end == "[DONE]"
        assert counted["usage"]["completion_tokens"] <= 8
        message, reason = first["choices"][0]["delta"], last["choices"][0]["finish_reason"]
    else:
        [choice] = json.loads(text)["choices"]
        message, reason = choice["message"], choice["finish_reason"]
    [call] = message["tool_calls"]
    assert reason == "tool_calls"
    assert call["function"] == {"name": "Read", "arguments": '{"file_path": "a.py"}'}


def test_requests_that_wait_share_a_batch_and_get_the_answers_they_get_alone(server, monkeypatch):
    requests = [
        {
            "messages": [{"role": "user", "content": f"What now? {'Well? ' * number}"}],
            "max_tokens": 2 + 3 * number,
            "temperature": number % 3 / 2,
            "seed": number,
        }
        for number in range(12)
    ]

    def said(request):
        answer = ask(server, **request)
        return answer["choices"][0] | {"usage": answer["usage"]}

    alone = [said(request) for request in requests]
    batches, generate = [], type(server.model.model).generate

    def counted(model, **how):
        batches.append(len(how["input_ids"]))
        return generate(model, **how)

    monkeypatch.setattr(type(server.model.model), "generate", counted)
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(said, requests))
    assert together == alone
    assert sum(batches) == 12
    assert max(batches) > 3


def test_a_cut_answer_says_so_and_a_bad_request_is_refused(server):
    answer = ask(server, max_tokens=1)
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
    with pytest.raises(urllib.error.HTTPError, match="400"):
        ask(server, messages="no messages")


def test_a_served_checkpoint_shows_prompts_as_its_training_did(tmp_path, model, tokenizer):
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    assert LocalModel(tmp_path / "m").renderer.window == "decision"
    assert LocalModel(tmp_path / "m").renderer.max_prompt_tokens == 1024
    kept = {"window": "tail", "with_tools": False, "max_prompt_tokens": 96}
    (tmp_path / "m" / "rendering.json").write_text(json.dumps(kept))
    assert LocalModel(tmp_path / "m").renderer.max_prompt_tokens == 96
    renderer = LocalModel(tmp_path / "m", max_prompt_tokens=64).renderer
    assert (renderer.window, renderer.with_tools, renderer.max_prompt_tokens) == ("tail", False, 64)

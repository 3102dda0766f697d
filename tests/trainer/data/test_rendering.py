"""Messages to ids: equal responses everywhere, cuts at messages, common prefixes kept."""

import itertools
import json

import pytest
from trl.chat_template_utils import is_chat_template_prefix_preserving

from trainer.data.rendering import Renderer, template_message
from trainer.data.rewards import as_message, canonical_calls
from trainer.data.template import LEFT_OUT

CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "Read", "arguments": '{"file_path": "cart.py"}'},
        }
    ],
}


def conversation(n_turns: int) -> list[dict]:
    messages = [{"role": "user", "content": "Fix the failing test of cart.py."}]
    for turn in range(n_turns):
        messages += [CALL, {"role": "tool", "tool_call_id": "1", "content": f"line {turn} " * 8}]
    return messages


@pytest.fixture
def renderer(tokenizer):
    return Renderer(tokenizer=tokenizer, max_prompt_tokens=200, max_response_tokens=64)


def test_the_tiny_chat_template_preserves_prefixes(tokenizer):
    assert is_chat_template_prefix_preserving(tokenizer)


def test_a_prompt_ends_with_the_generation_prompt(renderer, tokenizer):
    text = tokenizer.decode(renderer.prompt_ids(conversation(1)))
    assert text.endswith("<|im_start|>assistant\n")
    assert "<tool_response>\nline 0" in text


def test_a_response_is_what_generation_would_have_written(renderer, tokenizer):
    text = tokenizer.decode(renderer.response_ids(CALL))
    assert text.startswith("<tool_call>\n")
    assert text.endswith("</tool_call><|im_end|>")
    read_back = as_message(text.removesuffix("<|im_end|>"))
    assert canonical_calls(read_back) == canonical_calls(CALL)


def test_prompt_and_response_are_the_rendered_conversation(renderer, tokenizer):
    messages = conversation(1)
    whole = tokenizer.apply_chat_template(
        [template_message(m) for m in [*messages, CALL]], tokenize=False
    )
    ids = renderer.prompt_ids(messages) + renderer.response_ids(CALL)
    assert tokenizer.decode(ids) == whole.rstrip("\n")


def test_a_hint_stands_at_the_very_end_and_the_start_is_shared(renderer, tokenizer):
    plain = renderer.prompt_ids(conversation(1))
    hinted = renderer.prompt_ids(conversation(1), hint="Read it first.")
    shared = next(i for i, (a, b) in enumerate(zip(plain, hinted, strict=False)) if a != b)
    assert len(plain) - shared < 12
    assert "user\nRead it first.<|im_end|>" in tokenizer.decode(hinted[shared:])


def test_tools_are_rendered_by_name_and_parameters(tokenizer, renderer):
    tool = {
        "type": "function",
        "function": {"name": "Read", "parameters": {"properties": {"file_path": {}}}},
    }
    assert "Read(file_path)" in tokenizer.decode(renderer.prompt_ids(conversation(0), [tool]))
    renderer.with_tools = False
    assert "Read(" not in tokenizer.decode(renderer.prompt_ids(conversation(0), [tool]))


def test_a_long_prompt_loses_its_oldest_messages_and_keeps_calls_with_results(renderer, tokenizer):
    ids = renderer.prompt_ids(conversation(12))
    text = tokenizer.decode(ids)
    assert len(ids) <= 200
    assert text.startswith(
        "<|im_start|>user\nFix the failing test of cart.py.<|im_end|>\n"
        f"<|im_start|>user\n{LEFT_OUT}<|im_end|>\n<|im_start|>assistant\n<tool_call>"
    )
    assert "line 0" not in text
    assert "line 11" in text


def test_cut_points_are_coarse_so_that_states_share_their_start(tokenizer):
    """Neighbouring states of a session mostly start at the same message."""
    renderer = Renderer(tokenizer=tokenizer, max_prompt_tokens=2000)
    starts = [
        tokenizer.decode(renderer.prompt_ids(conversation(n))).split("line ")[1].split()[0]
        for n in range(20, 50)
    ]
    changes = sum(a != b for a, b in itertools.pairwise(starts))
    assert len(set(starts)) > 1
    assert changes <= 10, starts


def test_what_states_share_is_counted_once(renderer, monkeypatch):
    counted, count = [], Renderer._ids
    monkeypatch.setattr(
        Renderer, "_ids", lambda self, text: counted.append(text) or count(self, text)
    )
    messages = conversation(8)
    for n_messages in range(1, len(messages) + 1, 2):
        renderer.render({"messages": messages[:n_messages], "tools": None, "hint": None})
    assert len(counted) > 8
    assert len(set(counted)) == len(counted)


def test_one_message_longer_than_the_budget_keeps_its_ends(renderer, tokenizer):
    long = [{"role": "user", "content": "first " + "word " * 3000 + "last"}]
    ids = renderer.prompt_ids(long)
    assert len(ids) <= 200
    assert tokenizer.decode(ids).endswith("last<|im_end|>\n<|im_start|>assistant\n")


def test_a_long_response_is_cut_and_counted(renderer):
    ids = renderer.response_ids({"role": "assistant", "content": "word " * 500})
    assert len(ids) == 64
    _, cut = renderer.response({"role": "assistant", "content": "word " * 500})
    assert cut.n_dropped_tokens > 300


def test_content_blocks_and_broken_arguments_are_rendered(renderer, tokenizer):
    message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
        "tool_calls": [{"function": {"name": "Bash", "arguments": "{not json"}}],
    }
    text = tokenizer.decode(renderer.response_ids(message))
    assert "one\ntwo" in text
    assert json.dumps({"arguments": "{not json"}) in text

"""Messages to ids: equal responses everywhere, cuts at messages, common prefixes kept."""

import itertools

import pytest

from tests.trainer.published import assistant
from trainer.data.rendering import Renderer, template_message

CALL = assistant("Read", file_path="cart.py")


def conversation(n_turns: int) -> list[dict]:
    messages = [{"role": "user", "content": "Fix the failing test of cart.py."}]
    for turn in range(n_turns):
        messages += [CALL, {"role": "tool", "tool_call_id": "call", "content": f"line {turn} " * 8}]
    return messages


@pytest.fixture
def renderer(tokenizer):
    return Renderer(tokenizer=tokenizer, max_prompt_tokens=200, max_response_tokens=64)


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

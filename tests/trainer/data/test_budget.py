"""What a budget of tokens keeps: all of what fits, and what a decision needs of the rest."""

import json
from pathlib import Path

import pytest
import trl
from transformers import PreTrainedTokenizerFast

from trainer.data.budget import needs_of, sides_of
from trainer.data.rendering import Renderer
from trainer.errors import DatasetError

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' "
    "+ '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As published with SmolLM2-135M-Instruct."""
NAMES = ("smollm2", "qwen2_5", "qwen3", "llama3_1", "gemma3")
WORDS = [
    "the",
    "cart",
    "sums",
    "prices",
    "of",
    "all",
    "items",
    "and",
    "rounds",
    "them",
    "to",
    "cents",
    "before",
    "tax",
    "is",
    "added",
]


@pytest.fixture
def make(tokenizer):
    def build(name: str, budget: int, **options) -> Renderer:
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer,
            bos_token="<|endoftext|>",
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
        )
        path = TEMPLATES / f"{name}.jinja"
        fast.chat_template = path.read_text("utf-8") if path.exists() else SMOLLM2
        return Renderer(tokenizer=fast, max_prompt_tokens=budget, **options)

    return build


def call(name: str, step: int = 0, **arguments: str) -> dict:
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"id": f"call_{step:05}", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(text: str, step: int = 0) -> dict:
    return {"role": "tool", "tool_call_id": f"call_{step:05}", "content": text}


def words(n: int, start: int = 0) -> str:
    return " ".join(WORDS[(start + i) % len(WORDS)] for i in range(n))


def session(n_steps: int, n_words: int = 20) -> list[dict]:
    messages = [
        {"role": "system", "content": "You are a coding agent. " + words(12)},
        {"role": "user", "content": "Please round the totals of src/cart.py."},
    ]
    for step in range(n_steps):
        messages += [
            call("Read", step, file_path=f"src/part_{step}.py"),
            result(f"part {step}: " + words(n_words * (1 + step % 3), step), step),
        ]
    return messages


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} something. " + words(30),
            "parameters": {
                "type": "object",
                "properties": {"file_path": {"type": "string", "description": words(8)}},
            },
        },
    }
    for name in ("Read", "Edit", "Bash")
]


@pytest.mark.parametrize("name", NAMES)
def test_what_fits_is_left_as_it_is_to_the_last_token(make, name):
    for messages in (session(1), session(6), [{"role": "user", "content": words(150)}]):
        whole, cut = make(name, 100_000).prompt(messages, TOOLS)
        assert not cut
        assert make(name, len(whole)).prompt(messages, TOOLS) == (whole, cut)
        ids, cut = make(name, len(whole) - 1).prompt(messages, TOOLS)
        assert len(ids) < len(whole)
        assert cut


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_fit_uses_its_budget(make, name):
    used = []
    for n_steps, n_words in (
        (30, 20),
        (50, 30),
        (100, 10),
        (60, 40),
        (16, 120),
        (6, 500),
        (4, 900),
    ):
        renderer = make(name, 3000)
        ids, cut = renderer.prompt(session(n_steps, n_words), TOOLS)
        assert cut
        assert len(ids) <= 3000
        used.append(len(ids) / 3000)
    assert sum(used) / len(used) >= 0.85, used


@pytest.mark.parametrize("name", NAMES)
def test_what_the_sides_need_is_kept(make, name):
    messages = session(30)
    at = 2 + 2 * 4  # an early step shows what the edit replaces
    shown = words(40) + "\n    return sum(prices)\n    # in cents\n" + words(40, 3)
    messages[at + 1] = {**messages[at + 1], "content": shown}
    replaced = "    return sum(prices)\n    # in cents"
    edit = call("Edit", file_path="src/part_9.py", old_string=replaced, new_string="x")
    renderer = make(name, 1200)
    ids, cut = renderer.prompt(messages, sides=[edit])
    text = renderer.tokenizer.decode(ids)
    assert cut.n_dropped_steps > 10
    for needed in ("return sum(prices)", "# in cents", "src/part_9.py", "round the totals"):
        assert needed in text, needed
    assert "part 29" in text
    plain, _ = renderer.prompt(messages)
    assert "return sum(prices)" not in renderer.tokenizer.decode(plain)


def test_what_stands_in_parts_is_kept_in_parts_and_not_where_it_was_replaced(make):
    messages = session(30)
    made = {"file_path": "/w/src/cart.py", "old_string": "tax = 7", "new_string": "tax = 8"}
    messages[2 + 4 * 2 + 1] = {**messages[2 + 4 * 2 + 1], "content": "src/cart.py: tax = 7"}
    messages[2 + 4 * 3] = call("Edit", 6, **made)
    edit = call("Edit", **made)
    apart = call("Edit", file_path="/w/src/cart.py", old_string="tax = 7\nsrc", new_string="x")
    renderer = make("qwen2_5", 1200)
    for side in (edit, apart):
        ids, cut = renderer.prompt(messages, sides=[side])
        text = renderer.tokenizer.decode(ids)
        assert cut.n_dropped_steps > 10
        assert "src/cart.py: tax = 7" in text
        assert "tax = 8" not in text


def test_where_only_an_edit_shows_what_it_replaced_all_that_came_since_is_kept_or_nothing(make):
    """Something took the edit back: left out, the side would look made already."""
    made = {"file_path": "/w/src/cart.py", "old_string": "tax = 7", "new_string": "tax = 8"}
    messages = session(30)
    messages[2 + 2 * 25] = call("Edit", 25, **made)
    messages[2 + 2 * 26] = call("Bash", 26, command="git checkout src")
    renderer = make("qwen2_5", 1200)
    ids, cut = renderer.prompt(messages, sides=[call("Edit", **made)])
    text = renderer.tokenizer.decode(ids)
    assert cut.n_dropped_steps > 10
    assert "tax = 8" in text
    assert "git checkout src" in text
    messages[2 + 2 * 25], messages[2 + 2 * 3] = messages[2 + 2 * 3], messages[2 + 2 * 25]
    ids, cut = renderer.prompt(messages, sides=[call("Edit", **made)])
    assert ids == []
    assert "what the sides name" in str(cut.refusal)


def test_a_prompt_that_cannot_hold_what_is_needed_is_refused_with_the_reason(make):
    replaced = "\n".join(f"line {i}: " + words(12, i) for i in range(30))
    messages = [*session(2)[:-1], result(replaced, 1)]
    edit = call("Edit", file_path="src/cart.py", old_string=replaced, new_string="x")
    renderer = make("qwen2_5", 300)
    ids, cut = renderer.prompt(messages, sides=[edit])
    assert ids == []
    assert "what the sides name take more than 300 tokens" in str(cut.refusal)
    with pytest.raises(DatasetError, match="does not fit into max_prompt_tokens"):
        renderer.prompt_ids(messages, sides=[edit])
    assert len(renderer.prompt_ids(messages)) <= 300


def test_long_results_are_shortened_in_the_middle_and_marked_before_steps_go(make):
    messages = session(3, 400)
    renderer = make("qwen2_5", 1200)
    ids, cut = renderer.prompt(messages)
    text = renderer.tokenizer.decode(ids)
    assert cut.n_dropped_steps == 0
    assert cut.n_shortened_texts >= 2
    assert text.count("characters left out]") == cut.n_shortened_texts
    for step in range(3):
        assert f"part {step}: the" in text.replace("part 1: cart", "part 1: the").replace(
            "part 2: sums", "part 2: the"
        )


def test_tools_are_described_shorter_before_the_session_goes(make):
    tools = [
        {**tool, "function": {**tool["function"], "description": words(400)}} for tool in TOOLS
    ]
    renderer = make("qwen2_5", 1200)
    ids, cut = renderer.prompt(session(2), tools)
    text = renderer.tokenizer.decode(ids)
    assert cut.n_smaller_tools == 3
    assert cut.n_dropped_steps == 0
    assert all(f'"name": "{name}"' in text for name in ("Read", "Edit", "Bash"))
    assert "round the totals" in text


def test_a_tail_is_the_last_tokens_and_a_hint_comes_on_top(make):
    messages = session(12)
    whole = make("qwen2_5", 100_000).prompt_ids(messages)
    tail = make("qwen2_5", 100, window="tail")
    ids, cut = tail.prompt(messages)
    assert ids == whole[-100:]
    assert cut.n_dropped_tokens == len(whole) - 100
    hinted, _ = tail.prompt(messages, hint="Read it first.")
    assert hinted[:90] == ids[:90]
    assert "Read it first." in tail.tokenizer.decode(hinted[90:])


def test_needs_are_read_from_every_kind_of_row_and_form():
    edit = call("Edit", file_path="a.py", old_string="x = 1", new_string="y")
    many = {"edits": [{"old_string": "y = 2", "new_string": "z"}], "path": "b.py"}
    nested = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "Many", "arguments": many}}],
    }
    row = {"chosen": [edit], "rejected": [nested], "consensus": None}
    assert needs_of(sides_of(row)) == {
        "texts": ["a.py", "b.py", "x = 1", "y = 2"],
        "tools": ["Edit", "Many"],
    }
    assert needs_of(sides_of({"consensus": edit}))["texts"] == ["a.py", "x = 1"]

"""Say what the trainer makes of chat templates: native calls, calls as text, or refused.

    python benchmarks/templates.py FOLDER

FOLDER has files `NAME.jinja`, such as `models/templates` of llama.cpp, which is in the source archive of
`llama-cpp-python` (`pip download --no-deps --no-binary llama-cpp-python llama-cpp-python`). Native templates
are held against the whole conversation, token for token, for eight prompts and answers.
"""

import re
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from trainer.data.rendering import Renderer, template_message
from trainer.data.template import TemplateFeatures, numbered
from trainer.data.tiny import train_tokenizer
from trainer.errors import DatasetError, TrainerConfigError

SPECIAL = re.compile(
    r"<\|[^<>|\s]{1,40}\|>|<｜[^｜]{1,40}｜>|<[a-z_]+\|>|<\|[a-z_]+>|<(?:start|end)_of_\w+>|</assistant>"
    r"|\[/?[A-Z_]{3,20}\]|\]~b\]|\]~!b\[|\[e~\["
)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """Return a message with one call."""
    function = {"name": name, "arguments": arguments}
    calls = [{"type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "description": "Where."}},
            },
        },
    }
    for name in ("Read", "Edit")
]
ASKED = [{"role": "user", "content": "Fix src/cart.py."}]
LOOKED = [*ASKED, call("Read", path="src/cart.py"), {"role": "tool", "content": "total"}]
LATER = [*LOOKED, {"role": "assistant", "content": "Which?"}, {"role": "user", "content": "One."}]
EDITED = [*LOOKED, call("Edit", path="src/cart.py", n=3), {"role": "tool", "content": "done"}]
PROMPTS = (ASKED, LOOKED, LATER, EDITED)
ANSWERS = ({"role": "assistant", "content": "It is right now."}, call("Read", path="src/tax.py"))


def tokenizer_of(template: str) -> Any:
    """Return a small tokenizer with a template, and with the special tokens in it."""
    tiny = train_tokenizer(["a text"], vocab_size=300).backend_tokenizer
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tiny.to_str()),
        bos_token="<s>",
        eos_token=next((t for t in ("<|im_end|>", "</assistant>") if t in template), "</s>"),
        pad_token="<|endoftext|>",
        additional_special_tokens=sorted(set(SPECIAL.findall(template))),
    )
    made.chat_template = template
    return made


def given(messages: list[dict[str, Any]], features: TemplateFeatures) -> list[dict[str, Any]]:
    """Return messages with ids and arguments in the form that a template wants."""
    ready = []
    for message in numbered([template_message(one) for one in messages]):
        calls = message.get("tool_calls")
        form = features.call_form.given
        if calls:
            told = [form(**one["function"], number=int(one["id"])) for one in calls]
            message = {**message, "tool_calls": told}
        elif message["role"] == "tool":
            name = form(message["name"], {}, int(message["tool_call_id"]))["id"]
            message = {**message, "tool_call_id": name}
        ready.append(message)
    return ready


def verdict(template: str) -> str:
    """Return what the trainer makes of a template, in a few words."""
    try:
        renderer = Renderer(tokenizer=tokenizer_of(template), max_prompt_tokens=99_999)
    except TrainerConfigError as error:
        return f"refused: {str(error).partition(': ')[2].partition('. ')[0]}"
    features = renderer.features
    if not features.has_tool_calls:
        return "calls as text"
    own, n_equal = tokenizer_of(template), 0
    options = {"tools": TOOLS if features.has_tools else None, "return_dict": False}
    options |= features.options
    for prompt in PROMPTS:
        for answer in ANSWERS:
            try:
                whole = own.apply_chat_template(given([*prompt, answer], features), **options)
                ours = renderer.prompt_ids(prompt, options["tools"])
                ours = ours + renderer.response_ids(answer, after=prompt)
            except DatasetError:
                continue
            n_equal += whole[: len(ours)] == ours or whole == ours[:-1]
    told = f"native, {n_equal} of 8 equal to the whole conversation"
    return told + (f", with {dict(features.options)}" if features.options else "")


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).glob("*.jinja")):
        print(f"{path.stem}: {verdict(path.read_text('utf-8'))}")

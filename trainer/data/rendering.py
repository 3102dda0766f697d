"""Messages to token ids: the same response tokens behind every context.

A response is rendered on its own, behind the template's generation prompt, so its ids do not depend
on what stands before it. A prompt longer than the budget loses its oldest messages: whole messages,
a call together with its results, at coarse cut points, so that the states of one session keep
common prefixes.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainer.errors import DatasetError
from trainer.types import Message, Tool

logger = logging.getLogger(__name__)

_PROBE: list[Message] = [{"role": "user", "content": "?"}]


class Tokenizer(Protocol):
    """What this room needs of a Hugging Face tokenizer."""

    pad_token_id: Any
    eos_token: Any
    eos_token_id: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Render messages as text."""

    def __call__(self, text: Any, **options: Any) -> Any:
        """Tokenize text."""

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Turn ids into text."""


@dataclass(kw_only=True)
class Renderer:
    """Renders prompts and responses of one tokenizer under a token budget."""

    tokenizer: Tokenizer
    max_prompt_tokens: int = 1024
    max_response_tokens: int = 256
    with_tools: bool = True
    """Whether tool schemas are rendered; real schemas alone can pass a small budget."""
    n_cut_prompts: int = field(default=0, init=False)
    n_cut_responses: int = field(default=0, init=False)
    _response_text: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def prompt_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        hint: str | None = None,
    ) -> list[int]:
        """Render a conversation up to and including the generation prompt, as ids.

        `hint` becomes one more user message at the very end, so that the hinted context starts
        with the same tokens as the plain one. It comes on top of the budget.
        """
        kept = self.within_budget(messages, tools)
        if hint:
            kept = [*kept, {"role": "user", "content": hint}]
        ids = self._ids(self._text(kept, tools, with_generation_prompt=True))
        budget = self.max_prompt_tokens if not hint else len(ids)
        return ids[-budget:]

    def response_ids(self, action: Message | Sequence[Message]) -> list[int]:
        """Render an assistant action as ids, ending with the template's end of turn.

        Raises:
            DatasetError: the chat template does not render a response behind its own generation
                prompt.
        """
        messages = [action] if isinstance(action, Mapping) else list(action)
        rendered = [template_message(message) for message in messages]
        key = json.dumps(rendered, sort_keys=True, default=str)
        if key not in self._response_text:
            self._response_text[key] = self._render_response(rendered)
        ids = self._ids(self._response_text[key])
        if len(ids) > self.max_response_tokens:
            self.n_cut_responses += 1
        return ids[: self.max_response_tokens]

    def _render_response(self, messages: list[Message]) -> str:
        before = self._text(_PROBE, None, with_generation_prompt=True)
        text = self._text([*_PROBE, *messages], None, with_generation_prompt=False)
        if not text.startswith(before):
            raise DatasetError(
                "the chat template does not put a response right behind its generation prompt: "
                "use a training template (trl.chat_template_utils.get_training_chat_template)"
            )
        response = text[len(before) :]
        eos = self.tokenizer.eos_token
        return response[: response.rindex(eos) + len(eos)] if eos in response else response + eos

    def within_budget(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> list[Message]:
        """Return the messages that a prompt keeps, in the template's form."""
        shortened = [
            _shortened(template_message(message), 2 * self.max_prompt_tokens)
            for message in messages
        ]
        blocks = _blocks(shortened)
        sizes = [
            len(self._ids(self._text(block, None, with_generation_prompt=False)))
            for block in blocks
        ]
        fixed = len(self._ids(self._text(_PROBE, tools, with_generation_prompt=True)))
        excess = sum(sizes) + fixed - self.max_prompt_tokens
        if excess <= 0:
            return shortened
        self.n_cut_prompts += 1
        # Rounding the cut up to half a budget makes it move rarely as a session grows.
        step = max(self.max_prompt_tokens // 2, 1)
        to_drop = -(-excess // step) * step
        dropped = 0
        while len(blocks) > 1 and dropped < to_drop:
            dropped += sizes.pop(0)
            blocks.pop(0)
        return [message for block in blocks for message in block]

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        *,
        with_generation_prompt: bool,
    ) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools and self.with_tools else None,
            add_generation_prompt=with_generation_prompt,
            tokenize=False,
        )

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def template_message(message: Message) -> Message:
    """Turn a message into what chat templates want: text content, call arguments as an object."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text", "") if isinstance(part, Mapping) else part for part in content]
        content = "\n".join(str(part) for part in parts)
    rendered: Message = {"role": message["role"], "content": content or ""}
    if calls := message.get("tool_calls"):
        rendered["tool_calls"] = [
            {"type": "function", "function": _with_object_arguments(call["function"])}
            for call in calls
        ]
    return rendered


def _with_object_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {"arguments": arguments}
    return {"name": function.get("name"), "arguments": arguments or {}}


def _blocks(messages: list[Message]) -> list[list[Message]]:
    """Group messages so that a tool result stays with the call before it."""
    blocks: list[list[Message]] = []
    for message in messages:
        if message["role"] == "tool" and blocks:
            blocks[-1].append(message)
        else:
            blocks.append([message])
    return blocks


def _shortened(message: Message, max_chars: int) -> Message:
    content = message["content"]
    if len(content) <= max_chars:
        return message
    half = max_chars // 2
    left_out = len(content) - 2 * half
    text = f"{content[:half]}\n[{left_out} characters left out]\n{content[-half:]}"
    return {**message, "content": text}

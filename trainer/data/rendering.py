"""Messages to token ids: the same response tokens behind every context.

A response is rendered on its own, behind the template's generation prompt, so its ids do not depend
on what stands before it. What the model's chat template has no place for is rendered as text, see
`trainer.data.template`. A prompt longer than the budget keeps its system message and loses its
oldest messages: whole messages, a call together with its results, at coarse cut points, so that the
states of one session keep common prefixes.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.data.template import (
    QUESTION,
    TemplateFeatures,
    Tokenizer,
    in_order,
    plain_messages,
    prepare_tokenizer,
    rendered,
    special_token_pattern,
    with_object_arguments,
    without_special_tokens,
)
from trainer.data.tokens import (
    Request,
    TokenStore,
    key_of,
    prompt_request,
    response_request,
)
from trainer.errors import DatasetError
from trainer.types import Message, Tool

logger = logging.getLogger(__name__)


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
    features: TemplateFeatures = field(init=False)
    """What the tokenizer's chat template has a place for."""
    special_tokens: re.Pattern[str] | None = field(init=False, repr=False)
    """Special tokens as text: in a session's own words they are broken up."""
    store: TokenStore = field(default_factory=TokenStore, init=False, repr=False)
    """What was rendered before; see `trainer.data.tokens`."""
    _response_text: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _sizes: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    """Tokens of messages and tools: a state has those of the states before it, and some more."""

    def __post_init__(self) -> None:
        """Ask the template.

        Raises:
            TrainerConfigError: the tokenizer has no end token.
        """
        self.features = prepare_tokenizer(self.tokenizer)
        self.special_tokens = special_token_pattern(self.tokenizer)

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

        Raises:
            DatasetError: the chat template refuses the messages.
        """
        request = prompt_request(messages, tools if self.with_tools else None, hint)
        ids, is_cut = self.store.get(request) or self.render(request)
        self.n_cut_prompts += int(is_cut)
        return ids

    def response_ids(self, action: Message | Sequence[Message]) -> list[int]:
        """Render an assistant action as ids, ending with the template's end of turn.

        Raises:
            DatasetError: the chat template does not render a response behind its own generation
                prompt.
        """
        request = response_request([action] if isinstance(action, Mapping) else action)
        ids, is_cut = self.store.get(request) or self.render(request)
        self.n_cut_responses += int(is_cut)
        return ids

    @property
    def identity(self) -> str:
        """What the ids of a text depend on: tokenizer, template and budgets, as one line."""
        tokenizer: Any = self.tokenizer
        parts = [
            tokenizer.backend_tokenizer.to_str(),
            tokenizer.chat_template,
            tokenizer.eos_token,
            self.max_prompt_tokens,
            self.max_response_tokens,
            self.with_tools,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def render(self, request: Request) -> tuple[list[int], bool]:
        """Render a prompt or a response, past the store; and say whether a budget cut it."""
        if "tools" not in request:
            return self._render_action(request["messages"])
        tools, hint = request["tools"], request["hint"]
        kept, is_cut = self._fitted(request["messages"], tools)
        if hint:
            kept = [*kept, {"role": "user", "content": hint}]
        ids = self._ids(self._text(kept, tools, with_generation_prompt=True))
        excess = len(ids) - self.max_prompt_tokens
        if hint or excess <= 0:
            return ids, is_cut
        # One message alone is too long: the system message stays, as far as half the budget goes.
        n_kept = 0
        if kept[0]["role"] == "system":
            n_kept = min(self._size(kept[:1]), self.max_prompt_tokens // 2)
        return ids[:n_kept] + ids[n_kept + excess :], is_cut

    def _render_action(self, action: Sequence[Message]) -> tuple[list[int], bool]:
        messages = [self._template_message(message) for message in action]
        key = json.dumps(messages, sort_keys=True, default=str)
        if key not in self._response_text:
            self._response_text[key] = self._render_response(messages)
        ids = self._ids(self._response_text[key])
        return ids[: self.max_response_tokens], len(ids) > self.max_response_tokens

    def _render_response(self, messages: list[Message]) -> str:
        before = self._text([QUESTION], None, with_generation_prompt=True)
        plain = plain_messages(messages, None, self.features)
        text = self._text([QUESTION, *plain], None, with_generation_prompt=False)
        if not text.startswith(before):
            raise DatasetError(
                "the chat template does not put a response right behind its generation prompt: "
                "use a training template (trl.chat_template_utils.get_training_chat_template)"
            )
        response, features = text[len(before) :], self.features
        if features.tail and response.endswith(features.tail):
            return response[: len(response) - len(features.tail)] + features.ending
        eos = self.tokenizer.eos_token
        return response[: response.rindex(eos) + len(eos)] if eos in response else response + eos

    def within_budget(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> list[Message]:
        """Return the messages that a prompt keeps, in the template's form."""
        kept, is_cut = self._fitted(messages, tools)
        self.n_cut_prompts += int(is_cut)
        return kept

    def _fitted(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None
    ) -> tuple[list[Message], bool]:
        shortened = [
            _shortened(self._template_message(message), 2 * self.max_prompt_tokens)
            for message in messages
        ]
        tools = tools if self.with_tools else None
        blocks = [plain_messages(block, None, self.features) for block in _blocks(shortened)]
        if tools and not self.features.has_tools:
            n_system = int(bool(shortened) and shortened[0]["role"] == "system")
            system = [message for block in blocks[:n_system] for message in block]
            blocks[:n_system] = [plain_messages(system, tools, self.features)]
        sizes = [self._size(block) for block in blocks]
        fixed = self._remembered({"tools": tools}, lambda: self._fixed_size(tools))
        excess = sum(sizes) + fixed - self.max_prompt_tokens
        # What the agent was told to be stays; the rest of a long session is cut from its start.
        n_system = int(bool(blocks) and blocks[0][0]["role"] == "system")
        if excess > 0:
            # Rounding the cut up to half a budget makes it move rarely as a session grows.
            step = max(self.max_prompt_tokens // 2, 1)
            to_drop = -(-excess // step) * step
            dropped = 0
            while len(blocks) > n_system + 1 and dropped < to_drop:
                dropped += sizes.pop(n_system)
                blocks.pop(n_system)
        return [message for block in blocks for message in block], excess > 0

    def _size(self, block: Sequence[Message]) -> int:
        """Count the tokens of messages; roughly, where the template refuses them on their own."""
        return self._remembered({"messages": block}, lambda: self._block_size(block))

    def _remembered(self, request: Request, measure: Callable[[], int]) -> int:
        key = key_of(request)
        if key not in self._sizes:
            self._sizes[key] = measure()
        return self._sizes[key]

    def _fixed_size(self, tools: Sequence[Tool] | None) -> int:
        return len(self._ids(self._text([QUESTION], tools, with_generation_prompt=True)))

    def _block_size(self, block: Sequence[Message]) -> int:
        text = None
        if self.features.has_free_order and self.features.has_system:
            text = rendered(self.tokenizer, block)
        if text is None:
            text = "\n".join(f"{message['role']}: {message['content']}\n\n" for message in block)
        return len(self._ids(text))

    def _template_message(self, message: Message) -> Message:
        return without_special_tokens(template_message(message), self.special_tokens)

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        *,
        with_generation_prompt: bool,
    ) -> str:
        native = tools if self.with_tools and self.features.has_tools else None
        ordered = in_order(messages, self.features)
        text = rendered(
            self.tokenizer, ordered, tools=native, with_generation_prompt=with_generation_prompt
        )
        if text is None:
            roles = ", ".join(message["role"] for message in ordered)
            raise DatasetError(f"the chat template refuses messages of the roles {roles}")
        return text

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
            {"type": "function", "function": with_object_arguments(call["function"])}
            for call in calls
        ]
    return rendered


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

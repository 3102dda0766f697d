"""Render messages to token ids, with the same response tokens after every context.

A response is rendered alone, after the template's generation prompt, so its ids don't depend on the
context. Together with its prompt it is the whole conversation as the model's own chat template
renders it, up to the token that ends the turn. Parts that the template can't show are rendered as
text (see `trainer.data.template`). A prompt that fits into the budget isn't changed. `trainer.data.budget`
says what a longer one keeps.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from trainer.data.budget import Cut, Fitted, Fitting, sides_of
from trainer.data.template import (
    QUESTION,
    TemplateFeatures,
    Tokenizer,
    calls_text,
    in_order,
    numbered,
    plain_messages,
    prepare_tokenizer,
    rendered,
    response_in,
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
from trainer.data.types import Message, Tool
from trainer.errors import DatasetError

logger = logging.getLogger(__name__)

RENDERING_FILE = "rendering.json"
"""File in a checkpoint that says how its training rendered prompts."""

RULES_VERSION = 5
"""Version of the rules of rendering and cutting. Stored token ids of an older version are rendered again."""


@dataclass(kw_only=True)
class Renderer:
    """The renderer of prompts and responses for one tokenizer and token budget."""

    tokenizer: Tokenizer
    max_prompt_tokens: int = 1024
    max_response_tokens: int = 256
    with_tools: bool = True
    """Whether to render tool schemas. Real schemas alone can exceed a small budget."""
    window: str = "decision"
    """The part of a long prompt to keep: `decision` (see `trainer.data.budget`), or `tail`, only
    its last tokens, for models with a short context."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Options of the chat template. By default, thinking is off."""
    features: TemplateFeatures = field(init=False)
    """The features of the tokenizer's chat template."""
    special_tokens: re.Pattern[str] | None = field(init=False, repr=False)
    """Special tokens as text. If a session's text contains them, they are broken up."""
    store: TokenStore = field(default_factory=TokenStore, init=False, repr=False)
    """Stored token ids; see `trainer.data.tokens`."""
    _response_text: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _sizes: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    """Tokens of messages and tools: a state has those of the states before it, and some more."""

    def __post_init__(self) -> None:
        self.features = prepare_tokenizer(self.tokenizer, self.chat_template_kwargs)
        self.special_tokens = special_token_pattern(self.tokenizer)
        self.tokenizer("")  # which forgets how a tokenizer's file cuts and fills texts
        self._encode = self.tokenizer.backend_tokenizer.encode_batch_fast

    def prompt_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        hint: str | None = None,
        sides: Sequence[Message] = (),
    ) -> list[int]:
        """Render a conversation up to and including the generation prompt, as ids.

        Args:
            messages: the conversation.
            tools: definitions in OpenAI's form.
            hint: one more user message at the end, so that the hinted context starts with the
                tokens of the plain one. It isn't part of the budget.
            sides: actions that are scored after the prompt. The parts that they need stay.

        Raises:
            DatasetError: the chat template refuses the messages, or the required parts don't fit.
        """
        ids, cut = self.prompt(messages, tools, hint=hint, sides=sides)
        if cut.refusal:
            raise DatasetError(f"a prompt does not fit into max_prompt_tokens: {cut.refusal}")
        return ids

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        hint: str | None = None,
        sides: Sequence[Message] = (),
    ) -> tuple[list[int], Cut]:
        """Return the ids of `prompt_ids`, or no ids if it would raise, and the cuts."""
        request = prompt_request(messages, tools if self.with_tools else None, hint, sides)
        return self.store.get(request) or self.render(request)

    def row_prompt(
        self, row: Mapping[str, Any], *, hint: str | None = None
    ) -> tuple[list[int], Cut]:
        """Return the ids and cuts of a row's prompt, which keeps what the row's sides need."""
        return self.prompt(row["prompt"], row.get("tools"), hint=hint, sides=sides_of(row))

    def row_prompt_ids(self, row: Mapping[str, Any], *, hint: str | None = None) -> list[int]:
        """Return the ids of `row_prompt`, or raise what `prompt_ids` does."""
        return self.prompt_ids(row["prompt"], row.get("tools"), hint=hint, sides=sides_of(row))

    def side_ids(self, row: Mapping[str, Any], side: str) -> list[int]:
        """Return the ids of an action of a row, after the row's prompt."""
        return self.response_ids(row[side], after=row["prompt"])

    def response_ids(
        self, action: Message | Sequence[Message], *, after: Sequence[Message] = ()
    ) -> list[int]:
        """Render an assistant action as ids, ending with the template's end of turn.

        Args:
            action: the action.
            after: its prompt, for templates in which a call's text has its number.
        """
        return self.response(action, after=after)[0]

    def response(
        self, action: Message | Sequence[Message], *, after: Sequence[Message] = ()
    ) -> tuple[list[int], Cut]:
        """Return the ids of `response_ids`, and the cuts."""
        request = response_request([action] if isinstance(action, Mapping) else action, after)
        return self.store.get(request) or self.render(request)

    @property
    def identity(self) -> str:
        """Return, as one line, everything that decides the ids: tokenizer, template, and budgets."""
        tokenizer: Any = self.tokenizer
        parts = [
            tokenizer.backend_tokenizer.to_str(),
            tokenizer.chat_template,
            tokenizer.eos_token,
            self.max_prompt_tokens,
            self.max_response_tokens,
            self.with_tools,
            self.window,
            RULES_VERSION,
            dict(self.features.options),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def render(self, request: Request) -> tuple[list[int], Cut]:
        """Render a prompt or a response without the store, and return the cuts too."""
        if "tools" not in request:
            return self._render_action(request["messages"], request["n_calls_before"])
        hint = request["hint"]
        if self.window == "tail":
            return self._tail(request)
        fitted, ids = self._fitted(request["messages"], request["tools"], request.get("needs"))
        if fitted.cut.refusal and not (request.get("needs") or {}).get("texts"):
            return self._tail(request)  # nothing is asked for that this could lose
        if fitted.cut.refusal:
            return [], fitted.cut
        if hint:
            ids = self._prompt_of([*fitted.messages, _hint_message(hint)], fitted.tools)
        return ids, fitted.cut

    def _tail(self, request: Request) -> tuple[list[int], Cut]:
        messages = self._ready(request["messages"])
        ids = self._prompt_of(messages, request["tools"])
        excess = max(len(ids) - self.max_prompt_tokens, 0)
        if request["hint"]:
            ids = self._prompt_of([*messages, _hint_message(request["hint"])], request["tools"])
        return ids[excess:], Cut(n_dropped_tokens=excess)

    def _render_action(self, action: Sequence[Message], first: int) -> tuple[list[int], Cut]:
        messages = self._ready(action, first=first if self.features.shows_ids else 0)
        if "</think>" in str(self.tokenizer.chat_template):
            # It would be read as the thought that the prompt has ended already.
            messages = without_special_tokens(messages, re.compile("</?think>"))
        key = json.dumps(messages, sort_keys=True, default=str)
        if key not in self._response_text:
            self._response_text[key] = self._render_response(messages)
        ids = self._ids(self._response_text[key])
        n_dropped = max(len(ids) - self.max_response_tokens, 0)
        return ids[: self.max_response_tokens], Cut(n_dropped_tokens=n_dropped)

    def _render_response(self, messages: list[Message]) -> str:
        before = self._text([QUESTION], None, with_generation_prompt=True)
        plain = plain_messages(messages, None, self.features)
        text = self._text([QUESTION, *plain], None, with_generation_prompt=False)
        is_call = bool(plain[-1].get("tool_calls"))
        ending = self.features.call_ending if is_call else self.features.text_ending
        response = response_in(text, before)
        if response is None or not response.endswith(ending.dropped):
            raise DatasetError(
                f"the chat template renders an answer in another form: {text[-200:]!r}"
            )
        return response.removesuffix(ending.dropped) + ending.added

    def within_budget(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages that a prompt without tools keeps, in the template's form.

        Raises:
            DatasetError: the required parts don't fit.
        """
        fitted, _ = self._fitted(messages, None, None)
        if fitted.cut.refusal:
            raise DatasetError(f"a prompt does not fit into max_prompt_tokens: {fitted.cut}")
        return plain_messages(fitted.messages, None, self.features)

    def _fitted(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        needs: Mapping[str, Sequence[str]] | None,
    ) -> tuple[Fitted, list[int]]:
        """Keep what fits, by counting what was rendered: sizes that add up are only a guess."""
        ready = self._ready(messages)
        n_system = int(bool(ready) and ready[0]["role"] == "system")
        budget = self.max_prompt_tokens
        named: dict[str, Any] = without_special_tokens(dict(needs or {}), self.special_tokens)
        parts = ready[:n_system], _blocks(ready[n_system:]), tools
        fitting = Fitting(*parts, named, self)
        # What is far too long need not be rendered to be known as such.
        if fitting.whole_size <= 1.25 * budget + 64 or self._may_shrink(ready):
            ids = self._prompt_of(ready, tools)
            if len(ids) <= budget:
                return Fitted(ready, list(tools or ()) or None, Cut(), len(ids)), ids
        return self._counted(fitting) or (Fitted([], None, fitting.refusal(budget), 0), [])

    def _counted(self, fitting: Fitting) -> tuple[Fitted, list[int]] | None:
        """Look for the most that fits by what is counted; what adds up is too much or too little."""
        budget = self.max_prompt_tokens
        best: tuple[Fitted, list[int]] | None = None
        low, high, target = 0, 3 * budget // 2, budget
        for _ in range(8):
            fitted = fitting.within(target, whole=budget)
            if fitted is None:
                low, following = target, (target + high) // 2
            else:
                ids = self._prompt_of(fitted.messages, fitted.tools)
                if len(ids) > budget:
                    high = target
                elif best is None or len(ids) > len(best[1]):
                    best = fitted, ids
                # Corrected only where it matters: each state would be corrected in another way.
                is_close = fitted.n_estimated - budget // 20 < len(ids) <= budget
                if is_close and (high > budget or len(ids) > 0.85 * budget):
                    break
                if is_close:
                    low = target
                following = budget + fitted.n_estimated - len(ids)
            if not low < following < high:
                following = (low + high) // 2
            if following in (low, target, high):
                break
            target = following
        return best

    def _may_shrink(self, messages: Sequence[Message]) -> bool:
        """Return whether the template leaves something out of messages that follow each other."""
        return not self.features.keeps_thinking and any(
            "</think>" in message["content"] for message in messages
        )

    def _prompt_of(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[int]:
        plain = plain_messages(messages, tools, self.features)
        return self._ids(self._text(plain, tools, with_generation_prompt=True))

    # -- sizes -----------------------------------------------------------------------------------

    def text_size(self, text: str) -> int:
        """Count the tokens of a text."""
        return self._remembered(text, lambda: len(self._ids(text)))

    def fixed_size(self, system: Sequence[Message], tools: Sequence[Tool] | None) -> int:
        """Count the tokens of a prompt without any step."""

        def measure() -> int:
            return len(self._prompt_of([*system, QUESTION], tools)) - self._question_size

        return self._remembered(key_of({"messages": system, "tools": tools}), measure)

    def block_size(self, block: Sequence[Message]) -> int:
        """Count the tokens of messages. The count is rough if the template refuses them alone."""
        return self._remembered(key_of({"messages": block}), lambda: self._block_size(block))

    def _remembered(self, key: str, measure: Callable[[], int]) -> int:
        if key not in self._sizes:
            self._sizes[key] = measure()
        return self._sizes[key]

    @cached_property
    def _before_block(self) -> int:
        # A template that makes up a system message does so before each conversation.
        return len(self._ids(self._rendered(QUESTION)))

    @cached_property
    def _question_size(self) -> int:
        if not self.features.has_free_order:
            return 0
        both = self._rendered(QUESTION, QUESTION)
        return len(self._ids(both)) - self._before_block if both else 0

    def _block_size(self, block: Sequence[Message]) -> int:
        plain = plain_messages(block, None, self.features)
        if self.features.has_free_order and (text := self._rendered(QUESTION, *plain)):
            return len(self._ids(text)) - self._before_block
        parts = (
            f"{message['role']}: {message['content']}{calls_text(message.get('tool_calls') or ())}"
            for message in plain
        )
        return len(self._ids("\n\n".join(parts)))

    def _rendered(self, *messages: Message) -> str:
        """Render messages as they are, as an empty text if the template refuses them."""
        with suppress(DatasetError):
            return rendered(self.tokenizer, messages, options=self.features.options)
        return ""

    def _ready(self, messages: Sequence[Message], *, first: int = 0) -> list[Message]:
        ready = numbered([template_message(message) for message in messages], first=first)
        return without_special_tokens(ready, self.special_tokens)

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        *,
        with_generation_prompt: bool,
    ) -> str:
        return rendered(
            self.tokenizer,
            in_order(messages, self.features),
            tools=tools if self.with_tools and self.features.has_tools else None,
            with_generation_prompt=with_generation_prompt,
            options=self.features.options,
        )

    def _ids(self, text: str) -> list[int]:
        # Without places in the text, which nobody asks for, this takes two thirds of the time.
        return self._encode([text], add_special_tokens=False)[0].ids


def template_message(message: Message) -> Message:
    """Convert a message to a template's form: text content, and call arguments as an object."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text", "") if isinstance(part, Mapping) else part for part in content]
        content = "\n".join(str(part) for part in parts)
    rendered: Message = {"role": message["role"], "content": content or ""}
    if calls := message.get("tool_calls"):
        rendered["tool_calls"] = [
            {"id": call.get("id"), "function": with_object_arguments(call["function"])}
            for call in calls
        ]
    if message["role"] == "tool":
        rendered["tool_call_id"] = message.get("tool_call_id")
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


def _hint_message(hint: str) -> Message:
    return {"role": "user", "content": hint}

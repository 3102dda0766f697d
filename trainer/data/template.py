"""Find out what a model's chat template can show, and write the rest as plain text.

A template silently drops what its author did not provide for. Many can't show tool calls, tool
results, or a list of tools. Then both sides of a pair can become the same tokens, and nothing is
learned. So this module renders test words that no template contains. Parts whose words don't come
back are written into the messages as text, in the same form for prompts, both sides of a pair, and
generation:

- a tool call: `<tool_call>`, the JSON object with `name` and `arguments`, `</tool_call>`, on
  separate lines after the message's text; - a tool's result: a user message with `<tool_response>`
  and `</tool_response>` around it; - the list of tools: their JSON schemas, one a line between
  `<tools>` and `</tools>`, at the end of the system message, with the form of a call; - a system
  message: in front of the first user message; - consecutive messages of one role, if roles must
  alternate: one message.

A tokenizer without a usable template gets `PLAIN_TEMPLATE`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2.exceptions import TemplateError

from trainer.errors import DatasetError, TrainerConfigError
from trainer.types import Message, Tool

PLAIN_TEMPLATE = r"""
{{- bos_token if bos_token is defined and bos_token else '' -}}
{%- for message in messages -%}
  {{- '### ' + message.role + '\n' + message.content + eos_token + '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '### assistant\n' -}}
{%- endif -%}
""".strip()
"""The template for a tokenizer without one: a heading for each role, and the end token after each message."""

CALL_FORM = '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
LEFT_OUT = "[earlier messages are left out]"

QUESTION: Message = {"role": "user", "content": "?"}
_WORDS = {
    name: f"zq{name}xj" for name in ("system", "tool", "call", "value", "result", "answer", "then")
}
"""Words that no template contains: what comes back was rendered."""


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that this package needs."""

    chat_template: Any
    pad_token: Any
    pad_token_id: Any
    eos_token: Any
    eos_token_id: Any
    all_special_tokens: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Render messages as text."""

    def __call__(self, text: Any, **options: Any) -> Any:
        """Tokenize text."""

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Turn ids into text."""


@dataclass(frozen=True, kw_only=True)
class TemplateFeatures:
    """The features of a chat template, found by rendering."""

    puts_response_behind_prompt: bool
    """Whether an answer comes right after the generation prompt, as in generation."""
    has_system: bool
    has_tools: bool
    has_tool_calls: bool
    has_parallel_calls: bool
    """Whether a message may have several calls. Llama 3.1's template refuses them."""
    has_tool_results: bool
    has_free_order: bool
    """Whether roles need not alternate."""
    keeps_prefix: bool
    """Whether the tokens of earlier messages never depend on later ones. Otherwise prefix trees share less."""
    keeps_thinking: bool
    has_default_system: bool
    """Whether the template adds a system message of its own if there is none."""
    ending: str
    """The text after an answer, up to and including the token that ends the turn."""
    tail: str
    """The whole text after an answer."""

    def missing(self) -> dict[str, str]:
        """Return the parts that the template can't show, and how each is written instead."""
        plain = {
            "has_system": "system messages go in front of the first user message",
            "has_tools": "tools are listed in the system message",
            "has_tool_calls": "tool calls are written as text",
            "has_parallel_calls": "several calls in one message are written as text",
            "has_tool_results": "tool results are user messages",
            "has_free_order": "neighbours of one role become one message",
        }
        return {name: how for name, how in plain.items() if not getattr(self, name)}


def prepare_tokenizer(tokenizer: Any) -> TemplateFeatures:
    """Add to a tokenizer the parts it lacks: a template, an end token of turns, or a pad token.

    The additions are saved with the tokenizer, so a trained model generates in the form of its
    training.

    Raises:
        TrainerConfigError: the tokenizer has neither an end token nor a pad token.
    """
    if tokenizer.eos_token is None and tokenizer.pad_token is None:
        raise TrainerConfigError(
            "the tokenizer has neither an end token nor a pad token: set eos_token in its "
            "tokenizer_config.json"
        )
    if tokenizer.eos_token is None:
        tokenizer.eos_token = tokenizer.pad_token
    if not getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = PLAIN_TEMPLATE
    features = template_features(tokenizer)
    if not features.puts_response_behind_prompt:
        tokenizer.chat_template = PLAIN_TEMPLATE
        features = template_features(tokenizer)
    end = next((t for t in special_tokens(tokenizer) if features.ending.endswith(t)), None)
    if end is not None and end != tokenizer.eos_token:
        tokenizer.eos_token = end  # what ends a turn, not what ends a text
    if tokenizer.pad_token is None:
        # Masks say what is padding, so that any token will do.
        tokenizer.pad_token = tokenizer.eos_token
    return features


def template_features(tokenizer: Tokenizer) -> TemplateFeatures:
    """Render test messages to find the features of a chat template."""
    w = _WORDS
    answer = {"role": "assistant", "content": w["answer"]}
    call = {"type": "function", "function": {"name": w["call"], "arguments": {"p": w["value"]}}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    again_called = {
        "type": "function",
        "function": {"name": w["call"], "arguments": {"p": w["then"]}},
    }
    result = {"role": "tool", "content": w["result"]}
    schema = {"type": "object", "properties": {"p": {"type": "string", "description": "?"}}}
    tool = {
        "type": "function",
        "function": {"name": w["tool"], "description": "?", "parameters": schema},
    }
    again = [QUESTION, answer, {"role": "user", "content": w["then"]}]
    thought = {"role": "assistant", "content": f"<think>{w['value']}</think>{w['answer']}"}

    def text(messages: Sequence[Message], **options: Any) -> str:
        return rendered(tokenizer, messages, **options) or ""

    before = text([QUESTION], with_generation_prompt=True)
    whole = text([QUESTION, answer])
    tail = whole.rpartition(w["answer"])[2]
    has_tool_calls = _has(text([QUESTION, calls]), w["call"], w["value"])
    return TemplateFeatures(
        puts_response_behind_prompt=bool(before) and whole.startswith(before + w["answer"]),
        has_system=_has(text([{"role": "system", "content": w["system"]}, QUESTION]), w["system"]),
        has_tools=_has(text([QUESTION], tools=[tool]), w["tool"]),
        has_tool_calls=has_tool_calls,
        has_parallel_calls=has_tool_calls
        and _has(text([QUESTION, {**calls, "tool_calls": [call, again_called]}]), w["then"]),
        # A template that knows no calls may still print any role's name: no model has learnt that.
        has_tool_results=has_tool_calls and _has(text([QUESTION, calls, result]), w["result"]),
        has_free_order=_has(text([answer, QUESTION, *again]), w["then"])
        and _has(text([QUESTION, again[-1]]), w["then"])
        and _has(text([answer, thought]), w["value"]),
        keeps_prefix=bool(whole) and text(again).startswith(whole),
        keeps_thinking=_has(text([QUESTION, thought, QUESTION]), w["value"]),
        has_default_system=_has(text([QUESTION]).partition("?")[0].lower(), "you are"),
        ending=_ending(tokenizer, tail),
        tail=tail,
    )


def _has(text: str, *words: str) -> bool:
    return all(word in text for word in words)


def _ending(tokenizer: Tokenizer, tail: str) -> str:
    """Return the tail up to and with its first special token; else the end token alone."""
    found = [(tail.index(t) + len(t), t) for t in special_tokens(tokenizer) if t in tail]
    return tail[: min(found)[0]] if found else str(tokenizer.eos_token)


def rendered(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] | None = None,
    with_generation_prompt: bool = False,
) -> str | None:
    """Render messages as text, or return None if the template refuses them."""
    try:
        return rendered_or_refused(
            tokenizer, messages, tools=tools, with_generation_prompt=with_generation_prompt
        )
    except DatasetError:
        return None


def rendered_or_refused(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] | None = None,
    with_generation_prompt: bool = False,
) -> str:
    """Render messages as text.

    Raises:
        DatasetError: the template refuses them. Contains the template's own message.
    """
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=with_generation_prompt,
            tokenize=False,
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DatasetError(
            f"the chat template refuses messages of the roles {roles}: {error!r:.200}"
        ) from error


# --- the plain form ------------------------------------------------------------------------------


def plain_messages(
    messages: Sequence[Message], tools: Sequence[Tool] | None, features: TemplateFeatures
) -> list[Message]:
    """Write the parts that the template can't show as text. The order of roles doesn't change."""
    plain = [_plain(message, features) for message in messages]
    if tools and not features.has_tools:
        listed = tools_text(tools)
        if plain and plain[0]["role"] == "system":
            plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{listed}"}
        else:
            plain.insert(0, {"role": "system", "content": listed})
    return plain


def tools_text(tools: Sequence[Tool]) -> str:
    """List tools as text, with the form of a call."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    return "\n".join(
        ["You can call these tools:", "<tools>", *lines, "</tools>", "Write a call as", CALL_FORM]
    )


def calls_text(calls: Sequence[Mapping[str, Any]]) -> str:
    """Write tool calls as text."""
    return "\n".join(
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in calls
    )


def with_object_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the function of a call with its arguments as an object, from text or an object."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {"arguments": arguments}
    return {"name": function.get("name"), "arguments": arguments or {}}


def _plain(message: Message, features: TemplateFeatures) -> Message:
    role, content = message["role"], message["content"]
    if role == "tool" and not features.has_tool_results:
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    is_native = features.has_parallel_calls if len(calls or ()) > 1 else features.has_tool_calls
    if calls and not is_native:
        parts = [content, calls_text(calls)] if content else [calls_text(calls)]
        return {"role": role, "content": "\n".join(parts)}
    return message


def in_order(messages: Sequence[Message], features: TemplateFeatures) -> list[Message]:
    """Change messages to an order that the template accepts, without dropping any.

    Call it last. It joins adjacent messages, and cuts and a hint change which messages are
    adjacent.
    """
    ordered = list(messages)
    if not features.has_system:
        ordered = list(_system_first(ordered))
    if features.has_free_order:
        return ordered
    merged: list[Message] = []
    for message in ordered:
        last = merged[-1] if merged else None
        is_plain = last is not None and not (last.get("tool_calls") or message.get("tool_calls"))
        if last is not None and is_plain and last["role"] == message["role"] != "tool":
            merged[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            merged.append(message)
    first = next((i for i, message in enumerate(merged) if message["role"] != "system"), 0)
    if merged and merged[first]["role"] == "assistant":
        merged.insert(first, {"role": "user", "content": LEFT_OUT})
    return merged


def _system_first(messages: Sequence[Message]) -> Iterator[Message]:
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message["content"])
        elif waiting and message["role"] == "user":
            yield {**message, "content": "\n\n".join([*waiting, message["content"]])}
            waiting = []
        elif waiting:
            yield {"role": "user", "content": "\n\n".join(waiting)}
            waiting = []
            yield message
        else:
            yield message
    if waiting:
        yield {"role": "user", "content": "\n\n".join(waiting)}


def special_tokens(tokenizer: Tokenizer) -> list[str]:
    """List the special tokens as text, without unused reserved ones."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = {str(t) for t in tokenizer.all_special_tokens} | {str(t) for t in added if t.special}
    return sorted(t for t in texts if t and not re.fullmatch(r"<unused\d+>", t))


def special_token_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Compile a pattern that matches the special tokens, or return None without any."""
    tokens = sorted((t for t in special_tokens(tokenizer) if len(t) > 2), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, tokens))) if tokens else None


def without_special_tokens(value: Any, pattern: re.Pattern[str] | None) -> Any:
    """Break up special tokens in the text of a session, so that they aren't read as structure."""
    if pattern is None:
        return value
    if isinstance(value, str):
        return pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", value)
    if isinstance(value, Mapping):
        return {key: without_special_tokens(entry, pattern) for key, entry in value.items()}
    if isinstance(value, list):
        return [without_special_tokens(entry, pattern) for entry in value]
    return value

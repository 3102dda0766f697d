"""Render rows by a model's own chat template, find out what it can show, and write the rest as text.

Rows are rendered as the model's maker serves it, with thinking off where the template has an option
for that. A template silently drops what its author did not provide for. Many can't show tool calls,
tool results, or a list of tools. Then both sides of a pair can become the same tokens, and nothing
is learned. So this module renders test words that no template contains. Parts whose words don't
come back are written into the messages as text, in the same form for prompts, both sides of a pair,
and generation:

- a tool call: `<tool_call>`, the JSON object with `name` and `arguments`, `</tool_call>`, on
  separate lines after the message's text;
- a tool's result: a user message with `<tool_response>` and `</tool_response>` around it;
- the list of tools: their JSON schemas, one a line between `<tools>` and `</tools>`, at the end of
  the system message, with the form of a call;
- a system message: in front of the first user message;
- consecutive messages of one role, if roles must alternate: one message.

A template is never replaced. One in which no answer follows the prompt that is served is refused.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jinja2 import meta
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainer.data.types import Message, Tool
from trainer.errors import DatasetError, TrainerConfigError

CALL_FORM = '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
LEFT_OUT = "[earlier messages are left out]"

QUESTION: Message = {"role": "user", "content": "?"}
_SYSTEM, _TOOL, _CALL, _VALUE, _RESULT, _ANSWER, _THEN = (
    f"zq{name}xj" for name in ("system", "tool", "call", "value", "result", "answer", "then")
)
"""Words that no template contains: what comes back was rendered."""
_THINKING = ("enable_thinking", "thinking")
"""Names under which templates take the option to think before an answer."""


Tokenizer = Any
"""A tokenizer of transformers, which is slow to load and not needed here."""


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """How a template wants calls to be given."""

    arguments_as_text: bool = False
    """Whether arguments are JSON text instead of an object."""
    ids_by_name: bool = False
    """Whether the id of a call must name its function, as Kimi's: `functions.NAME:NUMBER`."""

    def given(self, name: str, arguments: Any, number: int) -> dict[str, Any]:
        """Return call `number` of a conversation, counted from 0."""
        call_id = f"functions.{name}:{number}" if self.ids_by_name else f"call{number:05d}"
        if self.arguments_as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What the whole text of a conversation has after an answer, and what a model must write there."""

    dropped: str
    """The end of the whole text that no model writes."""
    added: str
    """The token that ends the turn, where only a following message shows it."""


@dataclass(frozen=True, kw_only=True)
class TemplateFeatures:
    """The features of a chat template, found by rendering."""

    options: Mapping[str, Any]
    """Options of the template, such as `enable_thinking`, with which all is rendered."""
    refusal: str | None
    """Why no answer follows a prompt as it is served."""
    call_form: CallForm
    text_ending: Ending
    call_ending: Ending
    ends: tuple[str, ...]
    """The tokens that end a turn: that of a text, then that of a call."""
    shows_ids: bool
    """Whether a call's own text has its id."""
    has_system: bool
    has_tools: bool
    has_tool_calls: bool
    has_parallel_calls: bool
    """Whether a message may have several calls. Llama 3.1's template refuses them."""
    has_tool_results: bool
    has_free_order: bool
    """Whether roles need not alternate."""
    keeps_thinking: bool

    def missing(self) -> dict[str, str]:
        """Return the parts that the template can't show, and how each is written instead."""
        plain = {
            "has_system": "system messages go in front of the first user message",
            "has_tools": "tools are listed in the system message",
            "has_tool_calls": "tool calls are written as text",
            "has_parallel_calls": "several calls of one answer are written as text",
            "has_tool_results": "tool results are user messages",
            "has_free_order": "neighbours of one role become one message",
        }
        return {name: how for name, how in plain.items() if not getattr(self, name)}


def prepare_tokenizer(tokenizer: Any, options: Mapping[str, Any] | None = None) -> TemplateFeatures:
    """Find a template's features, and set the tokens that end turns and fill batches, in memory.

    Raises:
        TrainerConfigError: the tokenizer has no template or no end token, or no answer follows a
            prompt as it is served.
    """
    if tokenizer.eos_token is None and tokenizer.pad_token is None:
        raise TrainerConfigError(
            "the tokenizer has neither an end token nor a pad token: set eos_token in its "
            "tokenizer_config.json"
        )
    if not getattr(tokenizer, "chat_template", None):
        raise TrainerConfigError(
            "the tokenizer has no chat template, so this is a base model: name the version that was "
            "trained for chats, or put its maker's template into the model's folder as "
            "chat_template.jinja"
        )
    if tokenizer.eos_token is None:
        tokenizer.eos_token = tokenizer.pad_token
    tokenizer.own_eos_token = getattr(tokenizer, "own_eos_token", None) or tokenizer.eos_token
    features = template_features(tokenizer, options)
    if features.refusal:
        raise TrainerConfigError(
            f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'this model'} can't be "
            f"trained on: {features.refusal}. If its maker has an option for this, set it "
            "(chat_template_kwargs={name: value}), or name another model"
        )
    tokenizer.turn_ends = list(features.ends)
    tokenizer.eos_token = features.ends[0]  # what ends a turn, not what ends a text
    if tokenizer.pad_token is None:
        # Masks say what is padding, so that any token will do.
        tokenizer.pad_token = tokenizer.eos_token
    return features


def template_features(
    tokenizer: Tokenizer, options: Mapping[str, Any] | None = None
) -> TemplateFeatures:
    """Render test messages to find the features of a chat template.

    Without `options`, these are the first with which answers follow the prompts: thinking off under
    the name that the template has for it, and then none.
    """
    if options is None:
        names = _variables(tokenizer.chat_template)
        tried = [_Probe(tokenizer, {name: False}).features() for name in _THINKING if name in names]
        tried.append(_Probe(tokenizer, {}).features())
        return next((one for one in tried if not one.refusal), tried[-1])
    return _Probe(tokenizer, options).features()


def _variables(template: Any) -> set[str]:
    """Name what a template reads beside what it sets itself."""
    text = "".join(template.values()) if isinstance(template, Mapping) else str(template)
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return meta.find_undeclared_variables(
            environment.parse(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", text))
        )
    except TemplateError:
        return set()


class _Probe:
    """Renders test messages by a template with some options."""

    def __init__(self, tokenizer: Tokenizer, options: Mapping[str, Any]) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.form = CallForm()
        schema = {"type": "object", "properties": {"p": {"type": "string", "description": "?"}}}
        function = {"name": _TOOL, "description": "?", "parameters": schema}
        self.tools = [{"type": "function", "function": function}]

    def text(self, *messages: Message, **options: Any) -> str:
        """Render messages, as an empty text if the template refuses them."""
        with suppress(DatasetError):
            return rendered(self.tokenizer, messages, options=self.options, **options)
        return ""

    def call(self, *values: str) -> Message:
        """Return a message with a call of each value."""
        calls = [self.form.given(_CALL, {"p": v}, number) for number, v in enumerate(values)]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def result(self, call: Message) -> Message:
        """Return the result of the first call of a message."""
        return {
            "role": "tool",
            "content": _RESULT,
            "tool_call_id": call["tool_calls"][0]["id"],
            "name": _CALL,
        }

    def features(self) -> TemplateFeatures:
        """Render the test messages."""
        answer = {"role": "assistant", "content": _ANSWER}
        again = {"role": "user", "content": _THEN}
        thought = {"role": "assistant", "content": f"<think>{_VALUE}</think>{_ANSWER}"}
        forms = [
            CallForm(arguments_as_text=a, ids_by_name=b)
            for b in (False, True)
            for a in (False, True)
        ]
        has_calls = False
        for self.form in forms:
            shown = self.text(QUESTION, call := self.call(_VALUE))
            # An object where text is wanted comes out as Python writes it.
            has_calls = _has(shown, _CALL, _VALUE) and f"'p': '{_VALUE}'" not in shown
            if has_calls:
                break
        else:
            self.form = CallForm()
        call = self.call(_VALUE)
        # A template that knows no calls may still print any role's name: no model has learnt that.
        has_results = has_calls and _has(self.text(QUESTION, call, self.result(call)), _RESULT)
        has_tools = _has(self.text(QUESTION, tools=self.tools), _TOOL)
        responses, refusal = self._responses(
            has_results=has_results, has_calls=has_calls, has_tools=has_tools
        )
        after = self.result(call) if has_results else again
        text_ending = self._ending([QUESTION, answer], again, responses.get("text", ""), _ANSWER)
        call_ending = text_ending
        if has_calls:
            call_ending = self._ending([QUESTION, call], after, responses.get("call", ""), _VALUE)
        return TemplateFeatures(
            options=self.options,
            refusal=refusal,
            call_form=self.form,
            text_ending=text_ending[0],
            call_ending=call_ending[0],
            ends=tuple(dict.fromkeys([text_ending[1], call_ending[1]])),
            shows_ids=self.form.given(_CALL, {}, 0)["id"] in responses.get("call", ""),
            has_system=_has(self.text({"role": "system", "content": _SYSTEM}, QUESTION), _SYSTEM),
            has_tools=has_tools,
            has_tool_calls=has_calls,
            has_parallel_calls=has_calls
            and _has(self.text(QUESTION, self.call(_VALUE, _THEN)), _VALUE, _THEN),
            has_tool_results=has_results,
            has_free_order=_has(self.text(answer, QUESTION, QUESTION, answer, again), _THEN)
            and _has(self.text(QUESTION, answer, again | {"role": "assistant"}), _ANSWER, _THEN),
            keeps_thinking=_has(self.text(QUESTION, thought, QUESTION), _VALUE),
        )

    def _responses(
        self, *, has_results: bool, has_calls: bool, has_tools: bool
    ) -> tuple[dict[str, str], str | None]:
        """Return what follows a prompt in the whole text, by kind of answer, and why it can't be told."""
        answers = {"text": {"role": "assistant", "content": _ANSWER}}
        if has_calls:
            answers["call"] = self.call(_VALUE)
        contexts: list[list[Message]] = [[QUESTION]]
        if has_results:
            call = self.call(_THEN)
            contexts.append([QUESTION, call, self.result(call)])
        found: dict[str, str] = {}
        for context in contexts:
            for tools in (None, self.tools) if has_tools else (None,):
                prompt = self.text(*context, tools=tools, with_generation_prompt=True)
                for kind, answer in answers.items():
                    whole = self.text(*context, answer, tools=tools)
                    response = response_in(whole, prompt)
                    if not prompt or response is None:
                        return found, _why_not(prompt)
                    if kind == "text" and _ANSWER not in response:
                        return found, "it doesn't show the text of an answer"
                    if found.setdefault(kind, response) != response:
                        return found, "its answers look different after a tool's result"
        return found, None

    def _ending(
        self, messages: Sequence[Message], following: Message, response: str, word: str
    ) -> tuple[Ending, str]:
        """Find what must be written after an answer's last word, and the token that ends the turn."""
        tail = response.rpartition(word)[2]
        then = self.text(*messages, following).partition(word)[2]
        own_end = str(getattr(self.tokenizer, "own_eos_token", self.tokenizer.eos_token))
        # What closes a part of an answer ends no turn.
        specials = {t for t in special_tokens(self.tokenizer) if not t.startswith("</")} | {own_end}

        def ends(text: str) -> list[tuple[int, str]]:
            found = [(m.end(), t) for t in specials for m in re.finditer(re.escape(t), text)]
            return sorted(found)

        both = zip(tail, then, strict=False)
        n_shared = next((i for i, (a, b) in enumerate(both) if a != b), min(len(tail), len(then)))
        shared = ends(tail[:n_shared])
        if shared:  # the last token that stands there whatever follows
            _, end = shared[-1]
            place = tail.index(end) + len(end)
            return Ending(dropped=tail[place:], added=""), end
        if own := ends(tail):
            place, end = own[0]
            return Ending(dropped=tail[place:], added=""), end
        # The next message begins with the token that ended this one.
        rest = then[len(tail) :]
        if then.startswith(tail) and (own := ends(rest)) and rest.startswith(own[0][1]):
            return Ending(dropped="", added=own[0][1]), own[0][1]
        return Ending(dropped=tail[len(tail.rstrip()) :], added=own_end), own_end


_NO_THOUGHT = re.compile(r"(<think>\s*</think>\s*|<\|channel>thought\s*<channel\|>\s*)$")
"""The end of a prompt that tells a model to answer without a thought."""


def response_in(whole: str, prompt: str) -> str | None:
    """Return what follows a prompt in the text of a whole conversation, or None if nothing does.

    The whole text of an earlier turn may lack the empty thought with which the prompt ends.
    """
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    before = _NO_THOUGHT.sub("", prompt)
    if before != prompt and whole.startswith(before):
        return whole[len(before) :].removeprefix("</think>")
    return None


def _why_not(prompt: str) -> str:
    if re.search(r"<think>\s*$", prompt):
        return "it asks for a thought before each answer, and the rows of a dataset have none"
    return "in a whole conversation, an answer doesn't follow the prompt for it"


def _has(text: str, *words: str) -> bool:
    return all(word in text for word in words)


def rendered(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] | None = None,
    with_generation_prompt: bool = False,
    options: Mapping[str, Any],
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
            # The end of a turn has taken its place in memory.
            **{"eos_token": getattr(tokenizer, "own_eos_token", tokenizer.eos_token), **options},
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
    """Write the parts that the template can't show as text, and give calls in its form.

    Several calls that an answer of the prompt made at once follow one another, each with its
    result, if the template has one call a message.
    """
    if features.has_tool_results and not features.has_parallel_calls:
        messages = list(_one_by_one(messages))
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


def _one_by_one(messages: Sequence[Message]) -> Iterator[Message]:
    """Split messages with several calls whose results follow into one message a call."""
    waiting: list[Message] = []
    results: list[Message] = []
    for message in [*messages, None]:
        if message is not None and waiting and message["role"] == "tool":
            results.append(message)
            continue
        if results:
            for call in waiting:
                yield call
                name = call["tool_calls"][0]["id"]
                yield from (one for one in results if one.get("tool_call_id") == name)
        elif waiting:
            calls = [one["tool_calls"][0] for one in waiting]
            yield {**waiting[0], "tool_calls": calls}
        waiting, results = [], []
        calls = (message or {}).get("tool_calls") or ()
        if message is None:
            return
        if len(calls) < 2:
            yield message
        else:
            waiting = [
                {**message, "content": message["content"] if not i else "", "tool_calls": [call]}
                for i, call in enumerate(calls)
            ]


def numbered(messages: Sequence[Message], *, first: int = 0) -> list[Message]:
    """Number the calls of a conversation from `first`, and say in each result whose it is.

    Results whose call isn't named belong to the calls before them in order.
    """
    ready: list[Message] = []
    names: dict[str, tuple[str, str]] = {}
    unnamed: list[tuple[str, str]] = []
    number = first
    for message in messages:
        if calls := message.get("tool_calls"):
            told = []
            unnamed = []
            for call in calls:
                told.append({**call, "id": str(number)})
                unnamed.append((str(number), call["function"]["name"]))
                names[call.get("id") or f"#{number}"] = unnamed[-1]
                number += 1
            message = {**message, "tool_calls": told}
        elif message["role"] == "tool":
            whose = names.get(message.get("tool_call_id") or "")
            if whose in unnamed:
                unnamed.remove(whose)
            whose = whose or (unnamed.pop(0) if unnamed else (str(max(number - 1, 0)), "tool"))
            message = {**message, "tool_call_id": whose[0], "name": whose[1]}
        ready.append(message)
    return ready


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
    if role == "tool":
        call = features.call_form.given(message["name"], {}, int(message["tool_call_id"]))
        return {**message, "tool_call_id": call["id"]}
    calls = message.get("tool_calls")
    is_native = features.has_parallel_calls if len(calls or ()) > 1 else features.has_tool_calls
    if calls and not is_native:
        parts = [content, calls_text(calls)] if content else [calls_text(calls)]
        return {"role": role, "content": "\n".join(parts)}
    if calls:
        given = [
            features.call_form.given(**call["function"], number=int(call["id"])) for call in calls
        ]
        return {**message, "tool_calls": given}
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

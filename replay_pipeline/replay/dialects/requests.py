"""Build the request for a state and a teacher, and the hash that identifies the question.

The hash covers the question: messages, tools, and parameters. Equal questions have equal hashes and
are paid once. The rest of the request (routing, price limits, cache marks, metadata) isn't part of
the hash.
"""

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

from replay_pipeline.replay.dialects.base import Ask, Prompt, RequestOptions
from replay_pipeline.replay.dialects.prices import Price
from replay_pipeline.replay.dialects.servers import dialect_of
from replay_pipeline.replay.dialects.sizes import Size
from replay_pipeline.replay.dialects.wellformed import (
    cleaned,
    recorded_names,
    well_formed,
    well_formed_tools,
)
from replay_pipeline.types import Message, TeacherSpec, Tool, TraceState

CATALOGUE_VERSION = "1"
"""Version of the form in which tools and parameters are sent. It is part of every request hash.

Don't raise it for changes to the transport alone (names of fields, cache marks, permission for
parallel calls): a new version makes paid answers useless.
"""

_json = msgspec.json.Encoder(order="deterministic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One state put to one teacher."""

    state_id: str
    teacher: str
    sha: str
    """Hash of the canonical request, 32 hexadecimal digits."""
    size: Size
    """Size of the prompt as sent."""
    max_completion_tokens: int


Prefix = tuple[int, bytes]
"""Length in bytes of a prompt's messages, and the hash of its tools and messages."""


@dataclass(slots=True)
class RequestBuilder:
    """The builder of questions and request bodies. It serializes the messages of a state once."""

    options: RequestOptions
    _state: TraceState | None = None
    _prompt: Prompt = field(
        default=Prompt(messages=[], messages_json=b"[]", tools=[], tools_json=b"")
    )

    def question(self, state: TraceState, teacher: TeacherSpec) -> Question:
        """Return the question that `state` puts to `teacher`."""
        prompt = self.prompt(state)
        params = self._params(teacher)
        head = {
            "catalogue": CATALOGUE_VERSION,
            "teacher": teacher.name,
            "model": teacher.model,
            "params": params,
            "window": "full",  # cut prompts have other messages, and so other hashes
        }
        digest = hashlib.blake2b(_json.encode(head), digest_size=16)
        for part in (prompt.tools_json, prompt.messages_json):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        return Question(
            state_id=state["state_id"],
            teacher=teacher.name,
            sha=digest.hexdigest(),
            size=Size(
                len(prompt.messages_json) + len(prompt.tools_json),
                len(prompt.messages),
                len(prompt.tools_json),
                prompt.n_system_bytes,
            ),
            max_completion_tokens=params["max_completion_tokens"],
        )

    def begins_with(self, state: TraceState, before: "Prefix | None") -> "tuple[bool, Prefix]":
        """Return whether the prompt of `state` begins with another's, and its own prefix."""
        prompt = self.prompt(state)
        # Without the bracket that closes the list of messages.
        messages = prompt.messages_json
        mine = (len(messages) - 1, _hash(prompt.tools_json, messages[:-1]))
        if before is None or before[0] > mine[0]:
            return False, mine
        return _hash(prompt.tools_json, messages[: before[0]]) == before[1], mine

    def body(
        self, state: TraceState, teacher: TeacherSpec, price: Price | None, *, n_asked: int = 0
    ) -> bytes:
        """Return the request for `state` in the dialect of `teacher`.

        The facts of `price` decide the fields to send. A cache mark goes after the first `n_asked`
        messages, which were sent before.
        """
        prompt = self.prompt(state)
        ask = self._ask(teacher, price, state, n_asked)
        return _json.encode(dialect_of(teacher).body(prompt, ask))

    def lacks_tools(self, price: Price | None) -> bool:
        """Return whether the last prompt has tools, and no endpoint of the model lists them."""
        listed = price.supported_parameters if price else ()
        return bool(self._prompt.tools and listed and "tools" not in listed)

    def adaptations(self, teacher: TeacherSpec, price: Price | None) -> tuple[str, ...]:
        """Return the fields that are left out for the endpoint, with the reasons."""
        return dialect_of(teacher).adapted(self._ask(teacher, price, None, 0))[1]

    def _ask(
        self, teacher: TeacherSpec, price: Price | None, state: TraceState | None, n_asked: int
    ) -> Ask:
        return Ask(
            teacher=teacher,
            params=self._params(teacher),
            options=self.options,
            price=price,
            state_id=state["state_id"] if state else "",
            session_id=state.get("session_id") if state else None,
            n_asked=n_asked,
        )

    def _params(self, teacher: TeacherSpec) -> dict[str, Any]:
        params = dict(teacher.params)
        params.setdefault(
            "max_completion_tokens",
            params.pop("max_tokens", self.options.max_completion_tokens),
        )
        return params

    def prompt(self, state: TraceState) -> Prompt:
        """Return the prompt of a state in a form that every provider accepts. The last one is cached."""
        if self._state is state:
            return self._prompt
        messages = well_formed(state["messages"])
        try:
            messages_json = _json.encode(messages)
        except (UnicodeEncodeError, TypeError, OverflowError, RecursionError):
            messages = well_formed(cleaned(messages))
            messages_json = _json.encode(messages)
        tools, tools_json = _tools(state.get("tools") or [], messages)
        self._prompt = Prompt(
            messages=messages, messages_json=messages_json, tools=tools, tools_json=tools_json
        )
        self._state = state
        return self._prompt


def with_recorded_names(action: Message | None, state: TraceState) -> Message | None:
    """Return an answer with the session's own tool names."""
    names = recorded_names(state.get("tools") or []) if action else {}
    if not names or action is None or not action.get("tool_calls"):
        return action
    calls = [
        {**call, "function": {**function, "name": names.get(function["name"], function["name"])}}
        for call in action["tool_calls"]
        for function in [call["function"]]
    ]
    return {**action, "tool_calls": calls}


def _tools(tools: list[Tool], messages: list[Message]) -> tuple[list[Tool], bytes]:
    if not tools:
        # Calls in a prompt are refused where no tool is defined: those that were made are.
        called = {
            call["function"]["name"]: None
            for message in messages
            for call in message.get("tool_calls") or ()
        }
        tools = [{"type": "function", "function": {"name": name}} for name in called]
    if not tools:
        return [], b""
    try:
        return _sent_tools(_json.encode(tools))
    except (UnicodeEncodeError, TypeError, OverflowError, RecursionError):
        return _sent_tools(_json.encode(cleaned(tools)))


@lru_cache(maxsize=256)
def _sent_tools(tools_json: bytes) -> tuple[list[Tool], bytes]:
    """Mend a list of tools; all states of a session have the same."""
    tools = well_formed_tools(msgspec.json.decode(tools_json))
    return tools, _json.encode(tools)


def _hash(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()

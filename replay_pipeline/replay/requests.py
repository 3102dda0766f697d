"""From a state and a teacher to the bytes that are sent, and to the name of the question.

The question (messages, tools, parameters) decides what is paid for: equal questions have equal
hashes and are paid once. What only dresses the request (routing, price limits, cache markers,
metadata) is no part of the hash.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from replay_pipeline.replay.prices import Price
from replay_pipeline.types import Message, TeacherSpec, Tool, TraceState
from replay_pipeline.windows import window_messages

CATALOGUE_VERSION = "1"
"""Version of how tools and parameters are put to a teacher; part of every request hash."""

DEFAULT_MAX_COMPLETION_TOKENS = 4096

Dialect = Literal["openrouter", "vllm", "ollama", "llama.cpp", "transformers", "litellm", "openai"]

_CACHE_MARKED_VENDORS = ("anthropic", "alibaba", "qwen")
"""Vendors whose prompt cache works only where the request marks it."""

_PROMPT_OVERHEAD_TOKENS = 1024
_MESSAGE_OVERHEAD_TOKENS = 16

_json = msgspec.json.Encoder(order="deterministic")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How every teacher of a run is asked."""

    window: str = "full"
    max_completion_tokens: int = DEFAULT_MAX_COMPLETION_TOKENS
    data_collection: Literal["allow", "deny"] = "deny"
    accepted_terms: frozenset[str] = frozenset()
    response_cache_ttl_s: int = 86_400
    """How long the router keeps an answer for a free re-send; 0 turns that off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One state put to one teacher."""

    state_id: str
    teacher: str
    sha: str
    """Hash of the canonical request, 32 hexadecimal digits."""
    n_prompt_bytes: int
    n_messages: int
    n_recorded_tokens: int | None
    """Prompt tokens that were recorded for the state under another tokenizer."""
    max_completion_tokens: int

    @property
    def prompt_bound_tokens(self) -> int:
        """Prompt tokens that can't be passed.

        No tokenizer makes more tokens than bytes. Where the recorded count is known, twice that
        count is a closer bound; half the bytes stays its floor.
        """
        bound = self.n_prompt_bytes
        if self.n_recorded_tokens:
            bound = min(bound, max(2 * self.n_recorded_tokens, -(-bound // 2)))
        return bound + self.n_messages * _MESSAGE_OVERHEAD_TOKENS + _PROMPT_OVERHEAD_TOKENS

    def added_bound_tokens(self, before: "Question") -> int:
        """Count the tokens that this prompt can have at most beyond one that it begins with."""
        n_messages = self.n_messages - before.n_messages
        n_bytes = self.n_prompt_bytes - before.n_prompt_bytes
        return n_bytes + (n_messages + 1) * _MESSAGE_OVERHEAD_TOKENS

    @property
    def expected_prompt_tokens(self) -> int:
        """Prompt tokens as they are likely to be counted."""
        by_size = round(self.n_prompt_bytes / 3.7) + 8 * self.n_messages
        if self.n_recorded_tokens:
            return min(self.n_recorded_tokens, self.n_prompt_bytes)
        return by_size


Prefix = tuple[int, bytes]
"""Length in bytes of a prompt's messages, and the hash of its tools and messages."""


def _hash(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


def dialect_of(teacher: TeacherSpec) -> Dialect:
    """Which server speaks at the teacher's address."""
    if teacher.dialect != "auto":
        return teacher.dialect
    address = urlsplit(teacher.base_url)
    host = address.hostname or ""
    if host == "openrouter.ai" or host.endswith(".openrouter.ai"):
        return "openrouter"
    ports: dict[int | None, Dialect] = {11434: "ollama", 4000: "litellm"}
    return ports.get(address.port, "openai")


@dataclass(slots=True)
class RequestBuilder:
    """Builds questions and request bodies; serializes the messages of a state once."""

    options: RequestOptions
    _state: TraceState | None = None
    _messages: bytes = b""
    _tools: bytes = b""
    _n_messages: int = 0

    def question(self, state: TraceState, teacher: TeacherSpec) -> Question:
        """Name the question that `state` puts to `teacher`."""
        self._serialize(state)
        params = self._params(teacher)
        head = {
            "catalogue": CATALOGUE_VERSION,
            "teacher": teacher.name,
            "model": teacher.model,
            "params": params,
            "window": self.options.window,
        }
        digest = hashlib.blake2b(_json.encode(head), digest_size=16)
        for part in (self._tools, self._messages):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        return Question(
            state_id=state["state_id"],
            teacher=teacher.name,
            sha=digest.hexdigest(),
            n_prompt_bytes=len(self._messages) + len(self._tools),
            n_messages=self._n_messages,
            n_recorded_tokens=state.get("n_context_tokens")
            if self.options.window == "full"
            else None,
            max_completion_tokens=params["max_completion_tokens"],
        )

    def begins_with(self, state: TraceState, before: "Prefix | None") -> "tuple[bool, Prefix]":
        """Say whether the prompt of `state` begins with another's, and give its own prefix."""
        self._serialize(state)
        # Without the bracket that closes the list of messages.
        mine = (len(self._messages) - 1, _hash(self._tools, self._messages[:-1]))
        if before is None or before[0] > mine[0]:
            return False, mine
        return _hash(self._tools, self._messages[: before[0]]) == before[1], mine

    def body(self, state: TraceState, teacher: TeacherSpec, price: Price | None) -> bytes:
        """The request body for `state` in the dialect of `teacher`."""
        self._serialize(state)
        dialect = dialect_of(teacher)
        body: dict[str, Any] = {"model": teacher.model, "messages": msgspec.Raw(self._messages)}
        if self._tools:
            body["tools"] = msgspec.Raw(self._tools)
            if dialect not in ("transformers", "ollama"):
                body["parallel_tool_calls"] = False
        params = self._params(teacher)
        if dialect != "openrouter" and "max_completion_tokens" in params:
            params["max_tokens"] = params.pop("max_completion_tokens")
        body |= params
        if dialect == "openrouter":
            body |= self._routing(state, teacher, price)
        return _json.encode(body)

    def headers(self, teacher: TeacherSpec) -> dict[str, str]:
        """Headers of a call, without the key."""
        headers = {"content-type": "application/json", "accept": "application/json"}
        if dialect_of(teacher) == "openrouter":
            headers["X-OpenRouter-Title"] = "replay-pipeline"
            if self.options.response_cache_ttl_s:
                headers["X-OpenRouter-Cache"] = "true"
                headers["X-OpenRouter-Cache-TTL"] = str(self.options.response_cache_ttl_s)
        return headers

    def _params(self, teacher: TeacherSpec) -> dict[str, Any]:
        params = dict(teacher.params)
        params.setdefault(
            "max_completion_tokens",
            params.pop("max_tokens", self.options.max_completion_tokens),
        )
        return params

    def _routing(
        self, state: TraceState, teacher: TeacherSpec, price: Price | None
    ) -> dict[str, Any]:
        given = teacher.params.get("provider")
        provider: dict[str, Any] = {
            "require_parameters": True,
            "data_collection": self.options.data_collection,
            "enforce_distillable_text": not _is_accepted(teacher, self.options.accepted_terms),
        }
        if isinstance(given, Mapping):
            provider |= given
        if price is not None:
            provider["max_price"] = price.max_price()
        routing: dict[str, Any] = {
            "provider": provider,
            "metadata": {"state_id": state["state_id"][:512]},
        }
        if session := state.get("session_id"):
            routing["session_id"] = session[:256]
        if teacher.vendor in _CACHE_MARKED_VENDORS:
            routing["cache_control"] = {"type": "ephemeral"}
        return routing

    def _serialize(self, state: TraceState) -> None:
        if self._state is state:
            return
        messages: list[Message] = window_messages(state["messages"], self.options.window)
        tools: list[Tool] = state.get("tools") or []
        self._messages = _json.encode(messages)
        self._tools = _json.encode(tools) if tools else b""
        self._n_messages = len(messages)
        self._state = state


def _is_accepted(teacher: TeacherSpec, accepted_terms: frozenset[str]) -> bool:
    return teacher.is_distillable is False and bool(
        accepted_terms & {teacher.model, teacher.name, teacher.vendor}
    )

"""The parts that all servers share: the published form of a chat completion."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
from pydantic import SecretStr

from replay_pipeline.replay.dialects.prices import Price
from replay_pipeline.types import Message, TeacherSpec, Tool

DEFAULT_MAX_COMPLETION_TOKENS = 4096
LIMITS = ("max_completion_tokens", "max_tokens")
"""The two names of the limit on completion tokens."""

_EPHEMERAL = {"type": "ephemeral"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How every teacher of a run is asked."""

    max_completion_tokens: int = DEFAULT_MAX_COMPLETION_TOKENS
    accepted_terms: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Messages and tools in the form that every provider accepts, and as JSON."""

    messages: list[Message]
    messages_json: bytes
    tools: list[Tool]
    tools_json: bytes
    """The tools as JSON, empty if there are none."""

    @property
    def n_system_bytes(self) -> int:
        """Return how many bytes of the messages are the system prompt."""
        if not self.messages or self.messages[0]["role"] != "system":
            return 0
        return len((self.messages[0].get("content") or "").encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One question: the teacher, the state, and the known facts about the endpoint."""

    teacher: TeacherSpec
    params: dict[str, Any]
    """Fields that change the answer. The token limit is `max_completion_tokens` here."""
    options: RequestOptions
    price: Price | None
    state_id: str
    session_id: str | None
    n_asked: int = 0
    """Number of leading messages that were sent before in this order, or 0."""


class Dialect:
    """An OpenAI-compatible server. A server with differences has a subclass in this folder."""

    name: ClassVar[str] = "compatible"
    hosts: ClassVar[tuple[str, ...]] = ()
    """Hosts that speak this dialect. Their subdomains count too."""
    ports: ClassVar[tuple[int, ...]] = ()
    path: ClassVar[str] = "/chat/completions"
    limit: ClassVar[str] = "max_tokens"
    """Its name for the limit on completion tokens."""
    parameters: ClassVar[frozenset[str] | None] = None
    """Fields that it accepts. `None` means that it ignores unknown ones."""
    is_whole: ClassVar[bool] = False
    """Whether it always reads the whole prompt or refuses it."""

    def adapted(self, ask: Ask) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the fields that this endpoint accepts, and the reason for each change."""
        params, notes = dict(ask.params), []
        limit = params.pop("max_completion_tokens")
        most = ask.price.max_completion_tokens if ask.price else None
        params[self.limit_name(ask)] = min(limit, most or limit)
        supported = self.supported(ask)
        for name in [name for name in params if supported is not None and name not in supported]:
            if name not in LIMITS:
                del params[name]
                notes.append(f"{name} is left out: {self.name} does not list it for this model")
        return params, tuple(notes)

    def limit_name(self, ask: Ask) -> str:  # noqa: ARG002 (others look at the price list)
        """Return the name of the field for the limit on completion tokens."""
        return self.limit

    def supported(self, ask: Ask) -> frozenset[str] | None:  # noqa: ARG002
        """Return the fields that the endpoint accepts, or None if they aren't known."""
        return self.parameters

    def body(self, prompt: Prompt, ask: Ask) -> dict[str, Any]:
        """Build the request, ready to be encoded."""
        body: dict[str, Any] = {
            "model": ask.teacher.model,
            "messages": msgspec.Raw(prompt.messages_json),
        }
        if prompt.tools:
            body["tools"] = msgspec.Raw(prompt.tools_json)
        params, _ = self.adapted(ask)
        return body | params

    def headers(self) -> dict[str, str]:
        """Return the headers of a call, without the key."""
        return {"content-type": "application/json", "accept": "application/json"}

    def authorization(self, key: SecretStr | None) -> dict[str, str]:
        """Return the header that carries the key."""
        return {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}


def marked(prompt: Prompt, n_asked: int) -> list[Message]:
    """Mark the blocks at which the provider writes and reads its prompt cache.

    Anthropic accepts four marks, and this uses three: after the system prompt, after the prefix
    that was asked last, and at the end. From a mark, Anthropic looks back only twenty blocks. If
    more blocks lie between two asked states, a mark only at the end would write the whole prefix
    again.
    """
    messages = list(prompt.messages)
    n_system = sum(message["role"] == "system" for message in messages)
    for index in {n_system - 1, min(n_asked, len(messages)) - 1, len(messages) - 1}:
        if index >= 0 and (content := messages[index].get("content")):
            messages[index] = {**messages[index], "content": _with_mark(content)}
    return messages


def _with_mark(content: Any) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    return [*parts[:-1], {**parts[-1], "cache_control": _EPHEMERAL}]


def is_accepted(teacher: TeacherSpec, accepted_terms: frozenset[str]) -> bool:
    """Return whether the user accepted a teacher whose terms forbid training on its answers."""
    names = {teacher.model, teacher.name, teacher.vendor}
    return teacher.is_distillable is False and bool(accepted_terms & names)


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping unchanged, and an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}

"""One class for each server that speaks OpenAI's protocol or nearly does, and the choice among them."""

from urllib.parse import urlsplit

from replay_pipeline.replay.dialects.base import (
    DEFAULT_MAX_COMPLETION_TOKENS,
    Ask,
    Dialect,
    Prompt,
    RequestOptions,
)
from replay_pipeline.replay.dialects.open_router import OpenRouter
from replay_pipeline.replay.dialects.servers import (
    Azure,
    LiteLlm,
    LlamaCpp,
    Ollama,
    OpenAI,
    Transformers,
    Vllm,
)
from replay_pipeline.types import TeacherSpec

__all__ = [
    "DEFAULT_MAX_COMPLETION_TOKENS",
    "DIALECTS",
    "Ask",
    "Dialect",
    "Prompt",
    "RequestOptions",
    "dialect_of",
]

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        OpenRouter(), OpenAI(), Azure(), Vllm(), LlamaCpp(), Ollama(), Transformers(), LiteLlm(),
    )
}  # fmt: skip
"""The dialects by their name in `TeacherSpec.dialect`."""

_PLAIN = Dialect()


def dialect_of(teacher: TeacherSpec) -> Dialect:
    """Return the dialect of the server at the teacher's address, or the plain one if it is unknown."""
    if teacher.dialect != "auto":
        return DIALECTS[teacher.dialect]
    address = urlsplit(teacher.base_url)
    host = address.hostname or ""
    for dialect in DIALECTS.values():
        if any(host == each or host.endswith(f".{each}") for each in dialect.hosts):
            return dialect
    for dialect in DIALECTS.values():
        if address.port in dialect.ports:
            return dialect
    return _PLAIN

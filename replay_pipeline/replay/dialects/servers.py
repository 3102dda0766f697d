"""One class for each server that speaks OpenAI's protocol or nearly does, and the choice among them."""

import hashlib
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from replay_pipeline.replay.dialects.base import (
    Ask,
    Dialect,
    Prompt,
    as_mapping,
    is_accepted,
    marked,
)
from replay_pipeline.types import TeacherSpec

_MARKED_VENDORS = ("anthropic", "alibaba", "qwen")
"""Vendors whose prompt cache works only where the blocks of a request mark it."""
KEPT_S = 86_400
"""How long the router keeps an answer, so that a lost call is asked again for nothing."""
_OWN_FIELDS = frozenset(
    {"provider", "models", "plugins", "route", "transforms", "user", "trace", "metadata",
     "session_id", "service_tier"}
)  # fmt: skip
"""Fields that the router reads itself: no endpoint has to list them."""


class OpenRouter(Dialect):
    """Sets `require_parameters`, so that OpenRouter skips endpoints that lack one of the fields.

    Source: OpenRouter, "Provider routing" and "Parameters"; its `/models` lists what each model's
    endpoints support. Top-level `cache_control` is documented only for Anthropic. So this marks
    blocks instead, which Anthropic and Alibaba both read.
    """

    name = "openrouter"
    hosts = ("openrouter.ai",)
    is_whole = True

    def limit_name(self, ask: Ask) -> str:
        """Return the name on the price list, or the older name if the list has neither."""
        listed = ask.price.supported_parameters if ask.price else ()
        is_new = "max_completion_tokens" in listed and "max_tokens" not in listed
        return "max_completion_tokens" if is_new else "max_tokens"

    def supported(self, ask: Ask) -> frozenset[str] | None:
        """Return the parameters that the price list names for the model, or `None` without a list."""
        if ask.price is None or not ask.price.supported_parameters:
            return None
        return _OWN_FIELDS.union(ask.price.supported_parameters)

    def adapted(self, ask: Ask) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the fields as the base class does, and say if tools can't be sent at all."""
        params, notes = super().adapted(ask)
        listed = ask.price.supported_parameters if ask.price else ()
        if listed and "tools" not in listed:
            notes += ("no endpoint of this model lists tools: states with tools are not asked",)
        return params, notes

    def body(self, prompt: Prompt, ask: Ask) -> dict[str, Any]:
        """Pin price, data policy, and terms, and keep a session at one endpoint for its cache."""
        body = super().body(prompt, ask)
        if self._is_marked(ask):
            body["messages"] = marked(prompt, ask.n_asked)
        provider: dict[str, Any] = {
            "require_parameters": True,
            "data_collection": "deny",
            "enforce_distillable_text": not is_accepted(ask.teacher, ask.options.accepted_terms),
            **as_mapping(ask.params.get("provider")),
        }
        if ask.price is not None:
            provider["max_price"] = ask.price.max_price()
        body |= {"provider": provider, "metadata": {"state_id": ask.state_id[:512]}}
        if ask.session_id:
            body["session_id"] = ask.session_id[:256]
        return body

    def headers(self) -> dict[str, str]:
        """Ask the router to keep its answer, so that a repeated request is free."""
        return {
            **super().headers(),
            "X-OpenRouter-Title": "replay-pipeline",
            "X-OpenRouter-Cache": "true",
            "X-OpenRouter-Cache-TTL": str(KEPT_S),
        }

    def _is_marked(self, ask: Ask) -> bool:
        """Return whether the model has a cache to mark: Alibaba's has one for listed models only."""
        vendor = ask.teacher.vendor
        is_cached = ask.price is None or ask.price.has_cache
        return vendor in _MARKED_VENDORS and (vendor == "anthropic" or is_cached)


class OpenAI(Dialect):
    """Sends `max_completion_tokens` and `prompt_cache_key` (source: OpenAI's API reference)."""

    name = "openai"
    hosts = ("api.openai.com",)
    limit = "max_completion_tokens"
    is_whole = True

    def body(self, prompt: Prompt, ask: Ask) -> dict[str, Any]:
        """Keep the requests of a session together, for the prompt cache."""
        body = super().body(prompt, ask)
        if ask.session_id:
            # At most 64 characters, and no name of a session leaves this machine.
            digest = hashlib.blake2b(ask.session_id.encode("utf-8", "replace"), digest_size=16)
            body["prompt_cache_key"] = digest.hexdigest()
        return body


class Azure(OpenAI):
    """The address is `https://NAME.openai.azure.com/openai/v1`, the model a deployment's name.

    Source: Azure OpenAI, v1 API.
    """

    name = "azure"
    hosts = ("openai.azure.com", "services.ai.azure.com")

    def authorization(self, key: SecretStr | None) -> dict[str, str]:
        """Return the key in `api-key`."""
        return {} if key is None else {"api-key": key.get_secret_value()}


class Vllm(Dialect):
    """Start vLLM with `--enable-auto-tool-choice` and a tool-call parser. It allows parallel calls."""

    name = "vllm"
    is_whole = True


class LlamaCpp(Dialect):
    """Allows parallel calls, which are off by default (source: the README of llama.cpp's server)."""

    name = "llama.cpp"
    ports = (8080,)

    def body(self, prompt: Prompt, ask: Ask) -> dict[str, Any]:
        """Allow parallel calls."""
        body = super().body(prompt, ask)
        if prompt.tools:
            body.setdefault("parallel_tool_calls", True)
        return body


class Ollama(Dialect):
    """The server sets the context length (`OLLAMA_CONTEXT_LENGTH`); a request can't."""

    name = "ollama"
    ports = (11434,)


class Transformers(Dialect):
    """It rejects fields that aren't OpenAI's (status 422), and reads only some of OpenAI's.

    Source: `cli/serving/chat_completion.py` of transformers 5.
    """

    name = "transformers"
    parameters = frozenset(
        {"max_tokens", "temperature", "top_p", "seed", "stop", "frequency_penalty", "logit_bias",
         "generation_config", "chat_template_kwargs", "response_format"}
    )  # fmt: skip


class LiteLlm(Dialect):
    """LiteLLM forwards cache marks to Anthropic, and translates the token limit."""

    name = "litellm"
    ports = (4000,)
    is_whole = True

    def body(self, prompt: Prompt, ask: Ask) -> dict[str, Any]:
        """Mark the blocks if the model is one of Anthropic's."""
        body = super().body(prompt, ask)
        if ask.teacher.vendor == "anthropic":
            body["messages"] = marked(prompt, ask.n_asked)
        return body


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

"""Servers that speak OpenAI's protocol with small differences."""

import hashlib
from typing import Any

from pydantic import SecretStr

from replay_pipeline.replay.dialects.base import Ask, Dialect, Prompt, marked


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

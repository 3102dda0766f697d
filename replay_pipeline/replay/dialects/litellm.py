"""LiteLLM's proxy, which forwards requests to any provider."""

from typing import Any

from replay_pipeline.replay.dialects.base import Ask, Dialect, Prompt, marked


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

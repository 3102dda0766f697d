"""llama.cpp's server."""

from typing import Any

from replay_pipeline.replay.dialects.base import Ask, Dialect, Prompt


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

"""OpenAI itself, whose newer models refuse `max_tokens`."""

import hashlib
from typing import Any

from replay_pipeline.replay.dialects.base import Ask, Dialect, Prompt


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

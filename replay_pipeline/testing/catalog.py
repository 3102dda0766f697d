"""The models that the loopback server serves, at plausible open-weight prices, and their prompt cache."""

import hashlib
import math
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from replay_pipeline.types import REHEARSAL

_PICO = 10**12
SUPPORTED_PARAMETERS = (
    "frequency_penalty", "include_reasoning", "max_tokens", "presence_penalty", "reasoning",
    "response_format", "seed", "stop", "structured_outputs", "temperature", "tool_choice", "tools",
    "top_k", "top_p",
)  # fmt: skip
"""The parameters that OpenRouter lists for models with tools, without `max_completion_tokens` and
`parallel_tool_calls`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A model with its prices in pico-dollars per token."""

    model: str
    prompt: int
    completion: int
    cache_read: int | None
    """`None` if the model's prompts aren't cached."""
    cache_write: int | None = None
    """Set if writing to the prompt cache costs extra and the request must ask for it."""
    context_length: int = 262_144
    provider: str = "Loopback"

    def cost_nano(self, n_prompt: int, n_cached: int, n_written: int, n_completion: int) -> int:
        """Return the cost of one call in nano-dollars, rounded up."""
        write = self.prompt if self.cache_write is None else self.cache_write
        pico = (
            (n_prompt - n_cached - n_written) * self.prompt
            + n_cached * (self.cache_read or 0)
            + n_written * write
            + n_completion * self.completion
        )
        return -(-pico // 1000)

    def listing(self) -> dict[str, Any]:
        """Return the model's entry in `/models`."""
        pricing = {
            "prompt": _per_token(self.prompt),
            "completion": _per_token(self.completion),
            "request": "0",
        }
        if self.cache_read is not None:
            pricing["input_cache_read"] = _per_token(self.cache_read)
        if self.cache_write is not None:
            pricing["input_cache_write"] = _per_token(self.cache_write)
        return {
            "id": self.model,
            "canonical_slug": f"{self.model}-20261101",
            "name": self.model,
            "context_length": self.context_length,
            "pricing": pricing,
            "top_provider": {
                "context_length": self.context_length,
                "max_completion_tokens": 65_536,
            },
            "supported_parameters": list(SUPPORTED_PARAMETERS),
        }


def _per_token(pico: int) -> str:
    return f"{pico / _PICO:.12f}".rstrip("0").rstrip(".") or "0"


def _usd_per_mtok(
    model: str, prompt: float, completion: float, cached: float | None, **more: Any
) -> ServedModel:
    write = more.pop("write", None)
    return ServedModel(
        model=model,
        prompt=round(prompt * 10**6),
        completion=round(completion * 10**6),
        cache_read=None if cached is None else round(cached * 10**6),
        cache_write=None if write is None else round(write * 10**6),
        **more,
    )


CATALOG: dict[str, ServedModel] = {
    served.model: served
    for served in (
        _usd_per_mtok("deepseek/deepseek-v4-pro", 0.44, 1.74, 0.044),
        _usd_per_mtok("qwen/qwen3-coder", 0.30, 1.20, None),
        _usd_per_mtok("z-ai/glm-4.6", 0.50, 1.75, 0.11, context_length=202_752),
        _usd_per_mtok("anthropic/claude-opus-4.7", 5.0, 25.0, 0.5, write=6.25),
        _usd_per_mtok("openai/gpt-5", 1.25, 10.0, 0.125),
    )
}
"""Prices in dollars per million tokens: prompt, completion, cached prompt. Alibaba caches only some
models, and qwen3-coder isn't one of them."""


def served(model: str, price: tuple[float, float] | None = None) -> ServedModel:
    """Return the served form of `model`. A model outside the catalog gets a medium price.

    `price` is in dollars per million tokens of prompt and completion. Models of a rehearsal cost nothing, and their answers name the rehearsal as their provider.
    """
    if model.startswith(f"{REHEARSAL}/"):
        return _usd_per_mtok(model, 0, 0, None, context_length=10**8, provider=REHEARSAL)
    if price is not None:
        return _usd_per_mtok(model, *price, None)
    return CATALOG.get(model) or _usd_per_mtok(model, 0.40, 1.60, 0.04)


BLOCK_BYTES = 512
CACHED_S = 300.0
MIN_CACHED_TOKENS = 1024
BYTES_PER_TOKEN = 4


class PromptCache:
    """The cache of prompts, by cumulative block hashes per model and session, for some minutes.

    As with a real provider, a prompt can be read only after a call with it has completed. Calls
    without a session go to any machine and find nothing, and short prompts aren't cached.
    """

    def __init__(self) -> None:
        self._seen: dict[bytes, float] = {}

    def blocks(self, model: str, session: str, prompt: bytes) -> list[bytes]:
        """Return hashes of the complete blocks of `prompt`. Each covers everything up to its end."""
        digest = hashlib.blake2b(f"{model}\0{session}\0".encode(), digest_size=16)
        names = []
        for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
            digest.update(prompt[start : start + BLOCK_BYTES])
            names.append(digest.digest())
        return names

    def n_cached_tokens(self, blocks: list[bytes], now: float) -> int:
        """Return the number of tokens of the longest prefix that is still cached."""
        known = takewhile(lambda name: self._seen.get(name, -math.inf) >= now - CACHED_S, blocks)
        tokens = len(list(known)) * BLOCK_BYTES // BYTES_PER_TOKEN
        return tokens if tokens >= MIN_CACHED_TOKENS else 0

    def store(self, blocks: list[bytes], now: float) -> None:
        """Store a prompt that was just read."""
        self._seen |= dict.fromkeys(blocks, now)

"""OpenRouter, which routes a request only to endpoints that support all its fields."""

from typing import Any

from replay_pipeline.replay.dialects.base import (
    Ask,
    Dialect,
    Prompt,
    as_mapping,
    is_accepted,
    marked,
)

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

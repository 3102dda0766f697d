"""The cost of a call: token prices as integers, so that sums are exact.

Amounts are in nano-dollars. Prices per token are in pico-dollars, because the cheapest cached
tokens cost less than one nano-dollar each.
"""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import ROUND_CEILING, Decimal
from typing import Any

import msgspec

from replay_pipeline.errors import PriceError, StorageError
from replay_pipeline.storage.store import Place, written_whole
from replay_pipeline.types import TeacherSpec

logger = logging.getLogger(__name__)

NANO = 1_000_000_000
"""Nano-dollars in a dollar."""

_PICO = Decimal(10) ** 12


def nano(usd: float | str | Decimal) -> int:
    """Return dollars as nano-dollars, rounded up, so that no cost is booked too low."""
    return int((Decimal(str(usd)) * NANO).to_integral_value(ROUND_CEILING))


def floor_nano(usd: float) -> int:
    """Return a ceiling in dollars as nano-dollars, rounded down."""
    return int(Decimal(str(usd)) * NANO)


def usd(nanos: int) -> float:
    """Return nano-dollars as dollars."""
    return nanos / NANO


def _pico(price: float | str) -> int:
    return int((Decimal(str(price)) * _PICO).to_integral_value(ROUND_CEILING))


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Prices of one model: pico-dollars per token, `request` in pico-dollars per call."""

    prompt: int
    completion: int
    cache_read: int
    cache_write: int
    reasoning: int
    request: int = 0
    source: str = "configured"
    """Source of the price: `configured`, or the address of a price list."""
    date: str = ""
    """When the list was fetched, ISO 8601 in UTC."""
    canonical_slug: str | None = None
    """The dated name of the model that the price list describes."""
    max_completion_tokens: int | None = None
    supported_parameters: tuple[str, ...] = ()
    has_cache: bool = False
    """Whether the list has a price for cached prompt tokens."""

    @classmethod
    def of(cls, prices: Mapping[str, float | str], **about: Any) -> "Price":
        """Read prices under OpenRouter's names, in dollars per token.

        Without a price for cached tokens, they cost the full prompt price. If there are `overrides`
        (long contexts, hours of the day), the highest price counts.
        """

        def dearest(*names: str, default: int = 0) -> int:
            overrides = prices.get("overrides")
            lists = [prices, *(overrides if isinstance(overrides, list) else [])]
            found = [_pico(each[name]) for each in lists for name in names if each.get(name)]
            return max(found, default=default)

        prompt, completion = dearest("prompt"), dearest("completion")
        return cls(
            prompt=prompt,
            completion=completion,
            cache_read=dearest("input_cache_read", default=prompt),
            cache_write=dearest("input_cache_write", default=prompt),
            reasoning=dearest("internal_reasoning", default=completion),
            request=dearest("request"),
            has_cache=bool(prices.get("input_cache_read")),
            **about,
        )

    def bound_nano(self, n_prompt_tokens: int, n_completion_tokens: int) -> int:
        """Return the most that a call of this many tokens can cost, in nano-dollars."""
        pico = (
            n_prompt_tokens * max(self.prompt, self.cache_write)
            + n_completion_tokens * max(self.completion, self.reasoning)
            + self.request
        )
        return -(-pico // 1000)

    def cost_nano(
        self,
        n_prompt_tokens: int,
        n_completion_tokens: int,
        *,
        n_cached_tokens: int = 0,
        n_written_tokens: int = 0,
        n_reasoning_tokens: int = 0,
    ) -> int:
        """Return the cost of a call in nano-dollars.

        Cached and written tokens are part of the prompt tokens, and reasoning tokens of the
        completion tokens.
        """
        n_fresh = max(0, n_prompt_tokens - n_cached_tokens - n_written_tokens)
        pico = (
            n_fresh * self.prompt
            + n_cached_tokens * self.cache_read
            + n_written_tokens * self.cache_write
            + n_completion_tokens * self.completion
            + min(n_reasoning_tokens, n_completion_tokens) * (self.reasoning - self.completion)
            + self.request
        )
        return -(-pico // 1000)

    def max_price(self) -> dict[str, float]:
        """Return the prices as OpenRouter's `provider.max_price`: dollars per million tokens."""
        limits = {
            "prompt": max(self.prompt, self.cache_write) / 10**6,
            "completion": max(self.completion, self.reasoning) / 10**6,
        }
        if self.request:
            limits["request"] = self.request / 10**12
        return limits


class _Listed(msgspec.Struct):
    """One model of a cached price list."""

    pricing: dict[str, Any]
    canonical_slug: str | None = None
    max_completion_tokens: int | None = None
    supported_parameters: list[str] = []


class _PriceList(msgspec.Struct):
    fetched_at: datetime
    models: dict[str, _Listed]


@dataclass(kw_only=True)
class PriceBook:
    """The price lists of endpoints, stored on disk with the date of each."""

    folder: Place | None = None
    """Folder of the lists. With `None`, they stay in memory."""
    max_age: timedelta = timedelta(hours=24)
    """A list older than this is fetched again."""
    max_stale: timedelta = timedelta(days=7)
    """A list that can't be fetched again is used up to this age, and refused afterwards."""
    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))
    _lists: dict[str, _PriceList] = field(default_factory=dict)

    def fresh(self, base_url: str) -> bool:
        """Return whether the list of `base_url` is recent enough."""
        known = self._load(base_url)
        return known is not None and self.now() - known.fetched_at <= self.max_age

    def remember(self, base_url: str, models: list[dict[str, Any]]) -> None:
        """Store the answer of `/models` as the price list of `base_url`."""
        listed = {
            str(model["id"]): _Listed(
                pricing=model.get("pricing") or {},
                canonical_slug=model.get("canonical_slug"),
                max_completion_tokens=(model.get("top_provider") or {}).get(
                    "max_completion_tokens"
                ),
                supported_parameters=model.get("supported_parameters") or [],
            )
            for model in models
            if isinstance(model, dict) and "id" in model
        }
        self._lists[base_url] = _PriceList(self.now(), listed)
        if path := self._path(base_url):
            try:
                with written_whole(path) as file:
                    file.write(msgspec.json.encode(self._lists[base_url]))
            except StorageError as error:
                logger.warning("could not save the price list: %s", error)

    def models(self, base_url: str) -> list[str]:
        """Return the names of the models on the list of `base_url`, or none without a list."""
        known = self._load(base_url)
        return sorted(known.models) if known else []

    def price(self, teacher: TeacherSpec) -> Price:
        """Return the price of `teacher`: its own, or the one on the list of its endpoint.

        Raises:
            PriceError: neither is known, or the list is too old.
        """
        if teacher.price is not None:
            return Price.of(teacher.price)
        known = self._load(teacher.base_url)
        listed = known.models.get(listed_name(teacher.model)) if known else None
        if known is None or listed is None or not _is_priced(listed.pricing):
            raise PriceError(
                f"teacher {teacher.name}: no price for {teacher.model} at {teacher.base_url}; set "
                'price = {"prompt": ..., "completion": ...} in dollars per token (0 is a price)'
            )
        if self.now() - known.fetched_at > self.max_stale:
            raise PriceError(
                f"teacher {teacher.name}: the prices of {teacher.base_url} are from "
                f"{known.fetched_at:%Y-%m-%d} and could not be fetched again; retry, or set `price`"
            )
        return Price.of(
            listed.pricing,
            source=f"{teacher.base_url}/models",
            date=known.fetched_at.isoformat(timespec="seconds"),
            canonical_slug=listed.canonical_slug,
            max_completion_tokens=listed.max_completion_tokens,
            supported_parameters=tuple(listed.supported_parameters),
        )

    def _path(self, base_url: str) -> Place | None:
        name = re.sub(r"[^A-Za-z0-9]+", "-", base_url).strip("-")
        return self.folder / f"{name}.json" if self.folder else None

    def _load(self, base_url: str) -> _PriceList | None:
        if base_url not in self._lists and (path := self._path(base_url)) and path.exists():
            try:
                self._lists[base_url] = msgspec.json.decode(path.read_bytes(), type=_PriceList)
            except (OSError, msgspec.DecodeError) as error:
                logger.warning("%s: price list ignored (%s)", path, error)
        return self._lists.get(base_url)


def listed_name(model: str) -> str:
    """Return the name under which a price list has a model.

    `:nitro` and `:floor` only sort a router's endpoints, of which none may be dearer than listed. Other
    variants have prices of their own, or none that could be known, as `:online`.
    """
    name, _, variant = model.rpartition(":")
    return name if variant in ("nitro", "floor", "exacto") else model


def _is_priced(pricing: Mapping[str, Any]) -> bool:
    """Return whether a listed price can be a bound: routers list `-1` for "it depends"."""
    try:
        return all(Decimal(str(pricing[name])) >= 0 for name in ("prompt", "completion"))
    except (KeyError, ArithmeticError):
        return False

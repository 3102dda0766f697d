"""Find out what endpoints say before they are asked: keys, prices, models, and terms."""

import difflib
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from pydantic import SecretStr

from replay_pipeline.errors import (
    ConfigError,
    PriceError,
    TeacherAuthError,
    TeacherError,
    UntrustedError,
)
from replay_pipeline.replay.dialects.client import Client, run_apart
from replay_pipeline.replay.dialects.prices import Price, PriceBook, listed_name
from replay_pipeline.replay.dialects.servers import dialect_of
from replay_pipeline.settings import DEFAULT_TEACHERS, teacher_key
from replay_pipeline.storage.store import Place
from replay_pipeline.types import TeacherSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherCheck:
    """The known facts about one teacher before it is asked."""

    teacher: str
    model: str
    base_url: str
    dialect: str
    has_key: bool
    """Whether a key is present, or none is needed."""
    is_reachable: bool
    is_served: bool
    """Whether its endpoint lists the model."""
    prompt_usd_per_mtok: float | None
    completion_usd_per_mtok: float | None
    cached_usd_per_mtok: float | None
    price_source: str | None
    price_date: str | None
    is_distillable: bool | None
    problem: str | None
    """Why it can't be asked, or None if it can."""


def check_teachers(
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS, *, price_folder: Place | None = None
) -> list[TeacherCheck]:
    """Check every teacher without a call that costs money."""

    async def look() -> list[TeacherCheck]:
        book = PriceBook(folder=price_folder)
        async with Client(max_connections=8) as client:
            return [await _check(teacher, client, book) for teacher in teachers]

    return run_apart(look())


async def _check(teacher: TeacherSpec, client: Client, book: PriceBook) -> TeacherCheck:
    problems: list[str] = []
    key = None
    has_key = may_ask = True
    try:
        key = teacher_key(teacher)
    except ConfigError as error:
        has_key, may_ask = False, not isinstance(error, UntrustedError)
        problems.append(str(error))
    is_reachable = False
    try:
        if may_ask:
            models = await client.models(teacher.base_url, key, dialect=dialect_of(teacher))
            book.remember(teacher.base_url, models)
            is_reachable = True
    except TeacherAuthError as error:
        is_reachable = True
        problems.append(str(error))
    except TeacherError as error:
        problems.append(str(error))
    models = book.models(teacher.base_url)
    is_served = listed_name(teacher.model) in models
    if is_reachable and models and not is_served:
        problems.append(f"{teacher.base_url} does not serve {teacher.model}")
    price: Price | None = None
    try:
        price = book.price(teacher)
    except PriceError as error:
        # Its list of prices could not be asked for: that is the problem, and is told already.
        if is_reachable or not problems:
            problems.append(str(error))
    return TeacherCheck(
        teacher=teacher.name,
        model=teacher.model,
        base_url=teacher.base_url,
        dialect=dialect_of(teacher).name,
        has_key=has_key,
        is_reachable=is_reachable,
        is_served=is_served,
        prompt_usd_per_mtok=price.prompt / 1e6 if price else None,
        completion_usd_per_mtok=price.completion / 1e6 if price else None,
        cached_usd_per_mtok=price.cache_read / 1e6 if price else None,
        price_source=price.source if price else None,
        price_date=price.date or None if price else None,
        is_distillable=teacher.is_distillable,
        problem="; ".join(problems) or None,
    )


def teacher_keys(
    teachers: Sequence[TeacherSpec], *, is_required: bool = True
) -> dict[str, SecretStr | None]:
    """Look up the key of each teacher by name.

    Raises:
        ConfigError: a key that is required is not set.
        UntrustedError: a key may not be sent to its teacher's host.
    """
    keys: dict[str, SecretStr | None] = {}
    for teacher in teachers:
        try:
            keys[teacher.name] = teacher_key(teacher)
        except UntrustedError as error:
            raise UntrustedError(f"teacher {teacher.name}: {error}") from error
        except ConfigError as error:
            if is_required:
                raise ConfigError(f"teacher {teacher.name}: {error}") from error
            keys[teacher.name] = None
    return keys


async def fetch_prices(
    teachers: Sequence[TeacherSpec],
    *,
    keys: Mapping[str, SecretStr | None],
    folder: Place | None = None,
    settle_s: float = 60.0,
    stop: threading.Event | None = None,
    takes_any_age: bool = False,
) -> dict[str, Price]:
    """Find the price of each teacher by name: its own, or today's from its endpoint.

    After `stop` is set, endpoints have `settle_s` to answer. A list that can't be fetched again is used
    for a week, or `takes_any_age`.

    Raises:
        ConfigError: an endpoint doesn't serve the model, or can't be reached.
        PriceError: a price is not known.
    """
    book = PriceBook(folder=folder)
    if takes_any_age:
        book.max_stale = timedelta.max
    listed = [t for t in teachers if t.price is None and dialect_of(t).name == "openrouter"]
    async with Client(max_connections=4, stop=stop, settle_s=settle_s) as client:
        for teacher in teachers:
            client.check_way(teacher.base_url)
        for teacher in listed:
            url = teacher.base_url
            if not book.fresh(url):
                try:
                    book.remember(url, await client.models(url, keys[teacher.name]))
                except TeacherError as error:
                    if not book.models(url):
                        raise PriceError(
                            f"teacher {teacher.name}: no price: {error}; retry with a network (prices are kept), "
                            "or set `price` of the teacher"
                        ) from error
                    logger.warning("using an older price list: %s", error)
            _check_served(teacher, book.models(url))
    return {teacher.name: book.price(teacher) for teacher in teachers}


def _check_served(teacher: TeacherSpec, models: list[str]) -> None:
    model = teacher.model
    if listed_name(model) in models:
        return
    if model.endswith(":online"):
        raise ConfigError(
            f"teacher {teacher.name}: no list says what the searches of {model} cost; leave :online out, or set `price`"
        )
    close = difflib.get_close_matches(model, models, n=3, cutoff=0.4) or models[:3]
    raise ConfigError(
        f"teacher {teacher.name}: {teacher.base_url} does not serve {model}; similar names: {', '.join(close) or 'none'}"
    )

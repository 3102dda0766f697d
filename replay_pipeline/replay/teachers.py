"""Check whether teachers can be asked: reachable, served, priced, with a key, and with which terms."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from replay_pipeline.errors import (
    ConfigError,
    PriceError,
    TeacherAuthError,
    TeacherError,
    UntrustedError,
)
from replay_pipeline.replay.dialects import dialect_of
from replay_pipeline.replay.openrouter import Client, run_apart
from replay_pipeline.replay.prices import Price, PriceBook
from replay_pipeline.settings import DEFAULT_TEACHERS, teacher_key
from replay_pipeline.storage.store import Place
from replay_pipeline.types import TeacherSpec


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

    def to_json(self) -> dict[str, Any]:
        """Return plain data for a report."""
        return asdict(self)


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
    is_served = teacher.model in models
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

"""The options that every replay takes, and the checks that run before any cost."""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypedDict, Unpack

from replay_pipeline.errors import ConfigError
from replay_pipeline.replay.ask.looks import LOOKS_SHARE, MAX_LOOKS, AnswerLooks, Looks
from replay_pipeline.replay.buy.policy import Policy, parse_gates
from replay_pipeline.replay.dialects.base import DEFAULT_MAX_COMPLETION_TOKENS, RequestOptions
from replay_pipeline.replay.dialects.prices import floor_nano
from replay_pipeline.storage.store import Place
from replay_pipeline.types import MIN_P_BETTER, AgreementLevel, RetryPolicy, TeacherSpec

logger = logging.getLogger(__name__)


class AskingOptions(TypedDict, total=False):
    """The keyword options of every replay. `Asking` describes each one."""

    max_concurrency: int
    max_completion_tokens: int
    looks: AnswerLooks | None
    max_looks: int
    looks_share: float
    accepted_terms: Sequence[str]
    partition: str | None
    night: str | None
    limits_usd: Mapping[str, float | None]
    gates: Sequence[str]
    agreement_threshold: int
    level: AgreementLevel
    count_own_family: bool
    min_p_better: float
    counts_recorded: bool
    run_id: str | None
    retry: RetryPolicy
    price_folder: Place | None
    is_durable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking:
    """The options of a run, without its states, its teachers, and its ceiling."""

    max_concurrency: int = 64
    """Calls in flight at once, all teachers together."""
    max_completion_tokens: int = DEFAULT_MAX_COMPLETION_TOKENS
    looks: AnswerLooks | None = None
    """Who answers a teacher that looks before it acts. Without it, a look is its answer."""
    max_looks: int = MAX_LOOKS
    """After so many looks a teacher is asked no more."""
    looks_share: float = LOOKS_SHARE
    """What teachers are asked after a look costs at most so much of what the first steps of all questions cost."""
    accepted_terms: Sequence[str] = ()
    """Teachers that you accept although their vendors forbid training on their answers."""
    partition: str | None = None
    night: str | None = None
    """Date of the night. All runs of one night share a limit."""
    limits_usd: Mapping[str, float | None] = field(default_factory=dict)
    """Further ceilings by scope: `day`, `partition`, `night`, `teacher:NAME`. The ledger
    keeps them: a limit holds over all runs until you set another one here. `None` removes a
    limit."""
    gates: Sequence[str] = ()
    """Names of the gates that decide what a run buys; see `replay_pipeline.replay.buy.policy`."""
    agreement_threshold: int = 2
    """How many families must agree to make a consensus."""
    level: AgreementLevel = "effect"
    """How similar two actions must be to count as one vote."""
    count_own_family: bool = False
    """Whether teachers of the student's own family vote."""
    min_p_better: float = MIN_P_BETTER
    """What a pair needs, by which an estimate tells pairs from lessons. It decides no question."""
    counts_recorded: bool = True
    """Whether answers that were already in the ledger count against the ceiling of this run."""
    run_id: str | None = None
    """Processes with the same run id share its ceiling. By default, a new run."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    price_folder: Place | None = None
    """Folder of the price lists. With `None`, each run fetches them again."""
    is_durable: bool = True
    """Wait for the disk at each booking, so that bookings survive a power failure."""

    @classmethod
    def of(cls, **options: Unpack[AskingOptions]) -> "Asking":
        """Read the keyword options of a public function.

        Raises:
            ConfigError: no option has this name.
        """
        try:
            return cls(**options)
        except TypeError as error:
            raise ConfigError(f"replay: {error}") from error

    def policy(self) -> Policy:
        """Make the policy that decides what a run buys."""
        return parse_gates(
            self.gates,
            level=self.level,
            threshold=self.agreement_threshold,
            count_own_family=self.count_own_family,
            min_p_better=self.min_p_better,
        )

    def scopes(self) -> tuple[str, ...]:
        """Name the limits that every call counts against, besides run, day, and teacher."""
        named = (("partition", self.partition), ("night", self.night))
        return tuple(f"{kind}:{name}" for kind, name in named if name)

    def limits_nano(self, day: str, teachers: Iterable[str]) -> dict[str, int | None]:
        """Return the limits to set or to remove, by the name of their scope in the ledger.

        Raises:
            ConfigError: a limit names a scope that no call of this run counts toward.
        """
        known = {day, *(f"teacher:{name}" for name in teachers), *self.scopes()}
        of_run = {
            "day": day,
            "night": f"night:{self.night}",
            "partition": f"partition:{self.partition}",
        }
        limits: dict[str, int | None] = {}
        for scope, limit_usd in self.limits_usd.items():
            name = of_run.get(scope, scope)
            if name not in known:
                there = ", ".join(["day", "partition", *sorted(known - {day})])
                raise ConfigError(
                    f"limit {scope}={limit_usd}: no call of this run counts under {scope!r}, so this limit would have no effect; the known names are {there}"
                )
            limits[name] = None if limit_usd is None else floor_nano(limit_usd)
        return limits

    def request_options(self) -> RequestOptions:
        """Return the options that change what is sent."""
        return RequestOptions(
            max_completion_tokens=self.max_completion_tokens,
            accepted_terms=frozenset(self.accepted_terms),
        )

    def asking_on(self) -> Looks:
        """Return how teachers that look are asked on."""
        return Looks(
            options=self.request_options(),
            answer=self.looks,
            most=self.max_looks,
            share=self.looks_share,
        )


_DEAREST_TOKEN_USD = 0.01
"""No model costs as much per token: such a price is one of a million tokens."""


def today() -> str:
    """Name the scope of this UTC day."""
    return f"day:{datetime.now(UTC):%Y-%m-%d}"


def checked_ceiling(teachers: Sequence[TeacherSpec], max_total_usd: float, asking: Asking) -> int:
    """Check the settings before anything is sent, and return the ceiling.

    Raises:
        ConfigError: says which teacher or option is wrong, and what to do.
    """
    if not teachers:
        raise ConfigError("no teachers: name at least one model to ask")
    names = Counter(teacher.name for teacher in teachers)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigError(f"two teachers are called {twice[0]}: give each its own name")
    if isinstance(max_total_usd, bool) or not 0 <= max_total_usd < math.inf:
        raise ConfigError(f"max_total_usd={max_total_usd} must be a number of dollars, at least 0")
    for scope, limit in asking.limits_usd.items():
        if limit is not None and not 0 <= limit < math.inf:
            raise ConfigError(f"limit {scope}={limit}: a number of dollars >= 0 is needed")
    asking.limits_nano(today(), names)
    for name in ("max_concurrency", "max_completion_tokens"):
        if getattr(asking, name) < 1:
            raise ConfigError(f"{name}={getattr(asking, name)} must be at least 1")
    if not asking.looks_share >= 0:
        raise ConfigError(f"looks_share={asking.looks_share} must be a number, at least 0")
    asking.policy()
    for teacher in teachers:
        for name, usd in (teacher.price or {}).items():
            if name in ("prompt", "completion") and float(usd) >= _DEAREST_TOKEN_USD:
                raise ConfigError(
                    f"teacher {teacher.name}: price {name}={usd} is ${float(usd) * 1e6:,.0f} per million "
                    f"tokens; prices are in dollars per token: write {float(usd) / 1e6:g} for ${float(usd):g} per million"
                )
        accepted = {teacher.model, teacher.name, teacher.vendor} & set(asking.accepted_terms)
        if teacher.is_distillable is False and not accepted:
            raise ConfigError(
                f"teacher {teacher.name}: the terms of {teacher.model} forbid training on its "
                f"answers; leave it out, or accept that with accepted_terms={teacher.model!r}"
            )
    return floor_nano(max_total_usd)

"""Faults on demand: the ways in which an endpoint like OpenRouter fails, by name."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

PAID_FAULTS = frozenset(
    {"length", "content_filter", "malformed_arguments", "empty_paid", "refusal", "overcharge",
     "drop_after", "truncate", "stall", "stream", "truncate_stream", "no_usage", "hidden_cost"}
)  # fmt: skip
"""Faults after which the call is charged anyway."""

FREE_FAULTS = frozenset(
    {"status", "error_200", "choice_error", "empty_choices", "empty_answer", "drop_before",
     "not_json", "capacity", "stream_error"}
)  # fmt: skip
"""Faults after which the call costs nothing."""


@dataclass(slots=True, kw_only=True)
class Fault:
    """A rule that makes some calls fail."""

    kind: str
    probability: float = 1.0
    times: int | None = None
    """The most calls that it hits."""
    model: str | None = None
    state_id: str | None = None
    status: int = 500
    message: str = "a fault was asked for"
    error_type: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    retry_after_s: float | None = None
    factor: float = 2.0
    """Factor by which an overcharged call exceeds its price."""
    max_in_flight: int = 0
    """Number of calls at once above which `capacity` answers 429."""

    @classmethod
    def parse(cls, rules: Iterable[Mapping[str, Any]]) -> list[Self]:
        """Read rules from plain data.

        Raises:
            ValueError: a kind or field is unknown.
        """
        names = {each.name for each in fields(cls)}
        faults = []
        for rule in rules:
            if unknown := rule.keys() - names:
                raise ValueError(f"fault {dict(rule)}: unknown {', '.join(sorted(unknown))}")
            fault = cls(**rule)
            if fault.kind not in PAID_FAULTS | FREE_FAULTS:
                kinds = ", ".join(sorted(PAID_FAULTS | FREE_FAULTS))
                raise ValueError(f"fault kind {fault.kind!r} is not one of {kinds}")
            faults.append(fault)
        return faults

    def hits(self, model: str, state_id: str, n_in_flight: int, chance: random.Random) -> bool:
        """Return whether this call fails, and count down `times`."""
        if self.model not in (None, model) or self.state_id not in (None, state_id):
            return False
        if self.times == 0 or (self.kind == "capacity" and n_in_flight <= self.max_in_flight):
            return False
        if self.probability < 1.0 and chance.random() >= self.probability:
            return False
        if self.times is not None:
            self.times -= 1
        return True

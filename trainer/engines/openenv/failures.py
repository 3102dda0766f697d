"""Counts what became of tool calls, and stops a run whose environment is down.

TRL turns an exception in a tool into a message to the model, so an outage would train as a reward
of 0. Calls that the server refused are the model's own mistakes and stay messages.
"""

from collections import deque
from dataclasses import dataclass, field

from trainer.errors import EnvironmentFailedError, TrainerConfigError

__all__ = ["CallOutcomes", "FailureLimit"]


@dataclass(frozen=True, kw_only=True)
class FailureLimit:
    """How many of the last calls may fail before going on would be wrong."""

    max_frequency: float = 0.05
    """Share of the calls in the window."""
    window: int = 200
    """Calls that are looked back at."""
    min_calls: int = 10
    """Calls before the share means anything."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            TrainerConfigError: out of range.
        """
        if not 0.0 <= self.max_frequency < 1.0:
            raise TrainerConfigError(f"max_frequency={self.max_frequency} is not in [0, 1)")
        if not 1 <= self.min_calls <= self.window:
            raise TrainerConfigError(
                f"min_calls={self.min_calls} is not between 1 and window={self.window}"
            )


@dataclass
class CallOutcomes:
    """Counts of all rollouts of a run together."""

    limit: FailureLimit = field(default_factory=FailureLimit)
    n_calls: int = 0
    n_refused: int = 0
    """Answered with an error of the tool: unknown, wrong arguments."""
    n_failed: int = 0
    """Not answered: connection, time-out, crash of the environment."""
    last_failure: str = ""
    _recent: deque[bool] = field(default_factory=deque, init=False, repr=False)

    def answered(self, *, is_refused: bool) -> None:
        """Note a call that the server answered."""
        self.n_refused += int(is_refused)
        self._note(has_failed=False)

    def failed(self, reason: str) -> None:
        """Note a call that got no answer."""
        self.n_failed += 1
        self.last_failure = reason
        self._note(has_failed=True)

    def _note(self, *, has_failed: bool) -> None:
        self.n_calls += 1
        self._recent.append(has_failed)
        if len(self._recent) > self.limit.window:
            self._recent.popleft()

    @property
    def failure_frequency(self) -> float:
        """Share of failures among the last calls."""
        return sum(self._recent) / len(self._recent) if self._recent else 0.0

    def check(self) -> None:
        """Pass while the environment is up.

        Raises:
            EnvironmentFailedError: too many of the last calls failed.
        """
        enough = len(self._recent) >= self.limit.min_calls
        if enough and self.failure_frequency > self.limit.max_frequency:
            raise EnvironmentFailedError(
                f"{sum(self._recent)} of the last {len(self._recent)} calls of the environment "
                f"failed (at most {self.limit.max_frequency:.0%} may): {self.last_failure}"
            )

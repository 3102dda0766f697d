"""Count the outcomes of tool calls, and stop a run whose environment is down.

TRL turns an exception in a tool into a message to the model, so the model would train on an outage
as a reward of 0. Calls that the server refuses are the model's own errors, and stay messages.
"""

from collections import deque
from dataclasses import dataclass, field

from trainer.errors import EnvironmentFailedError, TrainerConfigError


@dataclass(frozen=True, kw_only=True)
class FailureLimit:
    """How many of the last calls may fail before the run stops."""

    max_frequency: float = 0.05
    """Largest share of failed calls in the window."""
    window: int = 200
    """Number of recent calls to look at."""
    min_calls: int = 10
    """Fewest calls for which the share is meaningful."""

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
    """The counts over all rollouts of a run."""

    limit: FailureLimit = field(default_factory=FailureLimit)
    n_calls: int = 0
    n_refused: int = 0
    """Calls with an error of the tool, such as an unknown tool or wrong arguments."""
    n_failed: int = 0
    """Calls without an answer, because of the connection, a timeout, or a crash of the environment."""
    last_failure: str = ""
    _recent: deque[bool] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._recent = deque(maxlen=self.limit.window)

    def answered(self, *, is_refused: bool) -> None:
        """Record a call that the server answered."""
        self.n_refused += int(is_refused)
        self._note(has_failed=False)

    def failed(self, reason: str) -> None:
        """Record a call that got no answer."""
        self.n_failed += 1
        self.last_failure = reason
        self._note(has_failed=True)

    def _note(self, *, has_failed: bool) -> None:
        self.n_calls += 1
        self._recent.append(has_failed)

    @property
    def failure_frequency(self) -> float:
        """Share of failures among the last calls."""
        return sum(self._recent) / len(self._recent) if self._recent else 0.0

    def check(self) -> None:
        """Check that the environment is up.

        Raises:
            EnvironmentFailedError: too many of the last calls failed.
        """
        enough = len(self._recent) >= self.limit.min_calls
        if enough and self.failure_frequency > self.limit.max_frequency:
            raise EnvironmentFailedError(
                f"{sum(self._recent)} of the last {len(self._recent)} calls of the environment "
                f"failed (at most {self.limit.max_frequency:.0%} may): {self.last_failure}"
            )

"""Use any OpenEnv server as TRL's `environment_factory`.

TRL wants a class whose public methods are tools, but a server only has a schema. So the class is
made from the schema, with one WebSocket session per rollout. TRL reuses instances, so `reset`
clears everything.
"""

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from trainer.engines.openenv.tool_methods import tool_method
from trainer.errors import EnvironmentFailedError, TrainerConfigError

logger = logging.getLogger(__name__)


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


ToolSpec = Mapping[str, Any]
"""`name`, `description` and `input_schema` of a tool."""


@dataclass(frozen=True, kw_only=True)
class ServerReply:
    """The reply of a server to a reset or a call."""

    text: str | None = None
    """The text for the model."""
    reward: float = 0.0
    is_done: bool = False
    is_refused: bool = False
    """Whether the tool reports an error of the model."""
    observation: Mapping[str, Any] = field(default_factory=dict)
    """The whole reply of the server."""


class EnvironmentSession(Protocol):
    """One rollout's connection to a server. Every method may raise `EnvironmentFailedError`."""

    def reset(self, **options: Any) -> ServerReply:
        """Start an episode."""
        ...

    def call(self, name: str, arguments: dict[str, Any]) -> ServerReply:
        """Call a tool."""
        ...

    def close(self) -> None:
        """End the session."""
        ...


class _Environment:
    """What TRL drives: reset, tools (added to the subclass), and the reward of the rollout."""

    _open: ClassVar[Callable[[], EnvironmentSession]]
    _columns: ClassVar[tuple[str, ...]]
    _outcomes: ClassVar[CallOutcomes]

    def __init__(self) -> None:
        """Connect when first reset."""
        self._session: EnvironmentSession | None = None
        self._forget()

    def _forget(self) -> None:
        self._reward, self._is_done, self._broken = 0.0, False, ""

    def reset(self, **row: Any) -> str | None:
        """Start the episode that a dataset row names; what the server says is added to the prompt.

        Raises:
            EnvironmentFailedError: the server cannot, or too many calls failed.
            TrainerConfigError: the row has none of the columns that choose an episode.
        """
        self._outcomes.check()
        self._forget()
        options = {name: row[name] for name in self._columns if row.get(name) is not None}
        if self._columns and not options:
            raise TrainerConfigError(
                f"a dataset row has none of the columns {', '.join(self._columns)}: the server "
                "would choose an episode by itself"
            )
        if self._session is None:
            self._session = type(self)._open()
        try:
            return self._session.reset(**options).text
        except EnvironmentFailedError:
            self._drop_session()
            raise

    def get_reward(self) -> float:
        """Return the sum of the rewards since the reset.

        Raises:
            EnvironmentFailedError: too many calls failed.
        """
        self._outcomes.check()
        return self._reward

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        if self._broken:
            # A new connection would be another episode.
            self._outcomes.failed(self._broken)
            raise EnvironmentFailedError(self._broken)
        if self._is_done:
            return "The episode is over."
        if self._session is None:
            raise EnvironmentFailedError(f"{name} was called before reset")
        try:
            answer = self._session.call(name, arguments)
        except EnvironmentFailedError as error:
            self._broken = str(error)
            self._outcomes.failed(self._broken)
            self._drop_session()
            raise
        self._outcomes.answered(is_refused=answer.is_refused)
        self._reward += answer.reward
        self._is_done = answer.is_done
        return answer.text or ""

    def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()


def make_environment(
    tools: list[ToolSpec],
    open_session: Callable[[], EnvironmentSession],
    *,
    columns: tuple[str, ...] = ("state_id",),
    limit: FailureLimit | None = None,
    name: str = "OpenEnv",
) -> tuple[type[_Environment], CallOutcomes]:
    """Make a class for `environment_factory`, and the counts that all its instances share.

    Args:
        tools: the server's tools.
        open_session: opens a session. Called once per instance.
        columns: columns of a dataset row that `reset` sends to the server. If empty, it sends
            nothing.
        limit: limit on failed calls.
        name: name of the class, under which TRL logs the reward.

    Raises:
        TrainerConfigError: there is no tool, or TRL would hide one.
    """
    if not tools:
        raise TrainerConfigError(
            "the environment server offers no tool, so the model could learn nothing"
        )
    outcomes = CallOutcomes(limit or FailureLimit())
    members: dict[str, Any] = {
        "_open": staticmethod(open_session),
        "_columns": columns,
        "_outcomes": outcomes,
    }
    for tool in tools:
        members[tool["name"]] = tool_method(
            tool["name"],
            str(tool.get("description") or ""),
            tool.get("input_schema") or {},
            lambda environment, called, arguments: environment._call(called, arguments),
        )
    return type(name, (_Environment,), members), outcomes


def as_text(value: Any) -> str:
    """Return a tool's result as text for the model."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

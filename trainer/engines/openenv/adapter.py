"""Any OpenEnv server as TRL's `environment_factory`.

TRL wants a class whose public methods are tools; a server only has a schema. The class is made from
the schema, one WebSocket session per rollout. TRL keeps instances and uses them again, so `reset`
clears everything.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from trainer.engines.openenv.failures import CallOutcomes, FailureLimit
from trainer.engines.openenv.tool_methods import tool_method
from trainer.errors import EnvironmentFailedError, TrainerConfigError

__all__ = ["EnvironmentSession", "ServerReply", "ToolSpec", "make_environment"]

logger = logging.getLogger(__name__)

ToolSpec = Mapping[str, Any]
"""`name`, `description` and `input_schema` of a tool."""


@dataclass(frozen=True, kw_only=True)
class ServerReply:
    """The reply of a server to a reset or a call."""

    text: str | None = None
    """For the model."""
    reward: float = 0.0
    is_done: bool = False
    is_refused: bool = False
    """The tool reports a mistake of the model."""
    observation: Mapping[str, Any] = field(default_factory=dict)
    """All that the server said."""


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
    """Make a class for `environment_factory`, and the counts that all of its instances share.

    Args:
        tools: what the server offers.
        open_session: connects; called once per instance.
        columns: of a dataset row, what `reset` sends to the server; empty sends nothing.
        limit: how many calls may fail.
        name: of the class: TRL logs the reward under it.

    Raises:
        TrainerConfigError: no tools, or one that TRL would hide.
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
    """Return a tool's result as the model reads it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

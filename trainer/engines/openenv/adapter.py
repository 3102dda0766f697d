"""Use any OpenEnv server as TRL's `environment_factory`.

TRL wants a class whose public methods are tools, but a server only has a schema. So the class is
made from the schema, with one WebSocket session per rollout. TRL reuses instances, so `reset`
clears everything.

A parameter whose name isn't valid in Python (`-A`, `class`) gets another one (`_A`, `class_`).
Calls are translated back, and accept the original name too.
"""

import functools
import inspect
import json
import keyword
import operator
import re
import typing
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from trainer.errors import EnvironmentFailedError, TrainerConfigError

MAX_FAILED, WINDOW, MIN_CALLS = 0.05, 200, 10
"""The largest share of failed calls among the last ones, and the fewest calls that have a share."""


@dataclass
class CallOutcomes:
    """The counts over all rollouts of a run."""

    n_calls: int = 0
    n_refused: int = 0
    """Calls with an error of the tool, such as an unknown tool or wrong arguments."""
    n_failed: int = 0
    """Calls without an answer, because of the connection, a timeout, or a crash of the environment."""
    last_failure: str = ""
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def answered(self, *, is_refused: bool) -> None:
        """Record a call that the server answered."""
        self.n_calls += 1
        self.n_refused += int(is_refused)
        self._recent.append(False)

    def failed(self, reason: str) -> None:
        """Record a call that got no answer."""
        self.n_calls += 1
        self.n_failed += 1
        self.last_failure = reason
        self._recent.append(True)

    def check(self) -> None:
        """Check that the environment is up.

        Raises:
            EnvironmentFailedError: too many of the last calls failed.
        """
        n_failed, n = sum(self._recent), len(self._recent)
        if n >= MIN_CALLS and n_failed > MAX_FAILED * n:
            raise EnvironmentFailedError(
                f"{n_failed} of the last {n} calls of the environment failed (at most "
                f"{MAX_FAILED:.0%} may): {self.last_failure}"
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


class _Environment:
    """What TRL drives: reset, tools (added to the subclass), and the reward of the rollout."""

    _open: ClassVar[Callable[[], Any]]
    _columns: ClassVar[tuple[str, ...]]
    _outcomes: ClassVar[CallOutcomes]

    def __init__(self) -> None:
        self._session: Any = None
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
        """Return the sum of the rewards since the reset."""
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
    open_session: Callable[[], Any],
    *,
    columns: tuple[str, ...] = ("state_id",),
    name: str = "OpenEnv",
) -> tuple[type[_Environment], CallOutcomes]:
    """Make a class for `environment_factory`, and the counts that all its instances share.

    Args:
        tools: the server's tools.
        open_session: opens a session. Called once per instance.
        columns: columns of a dataset row that `reset` sends to the server. If empty, it sends
            nothing.
        name: name of the class, under which TRL logs the reward.

    Raises:
        TrainerConfigError: there is no tool, or TRL would hide one.
    """
    if not tools:
        raise TrainerConfigError(
            "the environment server offers no tool, so the model could learn nothing"
        )
    outcomes = CallOutcomes()
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


_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "object": dict,
    "null": type(None),
}
RESERVED = frozenset({"reset", "get_reward"})

ToolCaller = Callable[[Any, str, dict[str, Any]], str]
"""A function from an environment, a tool's name, and its arguments to the tool's answer."""


def tool_method(
    name: str, description: str, schema: Mapping[str, Any], call: ToolCaller
) -> Callable[..., str]:
    """Make a method that passes its arguments to `call`, with the signature of `schema`.

    Raises:
        TrainerConfigError: TRL would hide a tool with this name from the model.
    """
    if name in RESERVED or name.startswith("_") or not name:
        raise TrainerConfigError(f"TRL does not offer a tool called {name!r} to a model: rename it")
    properties = dict(schema.get("properties") or {})
    required = set(schema.get("required") or ())
    python_names = _python_names(properties)

    def method(self: Any, **arguments: Any) -> str:
        original = {python_names.get(key, key): value for key, value in arguments.items()}
        return call(self, name, original)

    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    annotations: dict[str, Any] = {}
    lines = [" ".join(description.split()) or name, "", "Args:"]
    # Parameters without a default come first, as Python wants it.
    for python_name in sorted(python_names, key=lambda key: python_names[key] not in required):
        original = python_names[python_name]
        hint = _hint(properties[original])
        is_required = original in required
        annotations[python_name] = hint
        parameters.append(
            inspect.Parameter(
                python_name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if is_required else None,
                annotation=hint,
            )
        )
        lines.append(f"    {python_name}: {_description(properties[original], original)}")
    method.__name__ = method.__qualname__ = name
    method.__doc__ = "\n".join(lines if properties else lines[:1])
    method.__annotations__ = {**annotations, "return": str}
    method.__signature__ = inspect.Signature(parameters, return_annotation=str)  # type: ignore[attr-defined]
    return method


def _python_names(properties: Mapping[str, Any]) -> dict[str, str]:
    """Map Python names to original names, each once."""
    names: dict[str, str] = {}
    for original in properties:
        name = re.sub(r"\W", "_", original) or "_"
        if name[0].isdigit():
            name = f"_{name}"
        while keyword.iskeyword(name) or name == "self" or name in names:
            name += "_"
        names[name] = original
    return names


def _description(schema: Any, original: str) -> str:
    """Put a description on one line: an end of line ends a parameter, `choices` would be parsed."""
    text = schema.get("description") if isinstance(schema, Mapping) else None
    words = " ".join(str(text or original).split())
    return re.sub(r"\(choices:", "(one of:", words, flags=re.IGNORECASE)


def _hint(schema: Any) -> Any:
    """Return the Python type of a schema; what Python cannot say is any value."""
    if not isinstance(schema, Mapping):
        return Any
    if values := schema.get("enum"):
        is_plain = all(isinstance(value, str | int | bool | None) for value in values)
        return typing.Literal.__getitem__(tuple(values)) if is_plain else Any  # type: ignore[attr-defined]
    for key in ("anyOf", "oneOf"):
        if options := schema.get(key):
            return _either([_hint(option) for option in options])
    kind = schema.get("type")
    if isinstance(kind, list):
        return _either([_hint({**schema, "type": one}) for one in kind])
    if kind == "array":
        item = _hint(schema.get("items"))
        return list if item is Any else list[item]
    return _TYPES.get(str(kind), Any)


def _either(hints: list[Any]) -> Any:
    return Any if Any in hints else functools.reduce(operator.or_, hints)

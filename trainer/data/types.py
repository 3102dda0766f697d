"""The records of the trainer: the rows of a dataset, and the wish that a run ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NotRequired, TypedDict

Message = dict[str, Any]
"""One chat message in OpenAI's form: `role`, `content`, and for an assistant `tool_calls`."""

Tool = dict[str, Any]
"""One tool in OpenAI's form: `{"type": "function", "function": {...}}`."""


class _Row(TypedDict):
    """What rows of all three kinds say of their state."""

    prompt: list[Message]
    tools: NotRequired[list[Tool] | None]
    state_id: NotRequired[str | None]
    session_id: NotRequired[str | None]
    sides: NotRequired[list[Message]]
    """Actions that the prompt must be enough for; by default those of the row."""
    hint: NotRequired[str | None]
    """The recorded error or feedback: what went wrong at this state."""


class PairRow(_Row):
    """One row of the dataset's `pairs`: at `prompt`, `chosen` is better than `rejected`."""

    chosen: list[Message]
    rejected: list[Message]
    weight: NotRequired[float | None]
    balance: NotRequired[float]
    """Factor of the weight as a pair, which a run with `balance_pairs` adds."""


class PromptRow(_Row):
    """One row of the dataset's `prompts`: a state, and the action that the teachers agree on."""

    consensus: Message


class PositiveRow(_Row):
    """One row of the dataset's `positives`: the student's own action was the consensus."""

    completion: list[Message]


class StopRequest:
    """The wish that a run ends. Whoever asks interrupts the run at once, unless `is_held`."""

    def __init__(self) -> None:
        self.is_asked = self.is_held = False

    def __call__(self) -> bool:
        """Return whether somebody asked."""
        return self.is_asked

    def ask(self) -> None:
        """Ask, in the thread of the run.

        Raises:
            KeyboardInterrupt: the run can be left here.
        """
        self.is_asked = True
        if not self.is_held:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Do what must not be left halfway. The wish waits until the end.

        Raises:
            KeyboardInterrupt: somebody asked in the meantime.
        """
        self.is_held = True
        yield
        self.is_held = False
        if self.is_asked:
            raise KeyboardInterrupt

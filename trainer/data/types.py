"""The records of the trainer: the rows of a dataset."""

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

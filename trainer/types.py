"""The words of the trainer: what a dataset row is, and what a run reports."""

from typing import Any, NotRequired, TypedDict

Message = dict[str, Any]
"""One chat message in the OpenAI form: `role`, `content`, for an assistant `tool_calls`."""

Tool = dict[str, Any]
"""One tool in the OpenAI form: `{"type": "function", "function": {...}}`."""


class PairRow(TypedDict):
    """One row of the dataset's `pairs`: at `prompt`, `chosen` beats `rejected`."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: NotRequired[list[Tool] | None]
    state_id: NotRequired[str | None]
    session_id: NotRequired[str | None]
    hint: NotRequired[str | None]
    weight: NotRequired[float | None]
    agreement_level: NotRequired[str | None]


class PromptRow(TypedDict):
    """One row of the dataset's `prompts`: a state, and the action that the teachers agree on."""

    prompt: list[Message]
    consensus: Message
    tools: NotRequired[list[Tool] | None]
    state_id: NotRequired[str | None]
    session_id: NotRequired[str | None]
    hint: NotRequired[str | None]


class PositiveRow(TypedDict):
    """One row of the dataset's `positives`: the student's own action was the consensus."""

    prompt: list[Message]
    completion: list[Message]
    tools: NotRequired[list[Tool] | None]
    state_id: NotRequired[str | None]
    session_id: NotRequired[str | None]
    hint: NotRequired[str | None]

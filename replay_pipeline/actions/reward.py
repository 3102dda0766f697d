"""Agreement as a verifiable reward: how close a completion is to the teachers' consensus."""

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from replay_pipeline.actions.agreement import agreement_level
from replay_pipeline.actions.canonical import Action, canonical_action, parse_rendered
from replay_pipeline.types import AgreementLevel, Message

LEVEL_CREDIT: Mapping[AgreementLevel, float] = MappingProxyType(
    {"exact": 1.0, "effect": 1.0, "target": 0.4, "tool": 0.1}
)
"""Reward by the level at which a completion agrees with the consensus. Without agreement, it is 0."""

Completion = str | Message | Sequence[Message]
"""The output of a policy: a text, an assistant message, or messages. Of messages, the first
assistant message counts."""


def consensus_reward(completion: Completion, row: Mapping[str, Any]) -> float:
    """Return 1.0 for an action that is equivalent to the consensus of `row`, and less for looser agreement.

    Args:
        completion: The output of the policy. A text may contain tool calls in canonical form
            (`Action.render`) or in `<tool_call>` tags.
        row: A row of the published dataset, a `DPOPair`, or a row of the pairs table. Its consensus
            is in `consensus`, `chosen_action`, `chosen_action_json`, or `chosen`. The working
            directory is its `cwd`, or else the one in the prompt's system message.

    Raises:
        KeyError: `row` has none of these columns.
    """
    cwd = _working_directory(row)
    level = agreement_level(_action(completion, cwd), _consensus(row, cwd))
    return 0.0 if level is None else LEVEL_CREDIT[level]


_WORKING_DIRECTORY = re.compile(
    r"^(?:\s*- |\s*)(?:Primary w|W)orking directory: (/.*)$", re.MULTILINE
)


def _working_directory(row: Mapping[str, Any]) -> str | None:
    if cwd := row.get("cwd"):
        return cwd
    for key in ("prompt", "prompts", "state_messages"):
        messages = row.get(key)
        if isinstance(messages, list) and messages and isinstance(messages[0], Mapping):
            content = messages[0].get("content")
            found = _WORKING_DIRECTORY.search(content) if isinstance(content, str) else None
            return found[1].strip() if found else None
    return None


def _consensus(row: Mapping[str, Any], cwd: str | None) -> Action:
    for key in ("consensus", "chosen_action"):
        if action := row.get(key):
            return _action(action, cwd)
    if action := row.get("chosen_action_json"):
        return canonical_action(json.loads(action), cwd=cwd)
    return _action(row["chosen"], cwd)


def _action(completion: Completion, cwd: str | None) -> Action:
    if isinstance(completion, str):
        return parse_rendered(completion, cwd=cwd)
    if not isinstance(completion, Mapping):
        replies = [message for message in completion if message.get("role") == "assistant"]
        if not replies:
            return canonical_action(None)
        completion = replies[0]
    text = completion.get("content")
    if isinstance(text, str) and not completion.get("tool_calls"):
        return parse_rendered(text, cwd=cwd)
    return canonical_action(dict(completion), cwd=cwd)

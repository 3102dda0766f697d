"""A verifiable reward: how well an action agrees with the one that the teachers agreed on."""

import importlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from trainer.errors import TrainerConfigError
from trainer.types import Message

RowReward = Callable[[Message, Mapping[str, Any]], float]
"""From an assistant message and its dataset row to a reward, at best 1.0."""

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.S)
SAME_TOOLS_REWARD = 0.25


def parse_action(text: str) -> Message:
    """Read a generated text as an assistant message; tool calls are in the Hermes form.

    A call that is no JSON stays in the text: it is not an action.
    """
    calls = []

    def take(match: re.Match[str]) -> str:
        try:
            call = json.loads(match.group(1))
            function = {
                "name": str(call["name"]),
                "arguments": json.dumps(call.get("arguments") or {}, sort_keys=True),
            }
        except (ValueError, KeyError, TypeError):
            return match.group(0)
        calls.append({"id": f"call_{len(calls)}", "type": "function", "function": function})
        return ""

    message: Message = {"role": "assistant", "content": _CALL.sub(take, text).strip()}
    return message | ({"tool_calls": calls} if calls else {})


def canonical_calls(message: Message) -> list[tuple[str, str]]:
    """Return the tool calls as sorted (name, arguments) with arguments as canonical JSON."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments") or "{}"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = {"": arguments}
        calls.append((str(call["function"]["name"]), json.dumps(arguments, sort_keys=True)))
    return sorted(calls)


def agreement(action: Message, consensus: Message) -> str | None:
    """Compare two actions: `exact` (equal calls, or equal text without calls), `tool` or `None`.

    A plain stand-in for the pipeline's matcher, which also knows equal effects and targets.
    """
    ours, theirs = canonical_calls(action), canonical_calls(consensus)
    if not ours and not theirs:
        texts = [" ".join(str(m.get("content") or "").split()) for m in (action, consensus)]
        return "exact" if texts[0] == texts[1] else None
    if ours == theirs:
        return "exact"
    names = [[name for name, _ in calls] for calls in (ours, theirs)]
    return "tool" if names[0] == names[1] else None


def consensus_reward(action: Message, row: Mapping[str, Any]) -> float:
    """Return 1.0 for the consensus action itself, 0.25 for the same tools, else 0."""
    rewards = {"exact": 1.0, "tool": SAME_TOOLS_REWARD, None: 0.0}
    return rewards[agreement(action, row["consensus"])]


def load_function(path: str) -> Callable[..., Any]:
    """Load the function at `package.module:name`.

    Raises:
        TrainerConfigError: it cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise TrainerConfigError(
            f"{path!r} cannot be loaded ({error}): write package.module:function"
        ) from error
    if not callable(found):
        raise TrainerConfigError(f"{path!r} is not a function")
    return found


def load_reward(path: str) -> RowReward:
    """Load a reward: `consensus` is built in, else `package.module:function(message, row)`.

    Raises:
        TrainerConfigError: it cannot be imported.
    """
    return consensus_reward if path == "consensus" else load_function(path)


def as_trl_reward(reward: RowReward) -> Callable[..., list[float]]:
    """Put a reward into TRL's calling convention.

    A decision on record brings its message in the column `action`; other completions are parsed.
    """

    def consensus(completions: list[Any], **columns: Any) -> list[float]:
        names = [
            k for k, v in columns.items() if isinstance(v, list) and len(v) == len(completions)
        ]
        rewards = []
        for i, completion in enumerate(completions):
            row = {name: columns[name][i] for name in names}
            # The pipeline's own matcher knows the consensus under the pairs table's name.
            row.setdefault("chosen_action", row.get("consensus"))
            action = row.get("action") or as_message(completion)
            rewards.append(float(reward(action, row)))
        return rewards

    return consensus


def as_message(completion: Any) -> Message:
    """Turn a completion as TRL hands it over (text, or a list of messages) into one message."""
    if isinstance(completion, str):
        return parse_action(completion)
    message = completion[-1]
    return message if message.get("tool_calls") else parse_action(str(message.get("content") or ""))

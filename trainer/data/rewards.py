"""A verifiable reward: how well an action agrees with the teachers' consensus."""

import importlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from trainer.data.template import with_object_arguments
from trainer.data.types import Message
from trainer.errors import TrainerConfigError

RowReward = Callable[[Message, Mapping[str, Any]], float]
"""A function from an assistant message and its dataset row to a reward, at most 1.0."""

_TAGGED = re.compile(
    r"<tool_call>\s*(?P<tagged>.*?)\s*</tool_call>"  # Hermes, Qwen, and our plain form
    r"|<function=(?P<name>[^>\s]+)>(?P<parameters>.*?)</function>"  # Qwen coder, older Llama
    r"|(?:\[TOOL_CALLS\]|<\|python_tag\|>|```tool_code)\s*(?P<marked>.*)",  # Mistral, Llama 3, Gemma
    re.S,
)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.S)
SAME_TOOLS_REWARD = 0.25


def parse_action(text: str) -> Message:
    """Read a generated text as an assistant message, with tool calls in any of the usual forms.

    Hermes and Qwen write `<tool_call>` around JSON, Qwen's coders `<function=name>` with
    `<parameter=name>`, Mistral `[TOOL_CALLS]` and a list, Llama 3 a bare object with `parameters`.
    A call that isn't JSON stays text, and isn't an action.
    """
    calls: list[dict[str, Any]] = []

    def take(match: re.Match[str]) -> str:
        if match["name"]:
            body = match["parameters"]
            found = dict(_PARAMETER.findall(body)) or _json_of(body)
            read = _calls_in({"name": match["name"], "arguments": found})
        elif "<function=" in (match["tagged"] or ""):
            return _TAGGED.sub(take, match["tagged"])
        else:
            read = _calls_in(_json_of(match["tagged"] or match["marked"] or ""))
        calls.extend(read)
        return "" if read else match.group(0)

    # A message that is nothing but a call, as Llama 3 writes it, needs no mark.
    calls.extend(_calls_in(_json_of(text)))
    content = "" if calls else _TAGGED.sub(take, text).strip()
    message: Message = {"role": "assistant", "content": content}
    numbered = [
        {"id": f"call_{number}", "type": "function", "function": function}
        for number, function in enumerate(calls)
    ]
    return message | ({"tool_calls": numbered} if numbered else {})


def _json_of(text: str) -> Any:
    try:
        return json.loads(text.strip())
    except ValueError:
        return None


def _calls_in(value: Any) -> list[dict[str, Any]]:
    """Read one call or a list of calls; nothing where a part of it is no call."""
    functions = []
    for call in value if isinstance(value, list) else [value]:
        arguments = (
            call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
        )
        if not isinstance(call, dict) or "name" not in call:
            return []
        if not isinstance(arguments, dict | None):
            return []
        functions.append(
            {"name": str(call["name"]), "arguments": json.dumps(arguments or {}, sort_keys=True)}
        )
    return functions


def canonical_calls(message: Message) -> list[tuple[str, str]]:
    """Return the tool calls as sorted (name, arguments), with arguments as canonical JSON."""
    functions = [
        with_object_arguments(call["function"]) for call in message.get("tool_calls") or ()
    ]
    return sorted(
        (str(one["name"]), json.dumps(one["arguments"], sort_keys=True)) for one in functions
    )


def agreement(action: Message, consensus: Message) -> str | None:
    """Compare two actions: `exact` (equal calls, or equal text without calls), `tool`, or None.

    This is simpler than the pipeline's matcher, which also knows equal effects and targets.
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
    """Load a reward: the built-in `consensus`, or `package.module:function(message, row)`."""
    return consensus_reward if path == "consensus" else load_function(path)


def as_trl_reward(reward: RowReward) -> Callable[..., list[float]]:
    """Put a reward into TRL's calling convention.

    A recorded decision has its message in the column `action`. Other completions are parsed.
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
    """Turn a completion from TRL (text, or a list of messages) into one message."""
    if isinstance(completion, str):
        return parse_action(completion)
    message = completion[-1]
    return message if message.get("tool_calls") else parse_action(str(message.get("content") or ""))

"""Read the tokens and the cost that a reply reports, in the shapes that providers send.

`usage.toml` lists the names. What they mean differs as well: cached tokens are part of the prompt or
stand beside it, reasoning is part of the completion or stands beside it, and some servers say so only
in the total. So a block is believed if one reading adds up to its total. Otherwise the dearest reading
counts, and the row is flagged.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from replay_pipeline.replay.dialects.base import as_mapping
from replay_pipeline.replay.dialects.prices import nano

_NAMES = tomllib.loads(Path(__file__).with_name("usage.toml").read_text("utf-8"))
_MOST_USD = 10_000.0
"""No single call costs more: a larger figure is a mistake, and would not fit the ledger."""
_MOST_TOKENS = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """The usage that an endpoint reports for a call. `None` means that it isn't reported."""

    cost_nano: int | None = None
    fee_nano: int = 0
    """A part of the cost that is stated while the rest is not: a router's fee on a key of your own."""
    n_prompt_tokens: int | None = None
    """All tokens of the prompt, cached and written ones included."""
    n_completion_tokens: int | None = None
    """All tokens that were written, reasoning included."""
    n_cached_tokens: int | None = None
    n_written_tokens: int | None = None
    n_reasoning_tokens: int | None = None
    problem: str | None = None
    """Why the counts contradict each other, in which case they are the dearest reading."""


def read_usage(reply: Mapping[str, Any], headers: Mapping[str, str]) -> Usage:
    """Read the tokens and the cost of a reply; what isn't a number is not known."""
    block = next(_blocks(reply), {})
    counts = {
        name: next((n for path in paths if (n := as_count(_at(block, path))) is not None), None)
        for name, paths in _NAMES["tokens"].items()
    }
    cost, fee = _cost_nano(reply, headers), 0
    usage = as_mapping(reply.get("usage"))
    if usage.get("is_byok") and cost is not None:
        upstream = as_number(_at(usage, "cost_details.upstream_inference_cost"))
        # The router states only its fee where it doesn't know what the key's owner pays.
        cost, fee = (None, cost) if upstream is None else (cost + nano(upstream), 0)
    reading = _reading(**counts, is_beside="prompt_tokens" not in block)
    return replace(reading, cost_nano=cost, fee_nano=fee)


def _reading(
    prompt: int | None,
    completion: int | None,
    total: int | None,
    cached: int | None,
    written: int | None,
    reasoning: int | None,
    *,
    is_beside: bool,
) -> Usage:
    """Return the counts with everything in the prompt or the completion of which it is a part."""
    told = Usage(
        n_prompt_tokens=prompt,
        n_completion_tokens=completion,
        n_cached_tokens=cached,
        n_written_tokens=written,
        n_reasoning_tokens=reasoning,
    )
    if prompt is None or completion is None:
        return told
    read, wrote, thought = cached or 0, written or 0, reasoning or 0
    # Whether each count stands beside the prompt or the completion. A part can't exceed its whole.
    choices = [
        (beside_read, beside_wrote, beside_thought)
        for beside_read, beside_wrote, beside_thought in product(
            (0, read), (0, wrote), (0, thought)
        )
        if prompt + beside_read + beside_wrote >= read + wrote
        and completion + beside_thought >= thought
    ]
    if not total and prompt >= read + wrote:
        # OpenAI's form counts the caches among the prompt, and Anthropic's, which has no total, beside.
        choices = [each for each in choices if (each[0] + each[1] > 0) == is_beside] or choices
    readings = sorted({(prompt + r + w, completion + t) for r, w, t in choices})
    for n_prompt, n_completion in readings:
        # Where the caches can only stand beside the prompt, the total may leave them out.
        least = prompt if read + wrote > prompt else n_prompt
        if total in (n_prompt + n_completion, least + n_completion) or (
            not total and len(readings) == 1
        ):
            return replace(told, n_prompt_tokens=n_prompt, n_completion_tokens=n_completion)
    if reasoning is None and total and total > prompt + completion and read + wrote <= prompt:
        # Gemini's endpoint shows its thinking nowhere but in the total.
        hidden = total - prompt - completion
        return replace(told, n_completion_tokens=completion + hidden, n_reasoning_tokens=hidden)
    n_prompt = max(n for n, _ in readings)
    n_completion = max(max(n for _, n in readings), (total or 0) - prompt)
    said = f"{total:,} in all" if total else "no total"
    problem = f"{prompt:,} and {completion:,} tokens with {said}: the dearest reading counts"
    return replace(
        told,
        n_prompt_tokens=n_prompt,
        n_completion_tokens=n_completion,
        n_cached_tokens=None,
        problem=problem,
    )


def _cost_nano(reply: Mapping[str, Any], headers: Mapping[str, str]) -> int | None:
    """Return the largest cost that the endpoint states, in nano-dollars."""
    stated: list[float] = []
    for place in _NAMES["costs"]:
        if "header" in place:
            values = [v for name, v in headers.items() if name.lower().endswith(place["header"])]
        else:
            values = [_at(reply, place["path"])]
        stated += [
            number / place.get("units", 1)
            for number in map(as_number, values)
            if number is not None
        ]
    sums = [cost for cost in stated if 0 <= cost <= _MOST_USD]
    return nano(round(max(sums), 12)) if sums else None


def _blocks(reply: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for path in _NAMES["blocks"]:
        found = _at(reply, path)
        if isinstance(found, dict) and found:
            yield found


def _at(value: Any, path: str) -> Any:
    """Return what stands at a dotted path; `*` is the last item of a list."""
    for name in path.split("."):
        if name == "*":
            value = value[-1] if isinstance(value, list) and value else None
        else:
            value = as_mapping(value).get(name)
    return value


def as_number(value: Any) -> float | None:
    """Read a finite number; as text too, since some endpoints quote theirs."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def as_count(value: Any) -> int | None:
    """Read a count of tokens."""
    number = as_number(value)
    return int(number) if number is not None and 0 <= number <= _MOST_TOKENS else None

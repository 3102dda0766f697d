"""Check whether the cost that an endpoint reports for a call can be true.

Usage, price, and the number of bytes bound each other from both sides: a prompt of 100 kB has
neither 0 tokens nor 10⁹. A cost that agrees with the rest is believed. Any other cost is booked at
its bound and flagged.
"""

from dataclasses import dataclass

from replay_pipeline.replay.dialects.prices import Price, usd
from replay_pipeline.replay.dialects.replies import Answer
from replay_pipeline.replay.dialects.sizes import Size
from replay_pipeline.replay.dialects.usage import Usage

_MOST_BYTES_PER_TOKEN = 16
"""Whole prompts have three to six bytes a token; templates of servers may drop parts of them."""
_FREE_BYTES = 2048
"""Of a short prompt little can be said."""
_MOST_TOKENS = 2
"""Endpoints may add a prompt of their own, and write some tokens beyond the limit."""
_MOST_OVERRUN = 8
"""So many times its bound a call may cost: an endpoint may have raised its prices."""
_LEAST_BOUND_NANO = 1_250_000
"""Of calls that should cost almost nothing, an eighth of a cent is taken for the bound."""
_MOST_DISCOUNT = 10
"""So many times less than its tokens at the lowest listed price a call may cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BookedCost:
    """The cost at which an answer is booked, and whether it is believed."""

    cost_nano: int
    disputed: str | None = None
    """Why the endpoint isn't believed, in which case the cost is the bound."""


def judged(
    answer: Answer, size: Size, *, price: Price, bound_nano: int, n_limit: int, n_reply_bytes: int
) -> BookedCost:
    """Decide the cost at which an answer is booked.

    A cost that isn't believed is booked at `bound_nano`, the most that the call should cost. `n_limit` is the
    limit on completion tokens.
    """
    usage = answer.usage
    problem = token_problem(usage, size, n_limit, n_reply_bytes, has_action=bool(answer.action))
    tokens_nano = None
    if problem is None and not (usage.n_prompt_tokens is None or usage.n_completion_tokens is None):
        tokens_nano = _cost_of(usage, price, n_cached=usage.n_cached_tokens or 0) + usage.fee_nano
    cost = usage.cost_nano
    if cost is None:
        if tokens_nano is not None:
            return BookedCost(cost_nano=tokens_nano, disputed=usage.problem)
        return BookedCost(
            cost_nano=bound_nano, disputed=problem or "no cost and no usage came with it"
        )
    if cost > _MOST_OVERRUN * max(bound_nano, _LEAST_BOUND_NANO):
        told = f"a cost of ${usd(cost):.6f} where ${usd(bound_nano):.6f} is the most it should be"
        return BookedCost(cost_nano=bound_nano, disputed=told)
    if answer.action is None and cost == 0:
        return BookedCost(cost_nano=0)  # nothing was written, and nothing is charged for it
    least = (
        _least_nano(usage, size, price) if problem is None else _least_nano(Usage(), size, price)
    )
    if cost * _MOST_DISCOUNT < least:
        told = f"a cost of ${usd(cost):.6f} where ${usd(least):.6f} is the least its tokens cost"
        return BookedCost(cost_nano=max(bound_nano, cost), disputed=told)
    return BookedCost(cost_nano=cost)


def token_problem(
    usage: Usage, size: Size, n_limit: int, n_reply_bytes: int, *, has_action: bool = True
) -> str | None:
    """Return why an endpoint's token counts can't be right, or None if they can."""
    n_prompt, n_completion = usage.n_prompt_tokens, usage.n_completion_tokens
    if n_prompt is not None and not (
        least_tokens(size) <= n_prompt <= _MOST_TOKENS * size.bound_tokens
    ):
        return f"{n_prompt:,} tokens for a prompt of {size.n_bytes:,} bytes"
    n_read, n_written = usage.n_cached_tokens or 0, usage.n_written_tokens or 0
    if n_prompt is not None and n_read + n_written > _MOST_TOKENS * n_prompt:
        return f"{n_read + n_written:,} tokens in the cache of a prompt of {n_prompt:,}"
    if n_completion is None:
        return None
    if n_completion == 0 and has_action:
        return f"no tokens for an answer of {n_reply_bytes:,} bytes"
    if n_completion > _MOST_TOKENS * n_limit + n_reply_bytes:
        return f"{n_completion:,} tokens of an answer for which {n_limit:,} were allowed"
    return None


def least_tokens(size: Size) -> int:
    """Return the least number of tokens that a prompt can have."""
    return max(1, (size.n_bytes - _FREE_BYTES) // _MOST_BYTES_PER_TOKEN)


def replayed_bound(answer: Answer, size: Size, *, price: Price, n_limit: int) -> int:
    """Return an upper bound on the original cost of an answer from the router's cache, from its size.

    Hidden thinking can't be seen in the answer. If the model may think, its token limit counts.
    """
    n_written = n_limit
    if not {"reasoning", "include_reasoning"} & {*price.supported_parameters}:
        written = str(answer.action or "")
        n_written = min(n_limit, len(written.encode("utf-8", "replace")) + 1)
    return price.bound_nano(size.bound_tokens, n_written)


def _least_nano(usage: Usage, size: Size, price: Price) -> int:
    n_prompt = least_tokens(size) if usage.n_prompt_tokens is None else usage.n_prompt_tokens
    counted = Usage(n_prompt_tokens=n_prompt, n_completion_tokens=usage.n_completion_tokens or 0)
    return min(_cost_of(counted, price, n_cached=n) for n in (0, n_prompt))


def _cost_of(usage: Usage, price: Price, *, n_cached: int) -> int:
    return price.cost_nano(
        usage.n_prompt_tokens or 0,
        usage.n_completion_tokens or 0,
        n_cached_tokens=n_cached,
        n_written_tokens=usage.n_written_tokens or 0,
        n_reasoning_tokens=usage.n_reasoning_tokens or 0,
    )

"""Estimate the tokens of a prompt: from its bytes at first, then from the counts of earlier answers.

Most teachers have no public tokenizer, but their endpoints report token counts. From these the
ledger learns each teacher's tokens per byte, the length of its answers, and its share of cache
hits. Forecasts use them. Reservations don't, because they must never be too low: the next prompt
may have more tokens per byte than any before it.
"""

from dataclasses import dataclass

import msgspec

from replay_pipeline.types import Message

ASSUMED_TOKENS_PER_BYTE = 0.27
"""Measured on agent sessions as JSON with tokenizers of open models; see `benchmarks/cost.py`."""
_FIXED_SHARE = 0.83
"""Tokens per byte of system prompts and tools over those of the other messages: prose has fewer."""

_MESSAGE_TOKENS = 16
_PROMPT_TOKENS = 1024
_MIN_LEARNED = 8
_MIN_BYTES = 4_096
_LEAST_RATIO = 0.1
_MIN_ANSWER_TOKENS = 40
USUAL_LOOKS = 0.62
"""Looks before a consequence, on average, in sessions of strangers."""
_USUAL_LOOK_TOKENS = 1_200
"""What a look adds to a prompt: the call, and the beginning of a file or the hits of a search."""
_LOOKS_PRIOR = 10
"""Questions for which both count, beside those that were seen."""
MIN_CACHED_TOKENS = 1024
"""Providers cache no shorter beginnings."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a prompt as sent."""

    n_bytes: int = 0
    n_messages: int = 0
    n_tool_bytes: int = 0
    """How many of the bytes are tools."""
    n_system_bytes: int = 0
    """How many of them are the system prompt."""

    @property
    def n_weighted_bytes(self) -> float:
        """Return the bytes of messages that would have as many tokens as this prompt."""
        return self.n_bytes - (1 - _FIXED_SHARE) * (self.n_tool_bytes + self.n_system_bytes)

    @property
    def bound_tokens(self) -> int:
        """Return an upper bound on the tokens. No tokenizer makes more tokens than bytes."""
        return self.n_bytes + self.n_messages * _MESSAGE_TOKENS + _PROMPT_TOKENS

    def added_bound_tokens(self, before: "Size") -> int:
        """Return the most tokens that this prompt can have beyond a prompt that it starts with."""
        n_messages = self.n_messages - before.n_messages
        return self.n_bytes - before.n_bytes + (n_messages + 1) * _MESSAGE_TOKENS


class Learned(msgspec.Struct, frozen=True):
    """The ratios learned from one teacher's settled answers: tokens, lengths, and cache hits."""

    n: int = 0
    """Number of answers to prompts that were long enough to learn from."""
    n_bytes: float = 0
    """Their bytes, with those of system prompts and tools weighted less."""
    n_tokens: int = 0
    n_answers: int = 0
    n_answer_tokens: int = 0
    n_expected_cached: int = 0
    n_cached: int = 0
    n_asked_on: int = 0
    """Questions that were asked to their end, with each look answered."""
    n_looks: int = 0
    n_look_tokens: int = 0
    """What the looks added to their prompts."""

    @property
    def looks(self) -> tuple[float, float]:
        """Return the shape and the rate of a gamma distribution of the looks per question."""
        return USUAL_LOOKS * _LOOKS_PRIOR + self.n_looks, _LOOKS_PRIOR + self.n_asked_on

    @property
    def look_tokens(self) -> float:
        """Return the tokens that a look adds to a prompt."""
        told = _USUAL_LOOK_TOKENS * _LOOKS_PRIOR + self.n_look_tokens
        return told / (_LOOKS_PRIOR + self.n_looks)

    @property
    def is_known(self) -> bool:
        """Return whether there are enough answers to rely on."""
        return self.n >= _MIN_LEARNED

    @property
    def tokens_per_byte(self) -> float:
        """Return tokens per byte of messages, assumed if nothing is known."""
        return self.n_tokens / self.n_bytes if self.n else ASSUMED_TOKENS_PER_BYTE

    @property
    def spread(self) -> float:
        """Return by how much tokens per byte may differ from the estimate, as a standard deviation."""
        return 0.03 if self.is_known else 0.12

    @property
    def has_lengths(self) -> bool:
        """Return whether there are enough answers to tell how long they are."""
        return self.n_answers >= _MIN_LEARNED

    def expected_tokens(self, size: Size) -> int:
        """Return the expected number of prompt tokens."""
        return min(size.bound_tokens, round(size.n_weighted_bytes * self.tokens_per_byte))

    def answer_tokens(self, n_student_bytes: int, limit: int) -> int:
        """Return the expected tokens of an answer, from the teacher's earlier answers or else from the student's action."""
        if self.has_lengths:
            return min(limit, round(self.n_answer_tokens / self.n_answers))
        return min(limit, max(_MIN_ANSWER_TOKENS, n_student_bytes // 4))

    def with_answer(
        self,
        size: Size,
        n_tokens: int | None,
        n_answer_tokens: int | None,
        *,
        n_expected_cached: int = 0,
        n_cached: int | None = None,
    ) -> "Learned":
        """Learn from one settled answer. A count that can't be the whole prompt's is ignored."""
        learned = self
        if n_answer_tokens is not None:
            learned = msgspec.structs.replace(
                learned,
                n_answers=learned.n_answers + 1,
                n_answer_tokens=learned.n_answer_tokens + n_answer_tokens,
            )
        if n_tokens is None or size.n_bytes < _MIN_BYTES or n_tokens < size.n_bytes * _LEAST_RATIO:
            return learned
        is_cacheable = n_expected_cached >= MIN_CACHED_TOKENS
        return msgspec.structs.replace(
            learned,
            n=learned.n + 1,
            n_bytes=learned.n_bytes + size.n_weighted_bytes,
            n_tokens=learned.n_tokens + n_tokens,
            n_expected_cached=learned.n_expected_cached
            + (n_expected_cached if is_cacheable else 0),
            n_cached=learned.n_cached + ((n_cached or 0) if is_cacheable else 0),
        )

    def with_looks(self, n_looks: int, n_tokens: int) -> "Learned":
        """Learn from a question that was asked to its end."""
        return msgspec.structs.replace(
            self,
            n_asked_on=self.n_asked_on + 1,
            n_looks=self.n_looks + n_looks,
            n_look_tokens=self.n_look_tokens + n_tokens,
        )


def merged_ratios(one: Learned, other: Learned) -> Learned:
    """Merge the ratios that several runs learned."""
    return Learned(
        **{name: getattr(one, name) + getattr(other, name) for name in one.__struct_fields__}
    )


def n_bytes_written(action: Message | str) -> int:
    """Count the bytes that a model wrote to take this action."""
    if isinstance(action, str):
        return len(action.encode("utf-8", "replace"))
    calls = [call["function"] for call in action.get("tool_calls") or ()]
    written = "".join(f"{call['name']}{call['arguments']}" for call in calls)
    return len(((action.get("content") or "") + written).encode("utf-8", "replace"))

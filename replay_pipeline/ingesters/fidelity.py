"""How well the prefix we rebuild explains the prompt tokens that the provider recorded.

The recorded usage is an oracle that needs no labels: the prompt of a state costs what its
system prompt and tools cost (the same within a segment, and invisible in the log), plus what
its messages cost. A prefix that is missing a branch, or has one too many, does not fit.
"""

from collections.abc import Sequence
from statistics import median

from replay_pipeline.ingesters.base import Turn

TOKENS_PER_CHAR_TEXT = 0.267
TOKENS_PER_CHAR_THINKING = 0.297
TOKENS_PER_CHAR_ARGUMENTS = 0.306
TOKENS_PER_CHAR_RESULT = 0.344
TOKENS_PER_RESULT_LINE = 1.1
TOKENS_PER_TURN = 6.0
TOKENS_PER_CALL = 83.0
TOKENS_PER_IMAGE = 1_400.0
"""Fitted by least squares to the growth of the recorded prompt from one state to the next."""


def n_tokens_of(turn: Turn) -> float:
    """Estimated tokens that the messages of one turn add to every prompt below it."""
    n_tokens = TOKENS_PER_TURN
    for text in turn.texts:
        n_tokens += TOKENS_PER_CHAR_TEXT * len(text)
    for text in turn.thinking:
        n_tokens += TOKENS_PER_CHAR_THINKING * len(text)
    for call in turn.calls:
        n_tokens += TOKENS_PER_CALL + TOKENS_PER_CHAR_ARGUMENTS * len(call.arguments)
    for result in turn.results.values():
        n_tokens += n_tokens_of_result(result.text)
    return n_tokens


def n_tokens_of_result(text: str) -> float:
    """Estimated tokens of one tool result."""
    n_images = text.count("[image]") if len(text) < 1_000 else 0
    return (
        TOKENS_PER_IMAGE * n_images
        + TOKENS_PER_CHAR_RESULT * len(text)
        + TOKENS_PER_RESULT_LINE * text.count("\n")
    )


def predict_context(turns: Sequence[Turn]) -> dict[Turn, int]:
    """Predicted prompt tokens of each state that has a recorded usage.

    The cost of what the log does not show is fitted once per compaction segment, as the median
    of the differences.
    """
    before: dict[Turn, float] = {}
    cleared = {call_id for turn in turns for call_id in turn.cleared}
    cleared_tokens: dict[str, float] = {}
    total: dict[Turn, float] = {}
    by_segment: dict[tuple[str, int], list[Turn]] = {}
    for turn in turns:
        above = total[turn.parent] if turn.parent is not None else 0.0
        before[turn] = above
        own = 0.0 if "retracted" in turn.flags else n_tokens_of(turn)
        for call_id in cleared & turn.results.keys() if cleared else ():
            cleared_tokens[call_id] = n_tokens_of_result(turn.results[call_id].text)
        for call_id in turn.cleared:
            own -= cleared_tokens.get(call_id, 0.0)
        total[turn] = above + own
        if turn.is_state and turn.usage is not None and turn.usage.n_context > 0:
            by_segment.setdefault((turn.agent, turn.segment), []).append(turn)
    predicted: dict[Turn, int] = {}
    for states in by_segment.values():
        hidden = median(s.usage.n_context - before[s] for s in states if s.usage is not None)
        for state in states:
            predicted[state] = max(0, round(hidden + before[state]))
    return predicted

"""Compare the length of rebuilt prefixes with the prompt tokens that the provider recorded.

The recorded usage tests the prefixes without labels. A prompt's tokens are those of the system
prompt and tools, which the log doesn't show but which are constant within a segment, plus those of
the messages. If a rebuilt prefix lacks a branch or has one too many, its length doesn't fit.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

import pyarrow as pa

from replay_pipeline.ingesters.base import Result, Turn

FITTED_AGENT = "claude_code"
"""The figures below were fitted to this agent's sessions."""
_MIN_GROWTH_TOKENS = 100
TOLERANCE = 0.1
"""A prediction is right within this share of what was recorded."""
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
    """Estimate the tokens that the messages of one turn add to every prompt below it.

    A message of the model counts at least its recorded output tokens, because its thinking may not
    be logged.
    """
    if turn.n_tokens is not None:
        return turn.n_tokens
    n_tokens = TOKENS_PER_TURN
    for text in turn.texts:
        n_tokens += TOKENS_PER_CHAR_TEXT * len(text)
    for text in turn.thinking:
        n_tokens += TOKENS_PER_CHAR_THINKING * len(text)
    for call in turn.calls:
        n_tokens += TOKENS_PER_CALL + TOKENS_PER_CHAR_ARGUMENTS * len(call.arguments)
    if turn.usage is not None:
        n_tokens = max(n_tokens, turn.usage.n_output)
    for result in turn.results.values():
        n_tokens += n_tokens_of_result(result)
    turn.n_tokens = n_tokens
    return n_tokens


def n_tokens_of_result(result: Result) -> float:
    """Return the estimated tokens of one tool result."""
    if result.n_tokens is None:
        text = result.text
        n_images = text.count("[image]") if len(text) < 1_000 else 0
        result.n_tokens = (
            TOKENS_PER_IMAGE * n_images
            + TOKENS_PER_CHAR_RESULT * len(text)
            + TOKENS_PER_RESULT_LINE * text.count("\n")
        )
    return result.n_tokens


OF_SESSIONS = ("session_id", "agent", "versions")
OF_STATES = ("session_id", "fidelity")
"""Columns that `shares_by_client` reads."""


def shares_by_client(sessions: pa.Table, states: pa.Table) -> dict[str, dict[str, float]]:
    """Return the share of states whose prefix has the recorded length, by agent and client version.

    The version is the last one that wrote to the session.

    Returns:
        By client, e.g. `claude_code 2.1.38`: the number of states with recorded usage, and the
            share of them that is predicted within 10 %.
    """
    columns = (sessions[name].to_pylist() for name in OF_SESSIONS)
    client_of = {
        session_id: f"{agent} {versions[-1] if versions else 'unknown'}"
        for session_id, agent, versions in zip(*columns, strict=True)
    }
    found: dict[str, list[bool]] = {}
    for session_id, fidelity in zip(
        states["session_id"].to_pylist(), states["fidelity"].to_pylist(), strict=True
    ):
        if fidelity is not None:
            is_close = abs(fidelity - 1) <= TOLERANCE
            found.setdefault(client_of.get(session_id, "unknown"), []).append(is_close)
    return {
        client: {"n_states": len(close), "share_within_10_percent": sum(close) / len(close)}
        for client, close in sorted(found.items())
    }


def predict_context(turns: Sequence[Turn], *, agent: str = FITTED_AGENT) -> dict[Turn, int]:
    """Predict the prompt tokens of each state that has a recorded usage.

    The tokens of what the log doesn't show (system prompt, tools, instructions) are estimated once
    per compaction segment and run of the client, as the median of the differences. Other agents'
    models have other tokenizers, so for their sessions a scale factor is fitted to the growth from
    one prompt to the next.
    """
    costs = _Costs()
    by_run: dict[tuple[object, ...], list[Turn]] = {}
    for turn in turns:
        costs.add(turn)
        if _n_recorded(turn):
            by_run.setdefault((turn.agent, turn.segment, costs.run[turn]), []).append(turn)
    scale = 1.0 if agent == FITTED_AGENT else _scale_of(by_run.values(), costs)
    predicted: dict[Turn, int] = {}
    for states in by_run.values():
        hidden = median(_n_recorded(state) - scale * costs.before[state] for state in states)
        for state in states:
            predicted[state] = max(0, round(hidden + scale * costs.before[state]))
    return predicted


def _scale_of(runs: Iterable[list[Turn]], costs: "_Costs") -> float:
    """Return recorded tokens for one that is estimated, as the median over all steps."""
    steps = [
        ((_n_recorded(after) - _n_recorded(before)) / growth)
        for states in runs
        for before, after in pairwise(states)
        if (growth := costs.before[after] - costs.before[before]) > _MIN_GROWTH_TOKENS
    ]
    return min(max(median(steps), 0.5), 1.5) if steps else 1.0


def _n_recorded(turn: Turn) -> int:
    return turn.usage.n_context if turn.is_state and turn.usage is not None else 0


class _Costs:
    """Estimated tokens above each turn, and the run of the client that it belongs to."""

    def __init__(self) -> None:
        self.before: dict[Turn, float] = {}
        self.total: dict[Turn, float] = {}
        self.run: dict[Turn, Turn | None] = {}
        """The turn with which the run began; `None` for the first."""
        self.results: dict[str, float] = {}
        self._models: dict[Turn, str | None] = {}

    def add(self, turn: Turn) -> None:
        """Take in a turn whose parent is known."""
        above = turn.parent
        self.before[turn] = total = self.total[above] if above is not None else 0.0
        if "retracted" not in turn.flags:
            total += n_tokens_of(turn)
        for call_id, result in turn.results.items():
            self.results[call_id] = n_tokens_of_result(result)
        for call_id in turn.cleared:
            total -= self.results.get(call_id, 0.0)
        self.total[turn] = total
        self._models[turn] = turn.model or (self._models[above] if above is not None else None)
        self.run[turn] = turn if self._begins_run(turn) else self.run[above] if above else None

    def _begins_run(self, turn: Turn) -> bool:
        """Return whether the client was started again, or changed its model: it tells it other things."""
        above = turn.parent
        if above is None:
            return False
        if turn.kind == "microcompact":
            # What was cleared lies in another file: it was never part of what this one shows.
            return not any(call_id in self.results for call_id in turn.cleared)
        if turn.kind == "command" and any("<command-name>/exit" in text for text in turn.texts):
            return True
        is_newer = bool(turn.version and above.version and turn.version != above.version)
        before = self._models[above]
        return is_newer or bool(turn.model and before and turn.model != before)

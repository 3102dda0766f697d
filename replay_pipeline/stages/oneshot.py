"""From states to normalized pairs in one call: replay, agreement, and normalization."""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path

from replay_pipeline.judge.extract import extract_dpo_pairs
from replay_pipeline.normalize import DJNormalizer
from replay_pipeline.replay import replay_trace
from replay_pipeline.settings import DEFAULT_TEACHERS
from replay_pipeline.types import NormalizedDPOPair, TeacherAction, TeacherSpec, TraceState


async def replay_and_normalize_trace(
    states: Iterable[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    agreement_threshold: int = 2,
    max_total_usd: float = 10.0,
    *,
    recipe: str | Path = "default",
    ledger: str | Path | None = None,
) -> tuple[list[TeacherAction], list[NormalizedDPOPair]]:
    """Ask the teachers at every state, and keep the pairs that pass the recipe.

    >>> from replay_pipeline.testing import TeacherServer
    >>> states = [
    ...     {
    ...         "state_id": "step-1",
    ...         "messages": [{"role": "user", "content": "A test of the parser fails. What now?"}],
    ...         "student_action": {"role": "assistant", "content": "I edit the parser at once."},
    ...     }
    ... ]
    >>> with TeacherServer(script={"content": "I read the failing test first."}) as server:
    ...     asked = replay_and_normalize_trace(states, server.teachers(), ledger="ledger.sqlite")
    ...     actions, pairs = asyncio.run(asked)
    >>> len(actions), [pair["chosen"] for pair in pairs]
    (3, ['I read the failing test first.'])

    Args:
        states: decision points of recorded sessions.
        teachers: models to ask.
        agreement_threshold: how many model families must agree to make a consensus.
        max_total_usd: hard ceiling for new answers, in US dollars.
        recipe: bundled data-juicer recipe by name, or a path.
        ledger: path or URL of the ledger; by default under the data root.

    Raises:
        ConfigError: a teacher, the recipe, or the threshold is wrong. Nothing was paid.
        ReplayError: the ledger can't be used, or a price isn't known.
    """
    states = list(states)
    extract_dpo_pairs([], [], agreement_threshold)  # refuses a wrong threshold before any cost
    normalizer = await asyncio.to_thread(DJNormalizer, recipe)
    actions = await replay_trace(states, teachers, max_total_usd, ledger=ledger)
    pairs = extract_dpo_pairs(states, actions, agreement_threshold)
    normalized = await asyncio.to_thread(normalizer.normalize, pairs)
    return actions, normalized


def replay_and_normalize_trace_sync(
    states: Iterable[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    agreement_threshold: int = 2,
    max_total_usd: float = 10.0,
    *,
    recipe: str | Path = "default",
    ledger: str | Path | None = None,
) -> tuple[list[TeacherAction], list[NormalizedDPOPair]]:
    """Call `replay_and_normalize_trace` without an event loop. Raises the same errors.

    >>> replay_and_normalize_trace_sync([], max_total_usd=0.0, ledger="ledger.sqlite")
    ([], [])
    """
    return asyncio.run(
        replay_and_normalize_trace(
            states, teachers, agreement_threshold, max_total_usd, recipe=recipe, ledger=ledger
        )
    )

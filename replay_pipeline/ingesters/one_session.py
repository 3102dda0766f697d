"""Ingestion as one call that takes a path and yields trace states."""

from collections.abc import Iterator
from pathlib import Path

from replay_pipeline.actions.windows import parse_window
from replay_pipeline.ingesters.corpus import ingest
from replay_pipeline.ingesters.traces import Traces
from replay_pipeline.types import TraceState


class ClaudeCodeIngester:
    """Turns Claude Code sessions into trace states, in memory.

    Example:
        >>> from replay_pipeline.testing.sample import SESSIONS_DIR
        >>> states = list(ClaudeCodeIngester().ingest(SESSIONS_DIR))
        >>> states[0]["messages"][-1]["role"], states[0]["student_action"]["role"]
        ('user', 'assistant')
    """

    def __init__(self, *, redact: bool = True, window: str = "full", salt: str = "") -> None:
        """Raises `ConfigError` when there is no such window."""
        self.redact = redact
        self.window = parse_window(window)
        self.salt = salt

    def ingest(self, path: Path | str) -> Iterator[TraceState]:
        """Yield every decision in `path`, a session file or a folder of them, with its full prefix.

        Raises:
            IngestError: `path` does not exist, cannot be read, or holds no session.
        """
        result = ingest(path, redact=self.redact, salt=self.salt)
        traces = Traces(
            sessions=result.sessions, turns=result.turns, states=result.states, tools=result.tools
        )
        return traces.materialize(window=self.window)

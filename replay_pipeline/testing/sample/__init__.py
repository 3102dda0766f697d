"""The bundled sample: sessions and teacher answers written for demonstration and tests."""

from pathlib import Path

SESSIONS_DIR = Path(__file__).parent / "sessions"
"""Claude Code session logs, one folder per project."""

ANSWERS_FILE = Path(__file__).parent / "answers.jsonl"
"""Recorded answers of three teachers at every state of the sessions; not produced by the models
they name."""

REQUEST_FILE = Path(__file__).parent / "request.json"
"""A request as a client could send it, of our own writing: `harness learn --from` takes it, for states of
the sessions whose logs hold none."""

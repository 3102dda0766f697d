"""The bundled sample: sessions and teacher answers written for demonstration and tests."""

from pathlib import Path

SESSIONS_DIR = Path(__file__).parent / "sessions"
"""Claude Code session logs, one folder per project."""

ANSWERS_FILE = Path(__file__).parent / "answers.jsonl"
"""Answers of three teachers at every state of the sessions. We wrote them; the named models did not."""

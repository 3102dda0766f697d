"""What a client adds to a conversation: its system prompt, tools, reminders, and parameters.

Logs of older clients have only the conversation. The rest is learned from the client itself: it is
started in an empty home against a server on loopback, and sends its complete request. Read
`harness.py` (what is stored), then `learn.py` (how a client is started), then `store.py` (where
harnesses are stored).
"""

from replay_pipeline.harness.harness import Filled, Framing, Harness, Moment
from replay_pipeline.harness.store import FoundHarness, HarnessStore

__all__ = ["Filled", "FoundHarness", "Framing", "Harness", "HarnessStore", "Moment"]

"""What a client puts around a conversation: its system prompt, tools, reminders and parameters.

A log of older clients holds the conversation alone. The rest is learned from the client itself: started
in an empty home against a server on loopback, it sends its complete request. Read `harness.py` (what is
kept of it), then `learn.py` (how a client is asked), then `store.py` (where it lies).
"""

from replay_pipeline.harness.harness import Filled, Framing, Harness, Moment
from replay_pipeline.harness.store import FoundHarness, HarnessStore

__all__ = ["Filled", "FoundHarness", "Framing", "Harness", "HarnessStore", "Moment"]

"""What a client adds to a conversation: its system prompt, tools, reminders, and parameters.

Logs of older clients have only the conversation. The rest is recorded from the client itself: it is
started against a server on loopback, and sends its complete request. `harness.py` has what is stored
and where, `record.py` how it is recorded, `neutral.py` the prompt of states without a harness.
"""

from replay_pipeline.ingesters.harness.harness import (
    Filled,
    FoundHarness,
    Harness,
    HarnessStore,
    Moment,
)

__all__ = ["Filled", "FoundHarness", "Harness", "HarnessStore", "Moment"]

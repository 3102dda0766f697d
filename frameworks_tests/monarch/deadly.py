"""A reward that ends its process once, in the middle of a run."""

import os
import signal
from pathlib import Path
from typing import Any

from trainer.data.rewards import consensus_reward

N_BEFORE = int(os.environ.get("DEADLY_AFTER", "0"))
_n_calls = 0


def consensus(message: dict[str, Any], row: dict[str, Any]) -> float:
    """The built-in reward; the call after `DEADLY_AFTER` kills rank `DEADLY_RANK`, once."""
    global _n_calls
    _n_calls += 1
    mark = Path(os.environ["DEADLY_MARK"])
    place = os.environ.get("RANK", "0")
    if _n_calls > N_BEFORE and place == os.environ.get("DEADLY_RANK", "0") and not mark.exists():
        mark.write_text("died")
        os.kill(os.getpid(), signal.SIGKILL)
    return consensus_reward(message, row)

"""Rewards of the tests' runs, one of which ends its process in the middle."""

import os
import signal
from pathlib import Path
from typing import Any

from trainer.data.rewards import consensus_reward

_n_calls = 0


def deadly(message: dict[str, Any], row: dict[str, Any]) -> float:
    """The built-in reward; the call after `DEADLY_AFTER` kills rank `DEADLY_RANK`, once."""
    global _n_calls
    _n_calls += 1
    mark = Path(os.environ["DEADLY_MARK"])
    is_time = _n_calls > int(os.environ["DEADLY_AFTER"])
    if is_time and os.environ.get("RANK", "0") == os.environ["DEADLY_RANK"] and not mark.exists():
        mark.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return consensus_reward(message, row)


def always_deadly(message: dict[str, Any], row: dict[str, Any]) -> float:
    """Ends every process that asks."""
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0

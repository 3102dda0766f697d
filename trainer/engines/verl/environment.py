"""The one environment variable through which a run's options reach VeRL's worker processes.

Ray starts the workers on whatever machine it likes, and VeRL's worker configurations have no field
for a plug-in. `engine.py` and `agent_loop.py` read what `launch.py` set.
"""

import os

VARIABLE = "REPLAY_VERL_OPTIONS"


def options_text() -> str | None:
    """Return the options as JSON; `None` in a process that belongs to no run of ours."""
    return os.environ.get(VARIABLE)


def child_environment(options: str, **more: str) -> dict[str, str]:
    """Return the environment for the VeRL process: this process's, plus the options."""
    return {**os.environ, VARIABLE: options, **more}

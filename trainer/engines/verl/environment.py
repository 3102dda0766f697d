"""The environment variable that passes a run's options to VeRL's worker processes.

Ray may start workers on any machine, and VeRL's worker configurations have no field for a plug-in.
`launch.py` sets the variable, and `engine.py` and `agent_loop.py` read it.
"""

import os

VARIABLE = "REPLAY_VERL_OPTIONS"


def options_text() -> str | None:
    """Return the options as JSON, or None in a process outside our runs."""
    return os.environ.get(VARIABLE)


def verl_environment(options: str, **more: str) -> dict[str, str]:
    """Return the environment for the VeRL process: that of this process plus the options."""
    return {**os.environ, VARIABLE: options, **more}

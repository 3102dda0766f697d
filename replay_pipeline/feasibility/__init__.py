"""Judge which actions are possible at a prompt, with the same rules when prompts are made or cut.

All functions are pure and work on messages: they read no file and run no command. Start at
`state.py`.
"""

from replay_pipeline.feasibility.state import Obstacle, PromptState

__all__ = ["Obstacle", "PromptState"]

"""What can be done where a state stands: one judge of a prompt, wherever prompts are made or cut.

Pure functions over messages: nothing here reads a file or runs a command. Start at `state.py`.
"""

from replay_pipeline.feasibility.state import Obstacle, PromptState

__all__ = ["Obstacle", "PromptState"]

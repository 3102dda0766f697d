"""The chain from session logs to a trained model, stage by stage, and what is known about it."""

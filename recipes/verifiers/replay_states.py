"""The taskset under a name of one word, as verifiers looks tasksets up."""

from trainer.engines.verifiers.taskset import ReplayEpisode, ReplayTaskset

__all__ = ["ReplayEpisode", "ReplayTaskset"]

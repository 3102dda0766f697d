"""States of `replay-pipeline workspace serve`, under a name of one word, as verifiers looks tasksets up."""

from trainer.engines.verifiers.served import ServedEpisode, ServedTaskset

__all__ = ["ServedEpisode", "ServedTaskset"]

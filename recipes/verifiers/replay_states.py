"""The taskset under a name of one word, as verifiers looks tasksets up."""

from trainer.engines.verifiers.taskset import OneDecision, ReplayTaskset

__all__ = ["OneDecision", "ReplayTaskset"]

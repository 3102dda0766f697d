"""Publish pairs as a dataset that `datasets.load_dataset` and TRL take as it is."""

from replay_pipeline.publish.card import CardFacts, TeacherFacts
from replay_pipeline.publish.publisher import PublishReport, publish, retract

__all__ = ["CardFacts", "PublishReport", "TeacherFacts", "publish", "retract"]

"""Publish pairs as a dataset that `datasets.load_dataset` and TRL can read directly."""

from replay_pipeline.publish.batch_facts import CardFacts
from replay_pipeline.publish.blind import BlindControl, blind_control, in_words
from replay_pipeline.publish.card import column_words
from replay_pipeline.publish.folder import local_copy, newest, to_be_published
from replay_pipeline.publish.publisher import publish, retract
from replay_pipeline.publish.version import PublishReport

__all__ = [
    "BlindControl",
    "CardFacts",
    "PublishReport",
    "blind_control",
    "column_words",
    "in_words",
    "local_copy",
    "newest",
    "publish",
    "retract",
    "to_be_published",
]

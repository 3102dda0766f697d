"""The stages, in the order in which a run takes a batch through them."""

from collections.abc import Sequence

from replay_pipeline.settings import Settings
from replay_pipeline.stages.ingest import INGEST
from replay_pipeline.stages.normalize import NORMALIZE
from replay_pipeline.stages.pairs import PAIRS
from replay_pipeline.stages.publish import PUBLISH
from replay_pipeline.stages.replay import REPLAY
from replay_pipeline.stages.sample import SAMPLE
from replay_pipeline.stages.stage import Stage
from replay_pipeline.stages.train import TRAIN

STAGES: list[Stage] = [INGEST, REPLAY, PAIRS, SAMPLE, NORMALIZE, PUBLISH, TRAIN]
"""Every stage. A stage that you add here appears in every command, in every figure, and in Dagster."""


def stage_named(name: str) -> Stage:
    """Return the stage with a name. Raises KeyError if there is none."""
    return {stage.name: stage for stage in STAGES}[name]


def by_batch() -> list[Stage]:
    """Return the stages that work batch by batch."""
    return [stage for stage in STAGES if stage.is_by_batch]


def on_all() -> list[Stage]:
    """Return the stages that work on all batches at once."""
    return [stage for stage in STAGES if not stage.is_by_batch]


def wanted(settings: Settings) -> list[Stage]:
    """Return the stages that have work under these settings."""
    return [stage for stage in STAGES if stage.is_wanted(settings)]


def upstream(stage: Stage, among: Sequence[Stage] | None = None) -> list[Stage]:
    """Return the stages right before a stage: those that write its inputs, else the one before it."""
    stages = list(STAGES if among is None else among)
    if stage.reads:
        return [each for each in stages if set(each.writes) & set(stage.reads)]
    place = stages.index(stage) if stage in stages else 0
    return stages[max(0, place - 1) : place]

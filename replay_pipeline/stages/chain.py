"""The stages, in the order in which a run takes a batch through them."""

from replay_pipeline.stages.ingest import INGEST
from replay_pipeline.stages.normalize import NORMALIZE
from replay_pipeline.stages.pairs import PAIRS
from replay_pipeline.stages.publish import PUBLISH
from replay_pipeline.stages.replay import REPLAY
from replay_pipeline.stages.stage import Stage
from replay_pipeline.stages.train import TRAIN

STAGES: list[Stage] = [INGEST, REPLAY, PAIRS, NORMALIZE, PUBLISH, TRAIN]
"""Every stage. A stage that you add here appears in every command, in every figure, and in Dagster."""


def stage_named(name: str) -> Stage:
    """Return the stage with a name. Raises KeyError if there is none."""
    return {stage.name: stage for stage in STAGES}[name]


def by_batch() -> list[Stage]:
    """Return the stages that work batch by batch."""
    return [stage for stage in STAGES if stage.is_by_batch]


def upstream(stage: Stage) -> list[Stage]:
    """Return the stages right before a stage: those that write its inputs, else the one before it."""
    if stage.reads:
        return [each for each in STAGES if set(each.writes) & set(stage.reads)]
    place = STAGES.index(stage)
    return STAGES[max(0, place - 1) : place]

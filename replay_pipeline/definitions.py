"""The code location that `workspace.yaml` loads."""

from replay_pipeline.assets.code_location import define
from replay_pipeline.orchestration.resources import PipelineResource

defs = define(PipelineResource())

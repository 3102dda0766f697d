"""The code location that `workspace.yaml` loads."""

import atexit
import gc

from replay_pipeline.assets.code_location import define
from replay_pipeline.orchestration.resources import PipelineResource

defs = define(PipelineResource())

# At its end the interpreter looks through every object for garbage, which takes servers and runs of
# this size most of a second of a grace period; with nothing left to look through, it just ends.
atexit.register(gc.freeze)

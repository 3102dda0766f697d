"""The code location that `workspace.yaml` loads."""

import atexit
import gc

# Whatever is loaded here stays. To look through it for garbage, again and again as it grows, takes
# every server and every run a fifth of its start.
gc.disable()

from replay_pipeline.assets.code_location import define  # noqa: E402
from replay_pipeline.assets.resources import PipelineResource  # noqa: E402

defs = define(PipelineResource())

gc.freeze()
gc.enable()

# At its end the interpreter looks through every object for garbage, which takes servers and runs of
# this size most of a second of a grace period; with nothing left to look through, it just ends.
atexit.register(gc.freeze)

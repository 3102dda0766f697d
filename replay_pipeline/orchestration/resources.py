"""The one Dagster resource: opens the pipeline on the settings of the process it is in."""

import contextvars

import dagster as dg

from replay_pipeline.settings import Settings
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.project import OnProgress
from replay_pipeline.types import Progress

console_progress: contextvars.ContextVar[OnProgress | None] = contextvars.ContextVar(
    "console_progress", default=None
)
"""Set by a program that runs jobs in its own process and wants to draw a bar."""


own_settings: contextvars.ContextVar[Settings | None] = contextvars.ContextVar(
    "own_settings", default=None
)
"""Set by a program that runs jobs in its own process, on settings that it has read already."""


class PipelineResource(dg.ConfigurableResource):
    """Opens the pipeline on this deployment's data root.

    Has no field: a field is run configuration, which whoever may start a run could point at a file
    or a data root of their own; and it is written to Dagster's database.
    """

    def settings(self) -> Settings:
        """Read what the environment of this process names.

        Raises:
            ConfigError: a setting is wrong.
        """
        return own_settings.get() or Settings.load()

    def open(self, on_progress: OnProgress | None = None) -> Pipeline:
        """Return the pipeline, reporting to `on_progress` and to a console bar if there is one."""
        console = console_progress.get()
        if console is None or on_progress is None:
            return Pipeline(self.settings(), on_progress=on_progress or console)

        def both(progress: Progress) -> None:
            on_progress(progress)
            console(progress)

        return Pipeline(self.settings(), on_progress=both)

"""The one Dagster resource: where the settings of this deployment are."""

import contextvars

import dagster as dg

from replay_pipeline.settings import Settings
from replay_pipeline.stages.pipeline import OnProgress, Pipeline
from replay_pipeline.storage.store import as_path
from replay_pipeline.types import Progress

console_progress: contextvars.ContextVar[OnProgress | None] = contextvars.ContextVar(
    "console_progress", default=None
)
"""Set by a program that runs jobs in its own process and wants to draw a bar."""


class PipelineResource(dg.ConfigurableResource):
    """Opens the pipeline on this deployment's data root.

    Holds a path, never a key: whatever a resource holds is written to Dagster's own database.
    """

    settings_path: str = ""
    """A TOML settings file; empty: what the environment names, else the defaults."""
    data_dir: str = ""
    """The data root; empty: what the settings or the environment say."""

    def settings(self) -> Settings:
        """Read the file and the environment.

        Raises:
            ConfigError: a setting is wrong.
        """
        return Settings.load(
            as_path(self.settings_path) if self.settings_path else None,
            data_dir=as_path(self.data_dir) if self.data_dir else None,
        )

    def open(self, on_progress: OnProgress | None = None) -> Pipeline:
        """The pipeline, reporting to `on_progress` and to a console bar if there is one."""
        console = console_progress.get()
        if console is None or on_progress is None:
            return Pipeline(self.settings(), on_progress=on_progress or console)

        def both(progress: Progress) -> None:
            on_progress(progress)
            console(progress)

        return Pipeline(self.settings(), on_progress=both)

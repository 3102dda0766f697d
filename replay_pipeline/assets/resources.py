"""The only Dagster resource. It opens the pipeline with the settings of its own process."""

import contextvars
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
from dagster._core.errors import DagsterUserCodeProcessError
from dagster._utils.error import SerializableErrorInfo

from replay_pipeline.errors import ConfigError
from replay_pipeline.settings import Settings
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.project import OnProgress
from replay_pipeline.storage.processes import DEBUG, environment
from replay_pipeline.types import Progress

console_progress: contextvars.ContextVar[OnProgress | None] = contextvars.ContextVar(
    "console_progress", default=None
)
"""A program that runs jobs in its own process sets this to draw a progress bar."""


own_settings: contextvars.ContextVar[Settings | None] = contextvars.ContextVar(
    "own_settings", default=None
)
"""A program that runs jobs in its own process sets this to the settings that it has read."""


class SettingsError(DagsterUserCodeProcessError, ConfigError):
    """An error in the settings, which Dagster shows as one sentence without a stack.

    Dagster treats it like an error of another process and shows its message unchanged: in a run, in
    a sensor, or when it loads the code location.
    """

    def __init__(self, error: ConfigError) -> None:
        shown = SerializableErrorInfo(f"{error}\n", stack=[], cls_name=type(error).__name__)
        super().__init__(str(error), user_code_process_error_infos=[shown])


@contextmanager
def _in_one_sentence() -> Iterator[None]:
    """Raise a mistake in the settings as `SettingsError`, unless the stack was asked for.

    Raises:
        ConfigError: the settings are wrong, and the stack was asked for.
        SettingsError: the settings are wrong.
    """
    try:
        yield
    except ConfigError as error:
        if isinstance(error, SettingsError) or environment(DEBUG):
            raise
        logging.getLogger("dagster.code_server").addFilter(_without_stack)
        raise SettingsError(error) from None


def _without_stack(record: logging.LogRecord) -> bool:
    """Let a log line through, with the sentence of a `SettingsError` in place of its stack."""
    error = record.exc_info and record.exc_info[1]
    if isinstance(error, SettingsError):
        record.msg, record.args = f"{record.getMessage()}: {error}", ()
        record.exc_info = record.exc_text = None
    return True


class PipelineResource(dg.ConfigurableResource):
    """The resource that opens the pipeline on this deployment's data root.

    It has no fields on purpose. A field would be run configuration: anyone who may start a run
    could point it at their own file or data root, and Dagster would store it in its database.
    """

    def settings(self) -> Settings:
        """Read the settings that the environment variables of this process name.

        Raises:
            ConfigError: a setting is wrong, or the settings file isn't trusted.
        """
        with _in_one_sentence():
            return own_settings.get() or Settings.load()

    def open(self, on_progress: OnProgress | None = None) -> Pipeline:
        """Return the pipeline, which reports progress to `on_progress` and to the console's bar, if any."""
        console = console_progress.get()

        def both(progress: Progress) -> None:
            for report in (on_progress, console):
                if report is not None:
                    report(progress)

        with _in_one_sentence():
            return Pipeline(self.settings(), on_progress=both if on_progress or console else None)

"""The one Dagster resource: opens the pipeline on the settings of the process it is in."""

import contextvars
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
from dagster._core.errors import DagsterUserCodeProcessError
from dagster._utils.error import SerializableErrorInfo

from replay_pipeline.errors import ConfigError
from replay_pipeline.processes import DEBUG, environment
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


class SettingsError(DagsterUserCodeProcessError, ConfigError):
    """A mistake in the settings, which Dagster shows as its one sentence, without a stack.

    Dagster takes it for an error of another process, whose words it shows as they are, wherever it
    comes up: in a run, in a sensor, or while the code location is loaded.
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
    """Opens the pipeline on this deployment's data root.

    Has no field: a field is run configuration, which whoever may start a run could point at a file
    or a data root of their own; and it is written to Dagster's database.
    """

    def settings(self) -> Settings:
        """Read the settings that this process's environment names.

        Raises:
            ConfigError: a setting is wrong, or the settings file isn't trusted.
        """
        with _in_one_sentence():
            return own_settings.get() or Settings.load()

    def open(self, on_progress: OnProgress | None = None) -> Pipeline:
        """Return the pipeline, reporting to `on_progress` and to a console bar if there is one."""
        console = console_progress.get()

        def both(progress: Progress) -> None:
            for report in (on_progress, console):
                if report is not None:
                    report(progress)

        with _in_one_sentence():
            return Pipeline(self.settings(), on_progress=both if on_progress or console else None)

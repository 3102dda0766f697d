"""Report each step of a run to Dagster, through Dagster Pipes.

The package `dagster-pipes` is one file without dependencies, and the only part of Dagster that a
training machine needs. Without it, or without a listener, the run reports only to its files.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

Metrics = dict[str, Any]


@contextmanager
def reporting() -> Iterator[Callable[[Metrics], None] | None]:
    """Yield a callback that sends each step's metrics to Dagster, or None without Dagster."""
    try:
        import dagster_pipes  # noqa: PLC0415 - need not be installed
    except ImportError:
        yield None
        return
    if not dagster_pipes.PipesEnvVarParamsLoader().is_dagster_pipes_process():
        yield None
        return
    with dagster_pipes.open_dagster_pipes() as pipes:
        yield lambda metrics: pipes.report_custom_message({"metrics": metrics})

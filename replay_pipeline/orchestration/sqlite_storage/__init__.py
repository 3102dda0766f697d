"""Where Dagster keeps its runs and events: SQLite, with the waiting taken out.

`dagster.yaml` names `FastSqliteStorage`. It writes the very files that Dagster's own SQLite storage
writes, so either can open what the other has left. It stands on parts of Dagster that may change:
under a minor version that it was not tested with, and where these parts are others, the stock storage
takes its place and nothing else is different. `REPLAY_FAST_STORAGE` says otherwise, `1` or `0`.
"""

import importlib.metadata
import logging

from dagster._core.storage.sqlite_storage import DagsterSqliteStorage

from replay_pipeline.processes import environment

logger = logging.getLogger(__name__)

FAST_STORAGE = "REPLAY_FAST_STORAGE"
TESTED_MINORS = frozenset({"1.13"})
"""Minor versions of Dagster under which the tests of this storage run."""


def is_wanted() -> bool:
    """Return whether to use the fast storage: by request, or since it was tested with this Dagster."""
    choice = environment(FAST_STORAGE)
    if choice:
        return choice != "0"
    minor = ".".join(importlib.metadata.version("dagster").split(".")[:2])
    return minor in TESTED_MINORS


FastSqliteStorage = DagsterSqliteStorage
if is_wanted():
    try:
        from replay_pipeline.orchestration.sqlite_storage.fast import FastSqliteStorage
    except (ImportError, AttributeError) as error:
        logger.warning("fast event storage is off for this version of Dagster: %s", error)

__all__ = ["FastSqliteStorage"]

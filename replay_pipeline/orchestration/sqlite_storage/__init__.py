"""Faster SQLite storage for Dagster's runs and events.

`dagster.yaml` names `FastSqliteStorage`. It writes the same files as Dagster's own SQLite storage,
so each can read the files of the other. It depends on internals of Dagster. If Dagster has another
minor version than those tested, or if these internals changed, the stock storage is used instead.
`REPLAY_FAST_STORAGE` overrides this with `1` or `0`.
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
    """Return whether to use the fast storage: because you asked for it, or because it was tested with this Dagster."""
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

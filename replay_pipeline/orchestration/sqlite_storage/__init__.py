"""Where Dagster keeps its runs and events: SQLite, with the waiting taken out.

`dagster.yaml` names `FastSqliteStorage`. It writes the very files that Dagster's own SQLite storage
writes, so either can open what the other has left. It stands on parts of Dagster that may change:
where they have, the stock storage takes its place and nothing else is different.
"""

import logging

from dagster._core.storage.sqlite_storage import DagsterSqliteStorage

logger = logging.getLogger(__name__)

try:
    from replay_pipeline.orchestration.sqlite_storage.fast import FastSqliteStorage
except (ImportError, AttributeError) as error:
    logger.warning("this Dagster keeps its events in its own, slower way: %s", error)
    FastSqliteStorage = DagsterSqliteStorage

__all__ = ["FastSqliteStorage"]

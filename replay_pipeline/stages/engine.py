"""Run stages. Unchanged work isn't done again, and finished work leaves a receipt.

A receipt records what decided the output of a stage (its version, settings, and inputs), its
outputs, its counts, and its time. You can repeat any run: it does only stale or open work, and pays
for nothing twice.
"""

import logging
import time

from replay_pipeline.stages import chain
from replay_pipeline.stages.project import Project
from replay_pipeline.stages.receipts import ALL, Receipt
from replay_pipeline.stages.stage import Changes, Stage, Task
from replay_pipeline.stages.staleness import changes_since, given_of

logger = logging.getLogger(__name__)


def do(stage: Stage, project: Project, batch: str = ALL) -> Receipt:
    """Do the work of a stage for a batch and write its receipt, unless the last receipt is still valid.

    Raises:
        ReplayPipelineError: the stage failed.
    """
    given = given_of(stage, project, batch)
    last = project.receipts.read(stage.name, batch)
    changes = changes_since(last, given) if last else Changes()
    if last and not _is_due(stage, project, last, changes):
        logger.info("%s %s: nothing has changed", stage.name, batch)
        return last
    started = time.perf_counter()
    task = Task(project=project, batch=batch, last=last, changes=changes, chain=chain.STAGES)
    report = stage.work(task)
    seconds = round(time.perf_counter() - started, 3)
    logger.info("%s %s: done in %.1f s", stage.name, batch, seconds)
    return project.receipts.write(
        Receipt(
            stage=stage.name,
            batch=batch,
            **vars(given),
            outputs=task.outputs,
            report=report,
            seconds=seconds,
        )
    )


def is_due(stage: Stage, project: Project, batch: str = ALL) -> bool:
    """Return whether `do` would have any work for a batch."""
    last = project.receipts.read(stage.name, batch)
    if last is None:
        return True
    return _is_due(stage, project, last, changes_since(last, given_of(stage, project, batch)))


def _is_due(stage: Stage, project: Project, last: Receipt, changes: Changes) -> bool:
    return bool(changes) or not (
        all(project.root.has(name, last.batch) for name in stage.writes)
        and stage.is_done(project, last)
    )

"""Run stages. Unchanged work isn't done again, and finished work leaves a receipt.

A receipt records the inputs of a stage (code, settings, and tables), its outputs, its counts, and
its time. You can repeat any run: it does only stale or open work, and pays for nothing twice.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from replay_pipeline.stages import chain
from replay_pipeline.stages.project import Project, file_digest
from replay_pipeline.stages.receipts import ALL, Receipt
from replay_pipeline.stages.stage import Changes, Report, Stage, Task
from replay_pipeline.stages.staleness import Given, changes_since, given_of

logger = logging.getLogger(__name__)

COPIED = ("batches", "dataset/manifests")
"""Folders whose files are copied into the index, since they can't be rebuilt from anything else."""


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
    report = stage.work(
        Task(project=project, batch=batch, last=last, changes=changes, chain=chain.STAGES)
    )
    seconds = round(time.perf_counter() - started, 3)
    logger.info("%s %s: done in %.1f s", stage.name, batch, seconds)
    return project.receipts.write(_receipt(stage, project, batch, given, report, seconds))


def is_due(stage: Stage, project: Project, batch: str = ALL) -> bool:
    """Return whether `do` would have any work for a batch."""
    last = project.receipts.read(stage.name, batch)
    if last is None:
        return True
    return _is_due(stage, project, last, changes_since(last, given_of(stage, project, batch)))


def _is_due(stage: Stage, project: Project, last: Receipt, changes: Changes) -> bool:
    """Return whether the last receipt does not hold any more.

    Paid answers of a version that did not say by what code it asked stay as they are: nothing says
    that the questions would be others today.
    """
    if changes.is_unknown and stage.pays and not last.versions:
        changes = replace(changes, is_unknown=False)
    return bool(changes) or not (
        all(project.root.has(name, last.batch) for name in stage.writes)
        and stage.is_there(project, last)
        and stage.is_final(project, last)
    )


def _receipt(
    stage: Stage, project: Project, batch: str, given: Given, report: Report, seconds: float
) -> Receipt:
    return Receipt(
        stage=stage.name,
        batch=batch,
        fingerprint=given.fingerprint,
        report=report,
        seconds=seconds,
        versions=dict(given.versions),
        settings=dict(given.settings),
        code_version=given.code_version,
        inputs=dict(given.inputs),
        outputs=project.digests(batch, stage.writes),
        files=file_digests(project, stage.files(project, batch)),
        data=stage.data(project),
    )


def file_digests(project: Project, names: Sequence[str]) -> dict[str, str]:
    """Return the digests of files by their names below the root, and copy the small, irreplaceable ones."""
    digests: dict[str, str] = {}
    copies: dict[str, list[tuple[str, bytes]]] = {}
    for name in names:
        place = project.place_of(name)
        if name.startswith("dataset/"):  # what was just written, and is not brought up yet
            place = project.dataset_copy() / name.removeprefix("dataset/")
        digests[name] = file_digest(place)
        folder, _, file = name.rpartition("/")
        if folder in COPIED:
            copies.setdefault(folder, []).append((file, place.read_bytes()))
    for folder, files in copies.items():
        project.index.put(folder, files)
    return digests


def amend_files(stage: Stage, project: Project) -> None:
    """Update the files in a stage's receipt after an intended change."""
    if last := project.receipts.read(stage.name, ALL):
        files = file_digests(project, stage.files(project, ALL))
        project.receipts.amend(replace(last, files=files, data=stage.data(project)))

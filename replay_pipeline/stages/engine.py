"""Run stages. Unchanged work isn't done again, and finished work leaves a receipt.

A receipt records the inputs of a stage (code, settings, and tables), its outputs, its counts, and
its time. You can repeat any run: it does only stale or open work, and pays for nothing twice.
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from replay_pipeline.replay import has_ledger
from replay_pipeline.replay.ledger import Ledger
from replay_pipeline.stages import chain
from replay_pipeline.stages.project import Project, file_digest
from replay_pipeline.stages.receipts import ALL, Receipt
from replay_pipeline.stages.stage import Changes, Report, Stage, Task
from replay_pipeline.stages.staleness import Given, changes_since, given_of
from replay_pipeline.storage.migrations import upgrade_tables
from replay_pipeline.storage.tables import DataRoot

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
        Task(
            project=project,
            batch=batch,
            into=project.root,
            last=last,
            changes=changes,
            chain=chain.STAGES,
        )
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


def do_aside(stage: Stage, project: Project, batch: str, folder: Path) -> None:
    """Repeat the work of a stage on a batch in another folder. Writes no receipt.

    Raises:
        ReplayPipelineError: the work can't be repeated, for example because a session's bytes are
            gone.
    """
    into = DataRoot(folder)
    stage.work(Task(project=project, batch=batch, into=into, is_aside=True, chain=chain.STAGES))


def upgrade(project: Project) -> dict[str, Any]:
    """Convert the tables and receipts of an older version, without logs and without paying.

    Tables get today's columns, and their texts today's secret rules. Receipts are converted
    unchanged, on the assumption that the root was made with its present settings. Returns the
    number of converted tables by name, and of receipts by stage.

    Raises:
        SchemaError: a table can't be read, or has an unknown version.
        LedgerError: the ledger can't be read, or has an unknown version.
    """
    if has_ledger(project.settings.ledger_url()):
        Ledger(project.settings.ledger_url()).close()  # brings itself up to date as it opens
    tables = upgrade_tables(project.root)
    receipts: Counter[str] = Counter()
    for stage in chain.by_batch():
        for batch in project.batches():
            last = project.receipts.read(stage.name, batch)
            if last is not None and (last.settings is None or not last.digest):
                _take_over(stage, project, last)
                receipts[stage.name] += 1
    return {"tables": tables, "receipts": dict(receipts)}


def _take_over(stage: Stage, project: Project, last: Receipt) -> None:
    """Write a receipt of an older version as one of today, with what it does not say left open."""
    started = time.perf_counter()
    given = given_of(stage, project, last.batch)
    if last.outputs:
        files = file_digests(project, stage.files(project, last.batch))
        inputs = {**given.inputs, **last.inputs}
        of_today = replace(
            last,
            settings=dict(given.settings) if last.settings is None else last.settings,
            code_version=given.code_version if last.versions == given.versions else "",
            inputs=inputs,
            files=files,
            is_reused=False,
        )
        project.receipts.amend(of_today)
        return
    report, versions = last.report, {}
    if stage.take_over is not None:
        task = Task(project=project, batch=last.batch, into=project.root, last=last)
        report = stage.take_over(task)
        # What was redacted is known to be so by the rules of today, and nothing else is known.
        versions = {name: given.versions[name] for name in ("secret rules",)}
    seconds = round(time.perf_counter() - started, 3)
    receipt = _receipt(stage, project, last.batch, given, report, seconds)
    project.receipts.write(replace(receipt, versions=versions, code_version=""))

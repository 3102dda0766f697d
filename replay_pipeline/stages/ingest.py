"""The stage that reads sessions."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from replay_pipeline.ingesters import (
    TraceBatch,
    ingest,
    is_kept,
    is_there,
    read_manifest,
    restore,
    without_states,
)
from replay_pipeline.ingesters.base import SourceSlice
from replay_pipeline.ingesters.corpus import IngestResult
from replay_pipeline.ingesters.fidelity import shares_by_client
from replay_pipeline.ingesters.log_rows import state_ids_for
from replay_pipeline.redaction.redactor import Redactor
from replay_pipeline.settings import Settings, redaction_salt
from replay_pipeline.stages.audit import tables
from replay_pipeline.stages.receipts import Overview, Receipt, added, hash_texts, shares_near, total
from replay_pipeline.stages.stage import Check, Report, Stage, Task
from replay_pipeline.stages.work.markdown import bars
from replay_pipeline.stages.work.redacting import redacted_again
from replay_pipeline.storage.folds import Fold
from replay_pipeline.types import TraceState, conversation_of

if TYPE_CHECKING:
    from replay_pipeline.stages.project import Project

logger = logging.getLogger(__name__)

TABLES = ("states", "sessions", "turns", "tools")


def read_sessions(task: Task) -> Report:
    """Read the sessions of a batch into `sessions`, `turns`, `states` and `tools`.

    If an earlier batch has an incomplete form of a decision, the decision moves to this batch. Only
    what depends on it is redone there, and no answer is paid for twice. If a log no longer exists,
    its kept bytes are read. Without kept bytes, it is counted as lost and the rest is read.
    """
    project, batch = task.project, task.batch
    manifest = read_manifest(batch, project.root.path)
    lost = lost_sources(project, manifest)
    is_less_than_before = task.last is not None and len(lost) > _n_lost(task.last.report)
    changes = task.changes
    if is_less_than_before and not (changes.settings or changes.inputs):
        # What was read from logs that are gone now, new rules must reach in the tables.
        return redact_again(task, n_lost=len(lost))
    with TemporaryDirectory() as name:
        result = _read(task, manifest, lost, Path(name))
        _write(task, _with_earlier_conversations(task, result).parts)
    for source in lost:
        logger.warning(
            "%s: left out, because the file no longer exists and its bytes were not kept",
            source.path,
        )
        result.report.skipped_files["gone"] += 1
    _supersede(task, result.state_ids)
    return result.report.to_json()


def _read(
    task: Task, manifest: TraceBatch, lost: Sequence[SourceSlice], folder: Path
) -> IngestResult:
    """Read what is there of a batch; logs that are gone are restored below `folder`."""
    project, batch, options = task.project, task.batch, task.project.settings.ingest
    kept, owners = project.settings.kept_dir(), owners_of(project)
    slices = [
        source
        if kept is None or is_there(source, cursor.tail_sha)
        else replace(source, copy=restore(source, kept, folder))
        for source, cursor in zip(manifest.slices, manifest.cursors, strict=True)
        if source not in lost
    ]
    return ingest(
        slices,
        redact=options.is_redacted,
        hash_project=options.is_project_hashed,
        known_state_ids=_Owned(owners, lambda owner: owner < batch),
        known_content=owners.content_of,
        superseded_state_ids=_Owned(owners, lambda owner: owner > batch),
        salt=redaction_salt(),
        on_progress=project.tell_part(batch),
    )


def _with_earlier_conversations(task: Task, result: IngestResult) -> IngestResult:
    """Return what was read with the names of the conversations of earlier batches that go on."""
    project = task.project
    moved = _moved_sessions(project).before(task.batch)
    names: dict[str, str] = {}
    for name, conversation in result.conversations.items():
        known = {moved[each] for each in conversation.named & moved.keys()}
        by_owner: dict[str, set[str]] = {}
        for state_id in conversation.copied:
            if owner := owners_of(project).get(state_id):
                by_owner.setdefault(owner, set()).add(state_id)
        for owner, copied in by_owner.items():
            states = project.root.read("states", owner, columns=["state_id", "conversation"])
            rows = zip(*(column.to_pylist() for column in states.columns), strict=True)
            known |= {earlier for state_id, earlier in rows if state_id in copied}
        if known - {name}:
            names[name] = min(known)
        if len(known) > 1:
            logger.warning(
                "%s: %s continues several conversations (%s) and counts as part of the first",
                task.batch, name, ", ".join(sorted(known)),
            )  # fmt: skip
    return result.renamed(names)


def lost_sources(project: "Project", manifest: TraceBatch) -> list[SourceSlice]:
    """Return the logs of a batch that no longer exist and have no kept bytes."""
    folder = project.settings.kept_dir()
    return [
        source
        for source, cursor in zip(manifest.slices, manifest.cursors, strict=True)
        if not is_there(source, cursor.tail_sha)
        and not (folder is not None and is_kept(source, folder))
    ]


def redact_again(task: Task, *, n_lost: int) -> Report:
    """Redact the tables of a batch in place, without reading its sessions again."""
    assert task.last is not None
    logger.info("%s: redacting its tables without reading its sessions again", task.batch)
    tables = {name: task.read(name) for name in TABLES}
    counts: Mapping[str, int] = {}
    if task.project.settings.ingest.is_redacted:
        tables, counts = redacted_again(tables, salt=redaction_salt())
    _write(task, tables)
    redactions = added([task.last.report["redactions"], counts])
    return {**task.last.report, "redactions": redactions, "n_files_gone": n_lost}


def _write(task: Task, tables: Mapping[str, pa.Table | Iterable[pa.Table]]) -> None:
    for name, table in tables.items():
        task.write(name, table)


def _supersede(task: Task, state_ids: set[str]) -> None:
    """Take these states out of the earlier batches that had them."""
    project, owned = task.project, dict[str, set[str]]()
    for state_id in state_ids:
        if (owner := owners_of(project).get(state_id) or task.batch) != task.batch:
            owned.setdefault(owner, set()).add(state_id)
    for owner, taken in sorted(owned.items()):
        left = without_states({name: project.root.read(name, owner) for name in TABLES}, taken)
        for name, table in left.items():
            project.write(name, owner, table)
        logger.info(
            "%s: moved %d states to %s, which has them complete", owner, len(taken), task.batch
        )
        if receipt := project.receipts.read("ingest", owner):
            outcomes = Counter(left["states"]["outcome"].to_pylist())
            report = {
                **receipt.report,
                **{f"n_{name}": left[name].num_rows for name in ("sessions", "turns", "states")},
                "outcomes": dict(sorted(outcomes.items())),
                "fidelity": shares_by_client(left["sessions"], left["states"]),
                "n_superseded": receipt.report.get("n_superseded", 0) + len(taken),
            }
            outputs = project.digests(owner, TABLES)
            project.receipts.write(replace(receipt, report=report, outputs=outputs))
    owners_of(project).update(dict.fromkeys(state_ids, task.batch))


def owners_of(project: "Project") -> "_Owners":
    """Return the batch that owns each state: the last one that read it."""
    return project.once("owners", lambda: _Owners(project))


class _Owners(dict[str, str]):
    """The batch that owns each state."""

    def __init__(self, work: "Project") -> None:
        super().__init__()
        self._root = work.root
        self._contents: dict[str, dict[str, str]] = {}
        for batch in sorted(each.batch for each in work.receipts.all(stage="ingest")):
            if work.root.has("states", batch):
                ids = work.root.read("states", batch, columns=["state_id"])[0].to_pylist()
                self.update(dict.fromkeys(ids, batch))

    def content_of(self, state_id: str) -> str | None:
        """Return `content_sha` of a state, if there is one."""
        owner = self.get(state_id)
        if owner is None:
            return None
        if owner not in self._contents:
            names = ["state_id", "content_sha"]
            columns = self._root.read("states", owner, columns=names).columns
            self._contents[owner] = dict(zip(*(c.to_pylist() for c in columns), strict=True))
        return self._contents[owner].get(state_id)


def _moved_sessions(project: "Project") -> Fold[dict[str, str]]:
    """Return the conversations of sessions that go on with one of an earlier batch."""

    def add(known: dict[str, str], batch: str) -> dict[str, str]:
        if not project.root.has("sessions", batch):
            return known
        names = ["session_id", "conversation"]
        sessions = project.root.read("sessions", batch, columns=names).columns
        moved = zip(
            map(conversation_of, sessions[0].to_pylist()), sessions[1].to_pylist(), strict=True
        )
        return known | {name: whole for name, whole in moved if name != whole}

    return project.once("moved sessions", lambda: project.fold("sessions", dict[str, str], add))


class _Owned:
    """The states whose batch `is_wanted`, without a set of their own for each question."""

    def __init__(self, owners: "_Owners", is_wanted: Callable[[str], bool]) -> None:
        self._owners, self._is_wanted = owners, is_wanted

    def __contains__(self, state_id: str) -> bool:
        owner = self._owners.get(state_id)
        return owner is not None and self._is_wanted(owner)


def _log_rows(project: "Project", batch: str, state: TraceState) -> Mapping[str, Any]:
    """Find the rows of the logs that a state was read from, redacted as its tables are."""
    redactor, found = Redactor(salt=redaction_salt()), list[dict[str, Any]]()
    folder, is_redacted = project.settings.kept_dir(), project.settings.ingest.is_redacted
    with TemporaryDirectory() as name:
        for source in read_manifest(batch, project.root.path).slices:
            path = source.place
            if not path.is_file() and folder is not None and is_kept(source, folder):
                path = restore(source, folder, Path(name))
            lines = path.read_bytes().splitlines() if path.is_file() else []
            for number, line in enumerate(lines, 1):
                with suppress(ValueError, AttributeError):
                    row = json.loads(line)
                    known = (row.get("message") or {}).get("id") or row.get("uuid") or ""
                    if state_ids_for([known]) == [state["state_id"]]:
                        text = line.decode().strip()
                        where = f"{source.path.name}:{number}"
                        found.append({where: redactor.text(text) if is_redacted else text})
    return {"log rows": found}


def _decisive(settings: Settings) -> Mapping[str, Any]:
    return {"ingest": settings.ingest.model_dump(include={"is_redacted", "is_project_hashed"})}


def _inputs(project: "Project", batch: str) -> Mapping[str, str]:
    return {"sessions": hash_texts([read_manifest(batch, project.root.path).to_json()])}


def _n_lost(report: Report) -> int:
    return report.get("skipped_files", {}).get("gone", 0)


def _is_done(project: "Project", receipt: Receipt) -> bool:
    """Return whether no log that was gone has come back."""
    if not (n_lost := _n_lost(receipt.report)):
        return True
    manifest = read_manifest(receipt.batch, project.root.path)
    return n_lost <= len(lost_sources(project, manifest))


def _figures(receipts: Sequence[Receipt]) -> Mapping[str, Any]:
    fresh = [receipt for receipt in receipts if not receipt.is_reused]
    return {
        "batches": len(receipts),
        "sessions": total(receipts, "n_sessions"),
        "new_files": total(fresh, "files"),
        "new_rows": total(fresh, "rows"),
        "new_rows_used": total(fresh, "rows_used"),
        "model_answers": added(r.report.get("answers", {}) for r in fresh),
        "new_sessions": total(fresh, "n_sessions"),
        "new_states": total(fresh, "n_states"),
        "redactions": added(r.report.get("redactions", {}) for r in receipts),
        "fidelity": _fidelity(receipts),
        "turns": total(receipts, "n_turns"),
        "states": total(receipts, "n_states"),
        "rows_skipped": added(r.report.get("skipped", {}) for r in fresh),
        "files_skipped": added(r.report.get("skipped_files", {}) for r in fresh),
    }


def _fidelity(receipts: Sequence[Receipt]) -> float | None:
    """Share of the states with a recorded usage whose prefix is predicted within 10 % of it."""
    clients = shares_near(receipt.report.get("fidelity") for receipt in receipts).values()
    n_states, n_near = (sum(each[i] for each in clients) for i in (0, 1))
    return n_near / n_states if n_states else None


def _facts(_: Overview, receipt: Receipt) -> Mapping[str, Any]:
    report = receipt.report
    return {
        "dagster/partition_row_count": report["n_states"],
        "sessions": report["n_sessions"],
        "turns": report["n_turns"],
        "rows": report["rows"],
        "rows_used": report["rows_used"],
        "redacted_values": sum(report["redactions"].values()),
        "outcomes": bars(report["outcomes"]),
        "rows_skipped": bars(report["skipped"]),
        "redactions": bars(report["redactions"]),
    }


INGEST = Stage(
    name="ingest",
    about="Every decision point of the batch: what the agent saw, did, and what came of it.",
    version=9,
    work=read_sessions,
    writes=TABLES,
    settings=_decisive,
    inputs=_inputs,
    is_done=_is_done,
    told="n_states",
    figures=_figures,
    facts=_facts,
    trace=_log_rows,
    checks=(
        Check(name="every_row_is_accounted_for", look=tables.rows_accounted),
        Check(name="states_are_whole", look=tables.whole_states, is_blocking=True),
        Check(name="prefixes_are_faithful", look=tables.faithful_prefixes),
    ),
    asset="trace_states",
)

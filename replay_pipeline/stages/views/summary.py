"""Figures and views for people: a run, a night, and ranked pairs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from replay_pipeline.replay import has_ledger, ledger_status, spent_since
from replay_pipeline.stages import chain
from replay_pipeline.stages.budget.spending import completed_batches
from replay_pipeline.stages.pages.pairs import rank_pairs
from replay_pipeline.stages.project import Project
from replay_pipeline.stages.receipts import Receipt, added, total
from replay_pipeline.stages.replay import open_work


def summarize(receipts: Sequence[Receipt]) -> dict[str, Any]:
    """Add up the receipts of all batches. Calls, new dollars, and seconds count this run only.

    The made-up answers of a rehearsal have their own figures, and aren't in any sum of real
    answers.
    """
    of: dict[str, list[Receipt]] = defaultdict(list)
    for receipt in receipts:
        of[receipt.stage].append(receipt)
    figures: dict[str, Any] = {"seconds": {}}
    for stage in chain.STAGES:
        figures |= stage.figures(of[stage.name])
        if done := of[stage.name]:
            seconds = sum(receipt.seconds for receipt in done if not receipt.is_reused)
            figures["seconds"][stage.name] = round(seconds, 3)
    return figures | {"open": open_work([receipt.report for receipt in of["replay"]])}


def night_of(
    project: Project, *, since: datetime, failures: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the work of a night, for people to read in the morning. `failures` are failed runs."""
    of: dict[str, list[Receipt]] = defaultdict(list)
    for receipt in project.receipts.all():
        if receipt.at >= since.isoformat():
            of[receipt.stage].append(receipt)
    spent_usd = spent_since(project.settings.ledger_url(), since, kind="night:")
    return {
        "sessions": total(of["ingest"], "n_sessions"),
        "states": total(of["ingest"], "n_states"),
        "batches_found": len(of["ingest"]),
        "batches_replayed": len(of["replay"]),
        "batches_open": len(set(project.batches()) - completed_batches(project)),
        "calls": total(of["replay"], "n_sent"),
        "answers": total(of["replay"], "n_answers"),
        "failed_calls": total(of["replay"], "n_failed"),
        "only_looked": total(of["replay"], "n_only_looked"),
        "spent_usd": round(spent_usd, 6),
        "max_nightly_usd": project.settings.replay.max_nightly_usd,
        "lessons": total(of["pairs"], "n_lessons"),
        "confirmed": total(of["pairs"], "n_agreement"),
        "pairs": total(of["pairs"], "n_pairs"),
        "pairs_kept": total(of["normalize"], "n_kept"),
        "pairs_dropped": total(of["normalize"], "n_dropped"),
        "runs_failed": len(failures),
        "stopped_by_budget": sum(r.report.get("stop_reason") == "budget" for r in of["replay"]),
        "dropped": added(r.report.get("dropped", {}) for r in of["normalize"]),
        "errors": added(r.report.get("errors", {}) for r in of["replay"]),
        "failures": [dict(failure) for failure in failures],
    }


def night_words(night: Mapping[str, Any]) -> str:
    """Describe a night in one or two sentences, with the next step if there is one."""
    words = (
        f"{night['sessions']} sessions found, {night['batches_replayed']} batches replayed with "
        f"{night['calls']} calls for ${night['spent_usd']:.2f} of ${night['max_nightly_usd']:.2f}: "
        f"{night['lessons']} lessons, {night['confirmed']} confirmed actions, and {night['pairs']} pairs, "
        f"{night['pairs_kept']} of them kept."
    )
    if night["stopped_by_budget"]:
        words += (
            f" The budget ended before {night['stopped_by_budget']} batches did; they go on next "
            "night, or raise `replay.max_nightly_usd`."
        )
    if night["runs_failed"]:
        words += (
            f" {night['runs_failed']} runs failed; their batches are tried again next night. "
            "Look at the reasons below."
        )
    return words


def ranked_pairs(project: Project) -> list[Mapping[str, Any]]:
    """Return the rows of all pairs, those first that most need a review.

    Raises:
        ConfigError: no batch has pairs yet.
    """
    project.batches_with("dpo_pairs")
    return rank_pairs(project.root.read_all("dpo_pairs").to_pylist())


def summary_of(project: Project, *, since: str) -> dict[str, Any]:
    """Return the figures of all stages. Work after the time `since` counts as new."""
    receipts = list(project.receipts.all(since=since))
    figures = summarize(receipts)
    # A session that grew is in several batches.
    batches = project.root.batches("sessions")
    columns = (project.root.read("sessions", key, columns=["session_id"])[0] for key in batches)
    figures["sessions"] = len({each for column in columns for each in column.to_pylist()})
    figures["max_total_usd"] = project.settings.replay.max_total_usd
    if has_ledger(url := project.settings.ledger_url()):
        # As `status` tells it: receipts don't know what was bought for another question.
        figures["spent_usd"] = round(ledger_status(url).spent_usd, 6)
    figures["dataset"] = str(project.settings.dataset_dir())
    return figures

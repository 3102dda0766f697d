"""The figures of a whole run, from the receipts of its stages."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from replay_pipeline.replay import NOT_ASKED
from replay_pipeline.stages.receipts import Receipt

BATCH_STAGES = ("ingest", "replay", "pairs", "normalize")
"""The stages that work batch by batch, in order."""

STAGES = (*BATCH_STAGES, "publish", "train")
"""All stages, in order."""


def summarize(receipts: Sequence[Receipt], *, n_teachers: int = 0) -> dict[str, Any]:
    """Add up the receipts of all batches. Calls, new dollars and seconds are of this run alone.

    What was made up in a rehearsal has figures of its own, and is in no sum of real answers.

    Args:
        receipts: the last receipts of all stages.
        n_teachers: how many real teachers there are to ask.
    """
    of = {stage: [r for r in receipts if r.stage == stage] for stage in STAGES}
    fresh = {stage: [r for r in of[stage] if not r.is_reused] for stage in STAGES}
    real = [r for r in of["replay"] if not is_play(r.report)]
    fresh_real = [r for r in fresh["replay"] if not is_play(r.report)]
    publish = of["publish"][-1].report if of["publish"] else {}
    return {
        "batches": len(of["ingest"]),
        "sessions": _total(of["ingest"], "n_sessions"),
        "new_sessions": _total(fresh["ingest"], "n_sessions"),
        "new_states": _total(fresh["ingest"], "n_states"),
        "redactions": added(r.report.get("redactions", {}) for r in of["ingest"]),
        "fidelity": _fidelity(of["ingest"]),
        "open": open_work([r.report for r in of["replay"]], n_teachers=n_teachers),
        "turns": _total(of["ingest"], "n_turns"),
        "states": _total(of["ingest"], "n_states"),
        "rows_skipped": added(r.report.get("skipped", {}) for r in of["ingest"]),
        "files_skipped": added(r.report.get("skipped_files", {}) for r in of["ingest"]),
        "calls": _total(fresh_real, "n_sent"),
        "answers": _total(real, "n_answers"),
        "failed_calls": _total(real, "n_failed"),
        "rehearsed_answers": _total(of["replay"], "n_rehearsed"),
        "spent_usd": round(_total(of["replay"], "spent_usd"), 6),
        "newly_spent_usd": round(_total(fresh["replay"], "newly_spent_usd"), 6),
        "agreements": _total(of["pairs"], "n_consensus"),
        "agreements_with_student": _total(of["pairs"], "n_agreement"),
        "pairs": _total(of["pairs"], "n_pairs"),
        "outcomes": added(r.report.get("outcomes", {}) for r in of["pairs"]),
        "normalized_pairs": _total(of["normalize"], "n_kept"),
        "dropped": added(r.report.get("dropped", {}) for r in of["normalize"]),
        "rows_by_split": publish.get("rows_by_split", {}),
        "checks": publish.get("checks", {}),
        "train": of["train"][-1].report if of["train"] else {},
        "seconds": {stage: round(sum(r.seconds for r in fresh[stage]), 3) for stage in STAGES},
    }


def is_play(replay: Mapping[str, Any]) -> bool:
    """Whether the answers in the report of a replay were made up in a rehearsal."""
    return bool(replay.get("n_rehearsed"))


OPEN_WORK = (
    "n_states",
    "n_answers",
    "n_rehearsed",
    "spent_usd",
    "forecast_usd",
    "skipped",
    "errors",
    "stop_reason",
)
"""What `open_work` looks at in the report of a replay."""


def open_work(
    replays: Sequence[Mapping[str, Any]], *, n_teachers: int = 0, n_states_waiting: int = 0
) -> dict[str, Any]:
    """Say what the replays have left to do, why they stopped, and what finishing costs.

    Args:
        replays: reports of the replays of all batches, those of rehearsals among them.
        n_teachers: how many real teachers there are to ask.
        n_states_waiting: states of the batches that were never replayed.

    Returns:
        Questions that were not asked though no gate saved them, what they cost in US dollars if
        they cost what the answers did (what was expected where nothing was answered, `None` where
        nothing was expected either), the reasons for which
        the replays ended, and failed calls by error. Questions that no real teacher was ever asked
        have a figure of their own, before gates; what a rehearsal made up counts nowhere else.
    """
    played = [report for report in replays if is_play(report)]
    replays = [report for report in replays if not is_play(report)]
    n_states_waiting += sum(report.get("n_states", 0) for report in played)
    skipped = added(report.get("skipped", {}) for report in replays)
    n_left = sum(skipped.get(reason, 0) for reason in NOT_ASKED)
    n_answers = sum(report["n_answers"] for report in replays)
    spent_usd = sum(report["spent_usd"] for report in replays)
    expected_usd = sum(report.get("forecast_usd") or 0.0 for report in replays)
    return {
        "n_questions_left": n_left,
        "left_usd": n_left * spent_usd / n_answers if n_answers else expected_usd or None,
        "stop_reasons": dict(Counter(report.get("stop_reason", "unknown") for report in replays)),
        "errors": added(report.get("errors", {}) for report in replays),
        "n_answers": n_answers,
        "n_never_asked": n_states_waiting * n_teachers,
        "n_rehearsed": sum(report["n_rehearsed"] for report in played),
    }


def _fidelity(ingests: Sequence[Receipt]) -> float | None:
    """Share of the states with a recorded usage whose prefix is predicted within 10 % of it."""
    clients = [row for r in ingests for row in r.report.get("fidelity", {}).values()]
    n_states = sum(row["n_states"] for row in clients)
    n_near = sum(row["n_states"] * row["share_within_10_percent"] for row in clients)
    return n_near / n_states if n_states else None


def summarize_night(
    receipts: Sequence[Receipt],
    *,
    since: datetime,
    spent_usd: float,
    max_nightly_usd: float,
    n_open: int,
    failures: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Tell what was done since then, for a person who looks in the morning.

    Args:
        receipts: all receipts; older ones are left out.
        since: when the night began.
        spent_usd: what the ledger booked since then.
        max_nightly_usd: what one night may spend.
        n_open: batches that still wait for answers.
        failures: runs that failed.
    """
    began = since.isoformat()
    of = {
        stage: [r for r in receipts if r.stage == stage and r.at >= began] for stage in BATCH_STAGES
    }
    return {
        "sessions": _total(of["ingest"], "n_sessions"),
        "states": _total(of["ingest"], "n_states"),
        "batches_found": len(of["ingest"]),
        "batches_replayed": len(of["replay"]),
        "batches_open": n_open,
        "calls": _total(of["replay"], "n_sent"),
        "answers": _total(of["replay"], "n_answers"),
        "failed_calls": _total(of["replay"], "n_failed"),
        "spent_usd": round(spent_usd, 6),
        "max_nightly_usd": max_nightly_usd,
        "pairs": _total(of["pairs"], "n_pairs"),
        "pairs_kept": _total(of["normalize"], "n_kept"),
        "pairs_dropped": _total(of["normalize"], "n_dropped"),
        "runs_failed": len(failures),
        "stopped_by_budget": sum(r.report.get("stop_reason") == "budget" for r in of["replay"]),
        "dropped": added(r.report.get("dropped", {}) for r in of["normalize"]),
        "errors": added(r.report.get("errors", {}) for r in of["replay"]),
        "failures": [dict(failure) for failure in failures],
    }


def night_words(night: Mapping[str, Any]) -> str:
    """Give a night in a sentence or two, with what to do if there is something to do."""
    words = (
        f"{night['sessions']} sessions found, {night['batches_replayed']} batches replayed with "
        f"{night['calls']} calls for ${night['spent_usd']:.2f} of ${night['max_nightly_usd']:.2f}: "
        f"{night['pairs']} pairs, {night['pairs_kept']} kept."
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


def _total(receipts: Iterable[Receipt], key: str) -> float:
    return sum(receipt.report.get(key) or 0 for receipt in receipts)


def added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up counts by name, sorted by name."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(sorted(total.items()))

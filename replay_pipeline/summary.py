"""The figures of a whole run, from the receipts of its stages."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replay_pipeline.receipts import Receipt

BATCH_STAGES = ("ingest", "replay", "pairs", "normalize")
"""The stages that work batch by batch, in order."""

STAGES = (*BATCH_STAGES, "publish", "train")
"""All stages, in order."""


def summarize(receipts: Sequence[Receipt]) -> dict[str, Any]:
    """Add up the receipts of all batches. Calls, new dollars and seconds are of this run alone."""
    of = {stage: [r for r in receipts if r.stage == stage] for stage in STAGES}
    fresh = {stage: [r for r in of[stage] if not r.is_reused] for stage in STAGES}
    publish = of["publish"][-1].report if of["publish"] else {}
    return {
        "batches": len(of["ingest"]),
        "sessions": _total(of["ingest"], "n_sessions"),
        "turns": _total(of["ingest"], "n_turns"),
        "states": _total(of["ingest"], "n_states"),
        "rows_skipped": _added(r.report.get("skipped", {}) for r in of["ingest"]),
        "calls": _total(fresh["replay"], "n_sent"),
        "answers": _total(of["replay"], "n_answers"),
        "failed_calls": _total(of["replay"], "n_failed"),
        "spent_usd": round(_total(of["replay"], "spent_usd"), 6),
        "newly_spent_usd": round(_total(fresh["replay"], "newly_spent_usd"), 6),
        "agreements": _total(of["pairs"], "n_consensus"),
        "agreements_with_student": _total(of["pairs"], "n_agreement"),
        "pairs": _total(of["pairs"], "n_pairs"),
        "outcomes": _added(r.report.get("outcomes", {}) for r in of["pairs"]),
        "normalized_pairs": _total(of["normalize"], "n_kept"),
        "dropped": _added(r.report.get("dropped", {}) for r in of["normalize"]),
        "rows_by_split": publish.get("rows_by_split", {}),
        "train": of["train"][-1].report if of["train"] else {},
        "seconds": {stage: round(sum(r.seconds for r in fresh[stage]), 3) for stage in STAGES},
    }


def _total(receipts: Iterable[Receipt], key: str) -> float:
    return sum(receipt.report.get(key) or 0 for receipt in receipts)


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in counts:
        for key, count in each.items():
            total[key] = total.get(key, 0) + count
    return dict(sorted(total.items()))

"""Is a batch unlike the ones before it?

A check compares the rate of a batch with the median of earlier batches. The distance is in units of
their spread (the median absolute deviation, which a few odd batches can't move) plus the sampling
error of the batch's own rate.
"""

from collections.abc import Sequence
from math import sqrt
from statistics import median
from typing import NamedTuple

from replay_pipeline.stages.audit.verdict import AuditResult
from replay_pipeline.stages.receipts import Receipt, Receipts
from replay_pipeline.storage.tables import DataRoot

MIN_ROWS = 30
"""A batch with fewer rows isn't judged, and isn't compared with."""
MIN_BATCHES = 5
"""With fewer earlier batches, nothing is judged."""
MAX_BATCHES = 30
"""Only this many of the latest batches are compared with."""
MAX_SCORE = 3.5
"""Robust z-score from which a value counts as an outlier (Iglewicz and Hoaglin, 1993)."""
MIN_CHANGE = 0.05
"""A smaller change of the rate is ignored, even if it is certain."""
_MAD_TO_SIGMA = 1.4826


class Rate(NamedTuple):
    """`n_hits` of `n_rows`."""

    n_hits: int
    n_rows: int

    @property
    def share(self) -> float:
        """Return the plain share, or 0 without rows."""
        return self.n_hits / max(1, self.n_rows)

    @property
    def value(self) -> float:
        """Return the share, smoothed a little so that 0 of 30 doesn't look certain."""
        return (self.n_hits + 0.5) / (self.n_rows + 1)


def score(now: Rate, before: Sequence[Rate]) -> float | None:
    """Return the distance of `now` from the earlier rates, in robust standard deviations.

    None if there are too few rows or batches.
    """
    usual = [rate.value for rate in before if rate.n_rows >= MIN_ROWS][-MAX_BATCHES:]
    if now.n_rows < MIN_ROWS or len(usual) < MIN_BATCHES:
        return None
    center = median(usual)
    spread = _MAD_TO_SIGMA * median(abs(value - center) for value in usual)
    chance = sqrt(center * (1 - center) / now.n_rows)
    return (now.value - center) / sqrt(spread**2 + chance**2)


def agreement_drift(root: DataRoot, batches: Sequence[str]) -> AuditResult:
    """Do the teachers agree as often as in earlier batches?"""
    return _drift(
        "states with a consensus",
        {r.batch: _consensus_rate(r) for r in Receipts(root.path).all(stage="pairs")},
        batches,
        what_to_do="Look at `errors` and the agreement matrix of the batch: a teacher that was "
        "changed behind its name, a new kind of session, or a tool without a schema.",
    )


def drop_drift(root: DataRoot, batches: Sequence[str]) -> AuditResult:
    """Does the recipe drop as many pairs as in earlier batches?"""
    return _drift(
        "pairs dropped",
        {r.batch: _drop_rate(r) for r in Receipts(root.path).all(stage="normalize")},
        batches,
        what_to_do="Look at `dropped_by` of the batch: one operator usually explains it. If the "
        "sessions have changed for good, adapt the recipe's limit.",
    )


def _drift(
    what: str, rates: dict[str, Rate], batches: Sequence[str], *, what_to_do: str
) -> AuditResult:
    order = sorted(rates)
    problems: list[str] = []
    scores: list[float] = []
    for key in sorted(set(batches) & set(order)):
        earlier = [rates[other] for other in order if other < key]
        z = score(rates[key], earlier)
        if z is None:
            continue
        scores.append(z)
        usual = median(rate.value for rate in earlier if rate.n_rows >= MIN_ROWS)
        if abs(z) > MAX_SCORE and abs(rates[key].value - usual) >= MIN_CHANGE:
            problems.append(
                f"batch {key}: {rates[key].share:.0%} {what}, usually {usual:.0%} "
                f"({z:+.1f} standard deviations)"
            )
    latest = rates[max(set(batches) & set(order))] if set(batches) & set(order) else Rate(0, 0)
    return AuditResult(
        problems=problems,
        what_to_do=what_to_do,
        facts={
            "rate": latest.share,
            "rows": latest.n_rows,
            **({"farthest": f"{max(scores, key=abs):+.1f} standard deviations"} if scores else {}),
        },
        judged=len(scores),
        is_warning=True,
    )


def _consensus_rate(receipt: Receipt) -> Rate:
    n_hits = receipt.report["n_consensus"]
    return Rate(n_hits, n_hits + receipt.report["outcomes"].get("no_consensus", 0))


def _drop_rate(receipt: Receipt) -> Rate:
    return Rate(receipt.report["n_dropped"], receipt.report["n_in"])

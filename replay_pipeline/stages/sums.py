"""Add up the counts of receipts."""

from collections import Counter
from collections.abc import Iterable, Mapping

from replay_pipeline.stages.receipts import Receipt


def total(receipts: Iterable[Receipt], key: str) -> float:
    """Return the sum of a figure over receipts."""
    return sum(receipt.report.get(key) or 0 for receipt in receipts)


def added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return counts added up by name, sorted by name."""
    found: Counter[str] = Counter()
    for each in counts:
        found.update(each)
    return dict(sorted(found.items()))

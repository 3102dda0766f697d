"""Which work the installed code would do otherwise, and what follows for publishing."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from replay_pipeline.errors import CheckFailedError
from replay_pipeline.stages.receipts import Receipt, Written

UNKNOWN = "unknown"
"""Reason of a receipt that does not say by what code it was made, as those of 0.1.0."""

_NEW_ROWS = "new rows of {}"
"""Reason of a receipt whose tables were made from rows that have been written anew since."""

_HELD_UP_BY = {
    "ingest": {"secret rules", UNKNOWN},
    "pairs": {_NEW_ROWS.format("turns"), _NEW_ROWS.format("states")},
    "sample": {_NEW_ROWS.format("turns"), _NEW_ROWS.format("states")},
    "normalize": {_NEW_ROWS.format("dpo_pairs"), _NEW_ROWS.format("sampled_pairs")},
}
"""Reasons for which a text may be published that the rules of today would not leave as it is."""

Outdated = Mapping[str, Mapping[str, Sequence[str]]]
"""Batch, stage → why it is not what the installed code would make."""


def changed_parts(receipt: Receipt | Written, versions: Mapping[str, str]) -> list[str]:
    """Name the parts of the code that have changed since the receipt was written.

    Replays of 0.1.0 count as unchanged: their answers are paid for, and nothing says that the
    questions would be others today.
    """
    if receipt.stage == "replay" and not receipt.versions:
        return []
    return [part for part, digest in versions.items() if receipt.versions.get(part) != digest]


def find_outdated(
    receipts: Iterable[Receipt | Written], versions_of: Callable[[str], Mapping[str, str]]
) -> dict[str, dict[str, list[str]]]:
    """Say of each batch and stage why it is outdated; what is up to date is left out.

    Args:
        receipts: the last receipts of all stages; none is kept, as there may be very many.
        versions_of: the versions of a stage's parts today.
    """
    written: dict[tuple[str, str], str] = {}
    read: list[tuple[str, str, list[str], Mapping[str, str]]] = []
    for receipt in receipts:
        written |= {(receipt.batch, table): digest for table, digest in receipt.outputs.items()}
        versions = versions_of(receipt.stage)
        reasons = (
            changed_parts(receipt, versions) if receipt.versions or not versions else [UNKNOWN]
        )
        read.append((receipt.batch, receipt.stage, reasons, receipt.inputs))
    found: dict[str, dict[str, list[str]]] = {}
    for batch, stage, reasons, inputs in read:
        reasons += [
            _NEW_ROWS.format(table)
            for table, digest in inputs.items()
            if written.get((batch, table), digest) != digest
        ]
        if reasons:
            found.setdefault(batch, {})[stage] = reasons
    return dict(sorted(found.items()))


def refuse_outdated(outdated: Outdated, batches: Iterable[str]) -> None:
    """See that what these batches would publish was redacted by the rules of today.

    Raises:
        CheckFailedError: one was not, or its pairs come from rows that were redacted anew since.
    """
    for batch in batches:
        for stage, blocking in _HELD_UP_BY.items():
            for reason in blocking.intersection(outdated.get(batch, {}).get(stage, ())):
                raise CheckFailedError(
                    f"nothing was published: what batch {batch} has of stage `{stage}` is stale "
                    f"({reason}), so its texts may not be redacted by the rules of today. "
                    "`replay-pipeline run` does again what is stale and pays for nothing twice; "
                    "`replay-pipeline status --stale` lists it"
                )
